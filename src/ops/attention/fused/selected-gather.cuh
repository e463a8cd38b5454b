// Tile-gather: the 64 tokens of one selection block share a stream over the union of the blocks they chose. A step
// takes one block and the rows of up to GATHER_TOKENS of the tokens that chose it, wherever they lie in the tile:
// queries are gathered from shared memory, and results are added to sums in shared memory. Only keys and values move
// through L2, and the lists of the inverted index are not needed. The forced blocks' output comes from selected_dense,
// and the kernel ends with the gated sum of the branches.
//
// Four warpgroups take the steps in turn. They add their results in the order of the steps, so that a row's sum has a
// fixed order, that of its blocks; a turn is a named barrier of two warpgroups. A seventeenth warp requests keys and
// values. The number of instructions of a step, about 320 a warp, is what its time depends on.
//
// Sums are fp16: up to 13 roundings to 11 bits weigh less than the one to bf16 at the end. So that they stay in range,
// a row's weights are relative to the sum of those of its forced keys, and divided by a power of two above the largest
// magnitude of the values of the blocks that its token chose. A row's bits depend on nothing else. Columns whose values
// are 2^-20 of the largest lose digits (5 %), and values of 2^64 and more may overflow.
#pragma once
#include "combination.cuh"
#include "forward.cuh"
#include "plan.cuh"

#define HAS_GATHER (DK == 64 && DV == 64 && SEL_L == 64 && HPG <= 6 && SEL_N <= 16)

#if HAS_GATHER
constexpr int GATHER_WARPGROUPS = 4, GATHER_STAGES = 4;
// The largest sum of a step's weights, relative to those of all forced keys, over the 16 keys of a lane. Four lanes
// share a row: with values less than 1 the sums of all steps stay below fp16's 65,504.
constexpr float GATHER_LIMIT = 1024.0f;
static_assert(4 * (SEL_N - 3) * GATHER_LIMIT <= 65504, "the sums of all steps fit fp16");
constexpr int MIN_EXPONENT = -64;                         // of the values; the largest one is 64
constexpr int GATHER_STEPPERS = GATHER_WARPGROUPS * 128;  // threads that take steps
constexpr int GATHER_THREADS = GATHER_STEPPERS + 32;
constexpr int GATHER_TOKENS = 64 / HPG;  // of a step
constexpr int GATHER_ROWS = 64 * HPG;    // of a tile; one more stands for the rows that a step does not have
constexpr int GATHER_CHOICES = 64 * (SEL_N > 3 ? SEL_N - 3 : 1);
constexpr int GATHER_STEPS_OF_BLOCK = (64 + GATHER_TOKENS - 1) / GATHER_TOKENS;
static_assert(GATHER_CHOICES < 1024, "three counts share a word");
static_assert(4096 * 3 * 4 <= GATHER_STAGES * PACKED, "masks of 4,096 blocks fit the ring");
static_assert(GATHER_STEPS_OF_BLOCK < 32, "arrivals of a step are five bits");
// A warpgroup may wait for a block while another still waits for one up to three steps before: never for the same
// stage.
static_assert(GATHER_STAGES >= GATHER_WARPGROUPS, "phases of a stage are waited for one after the other");

// Shared memory, after the ring of keys and values.
struct Gather {
  unsigned char queries[(GATHER_ROWS + 8) * 128];  // bf16, rows swizzled as in a panel
  unsigned char sums[(GATHER_ROWS + 1) * 128];     // fp16, rows of 8 units of 16 bytes, see gather_place
  float total[GATHER_ROWS + 8];                    // of the row's weights
  // For each row: the reference of its weights (the forced blocks' log-sum-exp, base 2, plus the token's exponent), and
  // the limit of the sum of a lane's weights in a step.
  float2 own[GATHER_ROWS + 8];
  float reference[GATHER_ROWS + 8];  // the reference of its sums: differs from `own` only after an overflow
  int exponents[64];                 // of a token: the values of its chosen blocks are less than 2^exponent
  u64 full[GATHER_STAGES], empty[GATHER_STAGES];
  u32 counts[GATHER_STEPPERS / 32];
  u32 steps[GATHER_CHOICES];              // bits 0:10 index of the block, 10:20 first place in `rows`, 20:27 tokens,
                                          // 27:32 how often each warp arrives at `empty`
  unsigned short blocks[GATHER_CHOICES];  // of the union, ascending
  unsigned short rows[GATHER_CHOICES];    // for each block of the union: the first rows of its tokens, ascending
  u32 all;                                // number of blocks (bits 0:10), of choices (10:20) and of steps (20:30)
  int moved;                              // a reference differs from `own`
};
constexpr int GATHER_SHARED = GATHER_STAGES * PACKED + (int)sizeof(Gather) + 1024;
EXPORT(selected_gather_shared, GATHER_SHARED)
EXPORT(selected_gather_threads, GATHER_THREADS)

// A thread's eight columns 32 * p + 2 * q + {0, 1, 8, 9, 16, 17, 24, 25} of an accumulator, q = lane % 4, are one unit
// of 16 bytes. That of p = 1 is at this place with bit 6 turned over: two neighbouring rows use the two halves of the
// banks.
__device__ __forceinline__ u32 gather_place(int row, int q) { return row * 128 + ((row & 1) * 4 + q) * 16; }
__device__ __forceinline__ uint4 load_unit(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_unit(u32 at, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
// Two numbers of fp16 in a word.
__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
__device__ __forceinline__ float low_f16(u32 x) {
  float y;
  asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float high_f16(u32 x) { return low_f16(x >> 16); }
__device__ __forceinline__ u32 add_f16(u32 a, u32 b) {
  u32 x;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
__device__ __forceinline__ uint4 add_f16(uint4 a, const u32 (&b)[4]) {
  return make_uint4(add_f16(a.x, b[0]), add_f16(a.y, b[1]), add_f16(a.z, b[2]), add_f16(a.w, b[3]));
}
__device__ __forceinline__ u32 multiply_f16(u32 a, u32 b) {
  u32 x;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
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

// Loads the tile and builds its lists. selections: of the tile's first token; blocks: candidates are 1 ... blocks - 1;
// largest: of the sequence's first block (selected_pack)
__device__ __forceinline__ void gather_begin(const GatherTile& tile, u32* masks, const int* selections, int blocks,
                                             const u32* largest) {
  Gather& g = tile.g;
  const int thread = threadIdx.x;
  // The slowest loads are requested first.
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
  for (int i = thread; i < GATHER_ROWS * 8; i += GATHER_THREADS)
    store_unit(shared_address(g.sums) + i * 16, make_uint4(0, 0, 0, 0));
  if (thread < 8) {  // the row of absent ones: weights of 0
    g.own[GATHER_ROWS + thread] = make_float2(1e4f, GATHER_LIMIT);
    g.reference[GATHER_ROWS + thread] = 1e4f;
    *(uint4*)(g.queries + GATHER_ROWS * 128 + thread * 16) = make_uint4(0, 0, 0, 0);
  }
  if (thread < 64) g.exponents[thread] = MIN_EXPONENT;
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
  u32 sizes[CHOICES];
#pragma unroll
  for (int i = 0; i < CHOICES; i++) sizes[i] = choices[i] > 0 ? largest[choices[i] * GROUPS] : 0;
  const auto token_of = [&](int i) { return (i * GATHER_STEPPERS + thread) / SEL_N; };
  gather_lists(g, masks, choices, token_of, blocks);
#pragma unroll
  for (int i = 0; i < CHOICES; i++)
    if (choices[i] > 0) atomicMax(g.exponents + token_of(i), min((int)(sizes[i] >> 7) - 126, -MIN_EXPONENT));
  __syncthreads();
#pragma unroll
  for (int i = 0; i < LOGS; i++) {
    const int r = i * GATHER_STEPPERS + thread;
    if (r < GATHER_ROWS && thread < GATHER_STEPPERS) {
      const float exponent = (float)g.exponents[r / HPG], own = logs[i] * LOG2_E + exponent;
      g.own[r] = make_float2(own, exp2_approximate(-exponent) * GATHER_LIMIT);
      g.reference[r] = own;
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

// Adds a row's results where weights were too large for their reference, in this step or an earlier one: the larger one
// of the references of its sums and of the results becomes that of both. used: reference of the results, whose weights
// have the sum `add`; the quad of lanes that shares the row calls.
__device__ __forceinline__ void gather_add_rescaled(Gather& g, int row, u32 place, float used, const u32 (&added)[2][4],
                                                    float add) {
  const float now = g.reference[row], next = fmaxf(now, used), keep = exp2_approximate(now - next),
              scale = exp2_approximate(used - next);
  __syncwarp();
  if ((threadIdx.x & 3) == 0) {
    g.reference[row] = next;
    g.total[row] = g.total[row] * keep + add * scale;
    g.moved = 1;
  }
  const u32 keeps = pack_f16(keep, keep), scales = pack_f16(scale, scale);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint4 old = load_unit(place ^ (i * 64));
    const u32 kept[4] = {multiply_f16(old.x, keeps), multiply_f16(old.y, keeps), multiply_f16(old.z, keeps),
                         multiply_f16(old.w, keeps)};
    const uint4 scaled = make_uint4(multiply_f16(added[i][0], scales), multiply_f16(added[i][1], scales),
                                    multiply_f16(added[i][2], scales), multiply_f16(added[i][3], scales));
    store_unit(place ^ (i * 64), add_f16(scaled, kept));
  }
}

// By how much the reference of weights must rise so that 64 of them, the largest one 2^excess, are below the limit, a
// power of two. A whole number, so that the factors that follow from it are powers of two when they are rounded to
// fp16.
__device__ __forceinline__ float gather_above(float excess, float limit) {
  return ceilf(excess) - (float)((int)(__float_as_uint(limit) >> 23) - 127 - 6);
}

// Steps own, own + 4, ... by warpgroup `own`. A thread has two rows of a step; a quad of lanes shares them.
__device__ __forceinline__ void gather_steps(const GatherTile& tile) {
  Gather& g = tile.g;
  const int steps = g.all >> 20, own = warpgroup(), warp = uniform((threadIdx.x & 127) / 32), lane = threadIdx.x & 31;
  const u32 queries = shared_address(g.queries), sums = shared_address(g.sums), stages = handle(tile.ring);
  const float c = scale_log2();
  // The rows that this lane looks up (one of queries, two of sums): index among a step's tokens, and head.
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
    const int count = word >> 20 & 127;
    int first = word >> 10 & 1023;
    asm volatile("" : "+r"(first));  // computed once, not for each row
#pragma unroll
    for (int i = 0; i < 3; i++)
      rows[i] = tokens_of[i] < count ? g.rows[first + tokens_of[i]] + heads_of[i] : GATHER_ROWS;
  };
  if (own < steps) look_up(own);
  for (int k = own; k < steps; k += GATHER_WARPGROUPS) {
    const u32 block = word & 1023, arrivals = word >> 27;
    const bool present = warp * 16 < (word >> 20 & 127) * HPG;  // at least one of the warp's rows is
    const int row0 = rows[1], row1 = rows[2];
    // ---- score [64, 64] = Q [64, DK] * K^T
    const u32 from = queries + rows[0] * 128 + (((lane >> 4) ^ (rows[0] & 7)) << 4);
    u32 a[4][4], weights[4][4];
    float score[32], sum[32];
#pragma unroll
    for (int s = 0; s < 4; s++) load_fragment<false>(a[s], from ^ (s << 5));
    const float2 own0 = g.own[row0], own1 = g.own[row1];
    float used0 = own0.x, used1 = own1.x, add0, add1;
    barrier_wait(tile.full(block), block / GATHER_STAGES & 1);
    const u32 keys = advance(stages, block % GATHER_STAGES * PACKED);
    matrix_begin();
#pragma unroll
    for (int s = 0; s < 4; s++) product<ALONG>(score, a[s], keys, s, s > 0);
    matrix_commit();
    matrix_wait<0>();
    hold(score);
    // ---- Weights, relative to the forced blocks' log-sum-exp and the token's exponent
    const auto weigh = [&] {
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        const float w = exp2_approximate(fmaf(score[i], c, -used0)),
                    x = exp2_approximate(fmaf(score[i + 1], c, -used0)),
                    y = exp2_approximate(fmaf(score[i + 2], c, -used1)),
                    z = exp2_approximate(fmaf(score[i + 3], c, -used1));
        add0 = i == 0 ? w + x : add0 + (w + x);
        add1 = i == 0 ? y + z : add1 + (y + z);
        weights[i / 8][i / 2 % 4] = pack_bf16(w, x);
        weights[i / 8][i / 2 % 4 + 1] = pack_bf16(y, z);
      }
    };
    if (present) {
      weigh();
    } else {  // whatever numbers: results of these rows are not added
      add0 = add1 = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; i++) weights[i / 4][i & 3] = a[i / 4][i & 3];
    }
    const bool over = __any_sync(~0u, !(add0 <= own0.y) || !(add1 <= own1.y));
    if (over) {  // the reference rises until the step's largest weights fit
      float top0 = score[0], top1 = score[2];
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        top0 = fmaxf(top0, fmaxf(score[i], score[i + 1]));
        top1 = fmaxf(top1, fmaxf(score[i + 2], score[i + 3]));
      }
      // A row's bits must not depend on its neighbours: its own quad decides.
      const float over0 = quad_max(add0 <= own0.y ? 0.0f : 1.0f), over1 = quad_max(add1 <= own1.y ? 0.0f : 1.0f);
      top0 = quad_max(top0) * c;
      top1 = quad_max(top1) * c;
      if (over0 > 0.0f) used0 += gather_above(top0 - used0, own0.y);
      if (over1 > 0.0f) used1 += gather_above(top1 - used1, own1.y);
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
    // ---- Add to the sums, after the step before has
    const u32 place0 = sums + gather_place(row0, lane & 3), place1 = sums + gather_place(row1, lane & 3);
    u32 added[2][2][4];  // of both rows and units
#pragma unroll
    for (int i = 0; i < 32; i += 2) added[i / 2 & 1][i / 16][i / 4 & 3] = pack_f16(sum[i], sum[i + 1]);
    if (k > 0) barrier(2 + own, 256);
    if (present) {
      if (over || *(volatile int*)&g.moved) {
        gather_add_rescaled(g, row0, place0, used0, added[0], add0);
        gather_add_rescaled(g, row1, place1, used1, added[1], add1);
      } else {
        const uint4 old[4] = {load_unit(place0), load_unit(place1), load_unit(place0 ^ 64), load_unit(place1 ^ 64)};
        if ((lane & 3) == 0) {
          g.total[row0] += add0;
          g.total[row1] += add1;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
          store_unit((i & 1 ? place1 : place0) ^ (i / 2 * 64), add_f16(old[i], added[i & 1][i / 2]));
      }
    }
    if (k + 1 < steps) barrier_pass(2 + (own + 1) % GATHER_WARPGROUPS, 256);
  }
}

// Output and log-sum-exp, forced blocks included, and the gated sum. Four threads have a row: thread e has the chunks
// of eight columns 4 * (e / 2) + e % 2 and two further, so that two neighbours fill a sector.
__device__ __forceinline__ void gather_end(const GatherTile& tile) {
  constexpr int PASSES = (GATHER_ROWS * 4 + GATHER_STEPPERS - 1) / GATHER_STEPPERS;
  Gather& g = tile.g;
  const int thread = threadIdx.x, part = thread / 2 & 1, odd = thread & 1, column = part * 32 + odd * 8;
  const Combination combine = {tile.cmp, tile.win, tile.gates, tile.combined};
  struct Ahead {
    Combination::Others others[2];
    uint4 forced[2];
  } ahead[2];
  const auto load = [&](int i) {
    const u32 row = tile.place(min((i * GATHER_STEPPERS + thread) / 4, tile.rows() - 1));
#pragma unroll
    for (int e = 0; e < 2; e++) {
      ahead[i & 1].forced[e] = *(const uint4*)(tile.out + row * DV + column + e * 16);
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
    const float2 own_of_row = g.own[present];
    const float keep = exp2_approximate(own_of_row.x - g.reference[present]) * own_of_row.y * (1.0f / GATHER_LIMIT),
                total = g.total[present] + keep, f = reciprocal_approximate(total), weight = keep * f;
    // Words 0 ... 3 of a unit are of chunks 0 ... 3: of two neighbouring threads the one has the first four columns of
    // each, the other the last four.
    const u32 units = shared_address(g.sums) + (gather_place(present, 2 * odd) ^ (part * 64));
    const uint4 first = load_unit(units), second = load_unit(units + 16);
    const u32 own[2][2] = {{odd ? first.y : first.x, odd ? second.y : second.x},
                           {odd ? first.w : first.z, odd ? second.w : second.z}},
              given[2][2] = {{odd ? first.x : first.y, odd ? second.x : second.y},
                             {odd ? first.z : first.w, odd ? second.z : second.w}};
    uint4 chunks[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const u32 taken[2] = {__shfl_xor_sync(~0u, given[e][0], 1), __shfl_xor_sync(~0u, given[e][1], 1)};
      const u32 sums[4] = {odd ? taken[0] : own[e][0], odd ? taken[1] : own[e][1], odd ? own[e][0] : taken[0],
                           odd ? own[e][1] : taken[1]};
      const u32 forced[4] = {now.forced[e].x, now.forced[e].y, now.forced[e].z, now.forced[e].w};
      u32 x[4];
#pragma unroll
      for (int n = 0; n < 4; n++)
        x[n] = pack_bf16(fmaf(low_bf16(forced[n]), weight, low_f16(sums[n]) * f),
                         fmaf(high_bf16(forced[n]), weight, high_f16(sums[n]) * f));
      chunks[e] = make_uint4(x[0], x[1], x[2], x[3]);
    }
    if (r < tile.rows() && (tile.wanted >> (r / HPG) & 1)) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        store16(tile.out + row * DV + column + e * 16, chunks[e]);
        combine.store(now.others[e], row, column + e * 16, chunks[e]);
      }
      if ((thread & 3) == 0) tile.lse[row] = LN2 * (g.reference[r] + log2_approximate(total));
    }
    if (i + 2 < PASSES) load(i + 2);
  }
}

// The chosen blocks of the stretches that the plan assigns to this kernel, of all if the plan is null. out and lse
// contain the forced blocks. served[2] counts the times it worked. grid (blocks of all sequences, groups)
extern "C" __global__ void __launch_bounds__(GATHER_THREADS, 1) selected_gather(
    const bf16* q, const unsigned char* packed, const int* selected, const bf16* cmp, const bf16* win,
    const float* gates, const u32* largest, bf16* out, float* lse, bf16* combined, const Plan* plan, int* served,
    const int* cu_seqlens, int sequences, int stretch) {
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
    const int border = (t0 + tokens - 1) / stretch * stretch - t0;  // first token of the last token's stretch
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
  gather_begin(tile, (u32*)(generic + ring), selected + ((i64)t0 * GROUPS + group) * SEL_N, max(1, place.tile - 1),
               largest + (i64)place.base * GROUPS + group);
  if (threadIdx.x >= GATHER_STEPPERS) {
    gather_requests(tile, packed + ((i64)place.base * GROUPS + group) * PACKED);
  } else {
    gather_steps(tile);
    gather_end(tile);
  }
}
#endif
