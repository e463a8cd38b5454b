// Tile-gather: the 64 tokens of one selection block share a stream over the union of the blocks they chose. A step
// takes one block and the rows of up to GATHER_TOKENS of the tokens that chose it, wherever they lie in the tile:
// queries are gathered from shared memory, and results are added to sums in shared memory. Only keys and values move
// through L2, and the lists of the inverted index are not needed. The forced blocks' output comes from selected_dense,
// and the kernel ends with the gated sum of the branches.
//
// Four warpgroups take the steps in turn. They add their results in the order of the steps, so that a row's sum has a
// fixed order, that of its blocks; a turn is a named barrier of two warpgroups. A seventeenth warp requests keys and
// values. The limit is the bandwidth of shared memory: of a step 32 KB are sums, 16 KB keys and values, 8 KB queries.
#pragma once
#include "combination.cuh"
#include "forward.cuh"
#include "plan.cuh"

#define HAS_GATHER (DK == 64 && DV == 64 && SEL_L == 64 && HPG <= 6 && SEL_N <= 16)

#if HAS_GATHER
constexpr int GATHER_WARPGROUPS = 4, GATHER_STAGES = 4;
constexpr int GATHER_STEPPERS = GATHER_WARPGROUPS * 128;  // threads that take steps
constexpr int GATHER_THREADS = GATHER_STEPPERS + 32;
constexpr int GATHER_TOKENS = 64 / HPG;  // of a step
constexpr int GATHER_ROWS = 64 * HPG;    // of a tile; one more stands for the rows that a step does not have
constexpr int GATHER_CHOICES = 64 * (SEL_N > 3 ? SEL_N - 3 : 1);
constexpr int GATHER_STEPS_OF_BLOCK = (64 + GATHER_TOKENS - 1) / GATHER_TOKENS;
// Parts of a row of sums: a warpgroup adds to the second while the next one adds to the first.
constexpr int GATHER_PARTS = 2;
static_assert(GATHER_CHOICES < 1024, "three counts share a word");
static_assert(4096 * 3 * 4 <= GATHER_STAGES * PACKED, "masks of 4,096 blocks fit the ring");
static_assert(GATHER_STEPS_OF_BLOCK < 32, "arrivals of a step are five bits");

// Shared memory, after the ring of keys and values.
struct Gather {
  unsigned char queries[(GATHER_ROWS + 8) * 128];  // bf16, rows swizzled as in a panel
  float sums[(GATHER_ROWS + 1) * 64];              // rows of 16 units of 16 bytes, see gather_place
  float total[GATHER_ROWS + 8];                    // of the row's weights
  float own[GATHER_ROWS + 8];        // what the row's weights are relative to: the forced blocks' log-sum-exp (base 2)
  float reference[GATHER_ROWS + 8];  // what its sums are relative to: differs from `own` only after an overflow
  u64 full[GATHER_STAGES], empty[GATHER_STAGES];
  u32 counts[GATHER_STEPPERS / 32];
  u32 steps[GATHER_CHOICES];              // bits 0:10 index of the block, 10:20 first place in `rows`, 20:27 tokens,
                                          // 27:32 how often each warp arrives at `empty`
  unsigned short blocks[GATHER_CHOICES];  // of the union, ascending
  unsigned short rows[GATHER_CHOICES];    // for each block of the union: the first rows of its tokens, ascending
  u32 all;                                // number of blocks (bits 0:10), of choices (10:20) and of steps (20:30)
  int moved;                              // whether any reference differs from `own`
};
constexpr int GATHER_SHARED = GATHER_STAGES * PACKED + (int)sizeof(Gather) + 1024;
EXPORT(selected_gather_shared, GATHER_SHARED)
EXPORT(selected_gather_threads, GATHER_THREADS)

// A thread's four columns 16 * i + 2 * q + {0, 1, 8, 9} of an accumulator, q = lane % 4, are one unit of 16 bytes. Unit
// i of a row is at this place with bit 6 turned over for odd i, and 128 bytes further for i >= 2: two neighbouring rows
// use the two halves of the banks.
__device__ __forceinline__ u32 gather_place(int row, int q) { return row * 256 + ((row & 1) * 4 + q) * 16; }
__device__ __forceinline__ float4 load_unit(u32 at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_unit(u32 at, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// One tile. Row r of it is row place(r) of the arrays, which begin at the tile's first row.
struct GatherTile {
  Gather& g;
  u32 ring;  // of keys and values; until the lists are built, the masks of gather_lists
  const bf16 *q, *cmp, *win;
  const float* gates;
  bf16 *out, *combined;
  float* lse;
  int tokens;
  u64 wanted;  // tokens whose stretch this kernel works on
  __device__ __forceinline__ static u32 place(u32 r) { return r + r / HPG * (HEADS - HPG); }
  __device__ __forceinline__ int rows() const { return tokens * HPG; }
  __device__ __forceinline__ u32 full(u32 block) const { return shared_address(g.full) + block % GATHER_STAGES * 8; }
  __device__ __forceinline__ u32 empty(u32 block) const { return shared_address(g.empty) + block % GATHER_STAGES * 8; }
};

// Starts the copy of the queries; HPG * 8 threads copy those of a token.
__device__ __forceinline__ void gather_queries(const GatherTile& tile) {
  constexpr int AT_ONCE = GATHER_STEPPERS / (HPG * 8);
  const int thread = threadIdx.x, chunk = thread % 8, head = thread / 8 % HPG, token = thread / (HPG * 8);
  const u32 to = shared_address(tile.g.queries);
  const bf16* const from = tile.q + (u32)((token * HEADS + head) * DK + chunk * 8);
#pragma unroll
  for (int i = 0; i < (64 + AT_ONCE - 1) / AT_ONCE; i++)
    if (token < AT_ONCE && token + i * AT_ONCE < tile.tokens)
      copy16(to + swizzle((token + i * AT_ONCE) * HPG + head, chunk), from + i * (AT_ONCE * HEADS * DK));
  copies_commit();
}

// Lists the union's blocks, the tokens that chose each, and the steps. choices: this thread's blocks, 0 for none;
// token_of(i): the token of the i-th. masks: for each of the candidates 0 ... blocks - 1 two zero words, then a word.
// They are in the ring, so the host allows up to 4,096 blocks (gatherRefusal).
template <int COUNT, class TokenOf> __device__ __forceinline__ void gather_lists(Gather& g, u32* masks,
                                                                                 const int (&choices)[COUNT],
                                                                                 TokenOf token_of, int blocks) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  u32* const places = masks + 2 * blocks;  // of a block: the counts of `all` before it
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    if (choices[i] > 0) atomicOr(masks + 2 * choices[i] + token_of(i) / 32, 1u << (token_of(i) & 31));
  __syncthreads();
  for (int base = 0; base < blocks; base += GATHER_STEPPERS) {
    const int block = base + thread;
    const bool present = block < blocks && thread < GATHER_STEPPERS;
    const int count = present ? __popc(masks[2 * block]) + __popc(masks[2 * block + 1]) : 0,
              steps = (count + GATHER_TOKENS - 1) / GATHER_TOKENS;
    const u32 own = (count > 0) | count << 10 | steps << 20, sum = warp_prefix_sum((int)own);
    if (lane == 31 && thread < GATHER_STEPPERS) g.counts[warp] = sum;
    __syncthreads();
    u32 at = g.all + sum - own;
#pragma unroll
    for (int w = 0; w < GATHER_STEPPERS / 32; w++) at += w < warp ? g.counts[w] : 0;
    if (present) places[block] = at;
    if (count > 0) {
      const int index = at & 1023, first = at >> 10 & 1023, step = at >> 20;
      g.blocks[index] = (unsigned short)block;
      for (int i = 0; i < steps; i++)  // the block's last step arrives for those that it does not have
        g.steps[step + i] = index | (first + i * GATHER_TOKENS) << 10 |
                            min(GATHER_TOKENS, count - i * GATHER_TOKENS) << 20 |
                            (i == steps - 1 ? GATHER_STEPS_OF_BLOCK - i : 1) << 27;
    }
    __syncthreads();
    if (thread == GATHER_STEPPERS - 1) g.all = at + own;
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    if (choices[i] > 0) {
      const int token = token_of(i);
      const u32 low = masks[2 * choices[i]], high = masks[2 * choices[i] + 1], below = (1u << (token & 31)) - 1;
      const int rank = token < 32 ? __popc(low & below) : __popc(low) + __popc(high & below);
      g.rows[(places[choices[i]] >> 10 & 1023) + rank] = (unsigned short)(token * HPG);
    }
}

// Loads the tile and builds its lists. selections: of the tile's first token; blocks: candidates are 1 ... blocks - 1
__device__ __forceinline__ void gather_begin(const GatherTile& tile, u32* masks, const int* selections, int blocks) {
  Gather& g = tile.g;
  const int thread = threadIdx.x;
  // What takes longest is requested first.
  constexpr int CHOICES = (64 * SEL_N + GATHER_STEPPERS - 1) / GATHER_STEPPERS,
                LOGS = (GATHER_ROWS + GATHER_STEPPERS - 1) / GATHER_STEPPERS;
  int choices[CHOICES];
  float logs[LOGS];
#pragma unroll
  for (int i = 0; i < CHOICES; i++) {
    const int e = i * GATHER_STEPPERS + thread, token = e / SEL_N;
    choices[i] = 0;
    if (thread < GATHER_STEPPERS && token < tile.tokens && (tile.wanted >> token & 1))
      choices[i] = selections[(i64)token * GROUPS * SEL_N + e % SEL_N];
  }
  gather_queries(tile);
#pragma unroll
  for (int i = 0; i < LOGS; i++) logs[i] = tile.lse[tile.place(min(i * GATHER_STEPPERS + thread, tile.rows() - 1))];
#pragma unroll 1
  for (int i = thread; i < 2 * blocks; i += GATHER_THREADS) masks[i] = 0;
  for (int i = thread; i < GATHER_ROWS * 16; i += GATHER_THREADS)
    store_unit(shared_address(g.sums) + i * 16, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  if (thread < 8) {  // the row of absent ones
    g.own[GATHER_ROWS + thread] = g.reference[GATHER_ROWS + thread] = 0.0f;
    *(uint4*)(g.queries + GATHER_ROWS * 128 + thread * 16) = make_uint4(0, 0, 0, 0);
  }
  if (thread == 0) {
    g.all = g.moved = 0;
    for (int i = 0; i < GATHER_STAGES; i++) {
      barrier_init(tile.full(i), FULL_ARRIVALS);
      barrier_init(tile.empty(i), GATHER_STEPS_OF_BLOCK * 4);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < CHOICES; i++)
    if (choices[i] >= blocks) choices[i] = 0;  // forced
  gather_lists(g, masks, choices, [&](int i) { return (i * GATHER_STEPPERS + thread) / SEL_N; }, blocks);
#pragma unroll
  for (int i = 0; i < LOGS; i++) {
    const int r = i * GATHER_STEPPERS + thread;
    if (r < GATHER_ROWS && thread < GATHER_STEPPERS) {
      g.own[r] = g.reference[r] = logs[i] * LOG2_E;
      g.total[r] = 0.0f;
    }
  }
  copies_wait<0>();
  matrix_publish();
  __syncthreads();
}

// One warp: requests keys and values of the union's blocks, and brings what the end needs into L2. packed: of the
// sequence's first block
__device__ __forceinline__ void gather_requests(const GatherTile& tile, const unsigned char* packed) {
  const int blocks = tile.g.all & 1023, lane = threadIdx.x & 31;
  for (int i = 0; i < blocks; i++) {
    if (i >= GATHER_STAGES) barrier_wait(tile.empty(i), (i / GATHER_STAGES - 1) & 1);
    bulk_expect(tile.full(i), PACKED, lane);
    bulk_copy(tile.ring + i % GATHER_STAGES * PACKED, packed + tile.g.blocks[i] * PACKED_STRIDE, PACKED, tile.full(i),
              lane);
    bulk_end(tile.full(i), lane);
    if (i == min(blocks, GATHER_STAGES) - 1)
#pragma unroll 1
      for (int r = lane; r < tile.rows(); r += 32) {
        prefetch(tile.out + tile.place(r) * DV);
        if (tile.combined == nullptr) continue;
        prefetch(tile.cmp + tile.place(r) * DV);
        prefetch(tile.win + tile.place(r) * DV);
      }
  }
}

// Where weights were too large for their reference, in this step or an earlier one: the larger one of the references of
// a row's sums and of the step's results becomes that of both. Returns the factor of the sums; scale: of the results.
__device__ __forceinline__ float gather_rescale(Gather& g, int row, float used, float& scale) {
  const float now = g.reference[row], next = fmaxf(now, used), keep = exp2_approximate(now - next);
  scale = exp2_approximate(used - next);
  __syncwarp();
  if ((threadIdx.x & 3) == 0) {
    g.reference[row] = next;
    g.total[row] *= keep;
    g.moved = 1;
  }
  return keep;
}

// Steps own, own + 4, ... by warpgroup `own`. A thread has two rows of a step; a quad of lanes shares them.
__device__ __forceinline__ void gather_steps(const GatherTile& tile) {
  Gather& g = tile.g;
  const int steps = g.all >> 20, own = warpgroup(), warp = uniform((threadIdx.x & 127) / 32), lane = threadIdx.x & 31;
  const u32 queries = shared_address(g.queries), sums = shared_address(g.sums), stages = handle(tile.ring);
  const float c = scale_log2();
  // Of the rows that this lane looks up, its row of queries and its two of sums: place among a step's tokens, and head.
  int tokens_of[3], heads_of[3];
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const int r = warp * 16 + (i == 0 ? lane & 15 : lane / 4 + (i - 1) * 8);
    tokens_of[i] = r / HPG, heads_of[i] = r % HPG;
    asm volatile("" : "+r"(tokens_of[i]), "+r"(heads_of[i]));  // not computed again in every step
  }
  u32 word = 0;
  int rows[3];
  const auto look_up = [&](int k) {
    word = uniform(g.steps[min(k, steps - 1)]);
    const int first = word >> 10 & 1023, count = word >> 20 & 127;
#pragma unroll
    for (int i = 0; i < 3; i++)
      rows[i] = tokens_of[i] < count ? g.rows[first + tokens_of[i]] + heads_of[i] : GATHER_ROWS;
  };
  if (own < steps) look_up(own);
  for (int k = own; k < steps; k += GATHER_WARPGROUPS) {
    const u32 block = word & 1023, arrivals = word >> 27;
    const bool present = warp * 16 < (word >> 20 & 127) * HPG;  // whether any of the warp's rows is
    const int row0 = rows[1], row1 = rows[2];
    // ---- score [64, 64] = Q [64, DK] * K^T
    const u32 from = queries + rows[0] * 128 + (((lane >> 4) ^ (rows[0] & 7)) << 4);
    u32 a[4][4], weights[4][4];
    float score[32], sum[32];
#pragma unroll
    for (int s = 0; s < 4; s++) load_fragment<false>(a[s], from ^ (s << 5));
    float used0 = g.own[row0], used1 = g.own[row1], add0, add1;
    barrier_wait(tile.full(block), block / GATHER_STAGES & 1);
    const u32 keys = advance(stages, block % GATHER_STAGES * PACKED);
    matrix_begin();
#pragma unroll
    for (int s = 0; s < 4; s++) product<ALONG>(score, a[s], keys, s, s > 0);
    matrix_commit();
    matrix_wait<0>();
    hold(score);
    // ---- Weights, relative to the forced blocks' log-sum-exp
    const auto weigh = [&] {
      add0 = add1 = 0.0f;
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        const float w = exp2_approximate(fmaf(score[i], c, -used0)),
                    x = exp2_approximate(fmaf(score[i + 1], c, -used0)),
                    y = exp2_approximate(fmaf(score[i + 2], c, -used1)),
                    z = exp2_approximate(fmaf(score[i + 3], c, -used1));
        add0 += w + x;
        add1 += y + z;
        weights[i / 8][i / 2 % 4] = pack_bf16(w, x);
        weights[i / 8][i / 2 % 4 + 1] = pack_bf16(y, z);
      }
    };
    if (present) {
      weigh();
    } else {
      add0 = add1 = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; i++) weights[i / 4][i & 3] = 0;
    }
    constexpr float LARGE = 1e18f;
    const bool over = __any_sync(~0u, !(add0 <= LARGE) || !(add1 <= LARGE));
    if (over) {  // relative to the step's own largest score
      float top0 = score[0], top1 = score[2];
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        top0 = fmaxf(top0, fmaxf(score[i], score[i + 1]));
        top1 = fmaxf(top1, fmaxf(score[i + 2], score[i + 3]));
      }
      // A row's bits must not depend on its neighbours: its own quad decides.
      const float over0 = quad_max(add0 <= LARGE ? 0.0f : 1.0f), over1 = quad_max(add1 <= LARGE ? 0.0f : 1.0f);
      top0 = quad_max(top0) * c;
      top1 = quad_max(top1) * c;
      if (over0 > 0.0f) used0 = top0;
      if (over1 > 0.0f) used1 = top1;
      weigh();
    }
    // ---- sum [64, DV] = P [64, 64] * V
    matrix_begin();
#pragma unroll
    for (int s = 0; s < 4; s++) product<ACROSS>(sum, weights[s], advance(keys, PANEL), s, s > 0);
    matrix_commit();
    look_up(k + GATHER_WARPGROUPS);
    add0 = quad_sum(add0);
    add1 = quad_sum(add1);
    matrix_wait<0>();
    hold(sum);
    if (lane == 0) barrier_arrive(tile.empty(block), arrivals);
    // ---- Add to the sums, one part of the columns after the other, after the step before has
    const u32 place0 = sums + gather_place(row0, lane & 3), place1 = sums + gather_place(row1, lane & 3);
    const u32 places[4] = {place0, place1, place0 ^ 64, place1 ^ 64};
    constexpr int UNITS = 8 / GATHER_PARTS;  // of both rows
    float keep0 = 1.0f, keep1 = 1.0f;
#pragma unroll
    for (int part = 0; part < GATHER_PARTS; part++) {
      if (k > 0) barrier(2 + own * GATHER_PARTS + part, 256);
      if (present) {
        float4 old[UNITS];
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
          const int unit = part * UNITS + i;
          old[i] = load_unit(places[unit & 3] + unit / 4 * 128);
        }
        if (part == 0) {
          if (over || *(volatile int*)&g.moved) {
            float scale0, scale1;
            keep0 = gather_rescale(g, row0, used0, scale0);
            keep1 = gather_rescale(g, row1, used1, scale1);
#pragma unroll
            for (int i = 0; i < 32; i++) sum[i] *= i & 2 ? scale1 : scale0;
            add0 *= scale0;
            add1 *= scale1;
          }
          if ((lane & 3) == 0) {
            g.total[row0] += add0;
            g.total[row1] += add1;
          }
        }
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
          const int unit = part * UNITS + i, e = unit / 2 * 8 + (unit & 1) * 2;
          const float keep = unit & 1 ? keep1 : keep0;
          store_unit(places[unit & 3] + unit / 4 * 128,
                     make_float4(fmaf(old[i].x, keep, sum[e]), fmaf(old[i].y, keep, sum[e + 1]),
                                 fmaf(old[i].z, keep, sum[e + 4]), fmaf(old[i].w, keep, sum[e + 5])));
        }
      }
      if (k + 1 < steps) barrier_pass(2 + (own + 1) % GATHER_WARPGROUPS * GATHER_PARTS + part, 256);
    }
  }
}

// Output and log-sum-exp, forced blocks included, and the gated sum. Four threads have a row: thread e has the units of
// the columns from 16 * e on, and stores the chunks of eight columns 4 * (e / 2) + e % 2 and two further, so that two
// neighbours fill a sector.
__device__ __forceinline__ void gather_end(const GatherTile& tile) {
  constexpr int PASSES = (GATHER_ROWS * 4 + GATHER_STEPPERS - 1) / GATHER_STEPPERS;
  Gather& g = tile.g;
  const int thread = threadIdx.x, e4 = thread & 3, column = e4 / 2 * 32 + e4 % 2 * 8;
  const Combination combine = {tile.cmp, tile.win, tile.gates, tile.combined};
  struct Ahead {
    Combination::Others others[2];
    uint4 forced[2];
  } ahead[2];
  const auto load = [&](int i) {
    const u32 row = tile.place(min((i * GATHER_STEPPERS + thread) / 4, tile.rows() - 1));
#pragma unroll
    for (int e = 0; e < 2; e++) {
      ahead[i & 1].forced[e] = *(const uint4*)(tile.out + row * DV + e4 * 16 + e * 8);
      combine.load(ahead[i & 1].others[e], row, column + e * 16);
    }
  };
  load(0);
  if (PASSES > 1) load(1);
  barrier(1, GATHER_STEPPERS);
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const Ahead& now = ahead[i & 1];
    const int r = (i * GATHER_STEPPERS + thread) / 4, present = min(r, tile.rows() - 1);
    const u32 row = tile.place(present);
    const float keep = exp2_approximate(g.own[present] - g.reference[present]), total = g.total[present] + keep,
                f = reciprocal_approximate(total), weight = keep * f;
    const u32 units = ((shared_address(g.sums) + gather_place(present, 0)) ^ (e4 & 1) * 64) + e4 / 2 * 128;
    const u32 low[4] = {now.forced[0].x, now.forced[0].y, now.forced[0].z, now.forced[0].w},
              high[4] = {now.forced[1].x, now.forced[1].y, now.forced[1].z, now.forced[1].w};
    u32 x[4], y[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float4 u = load_unit(units + e * 16);
      x[e] = pack_bf16(fmaf(low_bf16(low[e]), weight, u.x * f), fmaf(high_bf16(low[e]), weight, u.y * f));
      y[e] = pack_bf16(fmaf(low_bf16(high[e]), weight, u.z * f), fmaf(high_bf16(high[e]), weight, u.w * f));
      const u32 other = __shfl_xor_sync(~0u, e4 & 1 ? x[e] : y[e], 1);
      x[e] = e4 & 1 ? other : x[e];
      y[e] = e4 & 1 ? y[e] : other;
    }
    if (r < tile.rows() && (tile.wanted >> (r / HPG) & 1)) {
      const uint4 chunk0 = make_uint4(x[0], x[1], x[2], x[3]), chunk1 = make_uint4(y[0], y[1], y[2], y[3]);
      store16(tile.out + row * DV + column, chunk0);
      store16(tile.out + row * DV + column + 16, chunk1);
      combine.store(now.others[0], row, column, chunk0);
      combine.store(now.others[1], row, column + 16, chunk1);
      if (e4 == 0) tile.lse[row] = LN2 * (g.reference[r] + log2_approximate(total));
    }
    if (i + 2 < PASSES) load(i + 2);
  }
}

// The chosen blocks of the stretches that the plan assigns to this kernel, of all if the plan is null. out and lse
// contain the forced blocks. served[2] counts the times it worked. grid (blocks of all sequences, groups)
extern "C" __global__ void __launch_bounds__(GATHER_THREADS, 1) selected_gather(
    const bf16* q, const unsigned char* packed, const int* selected, const bf16* cmp, const bf16* win,
    const float* gates, bf16* out, float* lse, bf16* combined, const Plan* plan, int* served, const int* cu_seqlens,
    int sequences, int stretch) {
  extern __shared__ unsigned char shared[];
  if (plan != nullptr && plan->gather_stretches == 0) return;
  if (served != nullptr && threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) served[2]++;
  Place place;
  if (!find_place(
          cu_seqlens, sequences, gridDim.x - 1 - blockIdx.x, [](int length) { return (length + SEL_L - 1) / SEL_L; },
          place))
    return;
  const int group = blockIdx.y, t0 = place.first + place.tile * SEL_L,
            tokens = min(SEL_L, place.length - place.tile * SEL_L);
  u64 wanted = ~0ull >> (64 - tokens);
  if (plan != nullptr) {
    const int border = (t0 + tokens - 1) / stretch * stretch - t0;  // where the stretch of the last token begins
    const u64 before = border > 0 ? (1ull << border) - 1 : 0;
    if (plan->choice[t0 / stretch] != TILE_GATHER) wanted &= ~before;
    if (plan->choice[(t0 + tokens - 1) / stretch] != TILE_GATHER) wanted &= before;
    if (wanted == 0) return;
  }
  const u32 ring = (shared_address(shared) + 1023) & ~1023u;
  unsigned char* const generic = shared - shared_address(shared);
  const i64 row = (i64)t0 * HEADS + group * HPG;
  const GatherTile tile = {*(Gather*)(generic + ring + GATHER_STAGES * PACKED),
                           ring,
                           q + row * DK,
                           cmp + row * DV,
                           win + row * DV,
                           gates + row * 3,
                           out + row * DV,
                           combined == nullptr ? nullptr : combined + row * DV,
                           lse + row,
                           tokens,
                           wanted};
  gather_begin(tile, (u32*)(generic + ring), selected + ((i64)t0 * GROUPS + group) * SEL_N, max(1, place.tile - 1));
  if (threadIdx.x >= GATHER_STEPPERS) {
    gather_requests(tile, packed + ((i64)place.base * GROUPS + group) * PACKED);
  } else {
    gather_steps(tile);
    gather_end(tile);
  }
}
#endif
