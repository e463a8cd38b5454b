// Selection: fp32 importance of every block for every (token, group), the exact top n, and the inverted
// index (which tokens selected a block) that the KV-outer kernels walk. No S x S/l' buffer exists.
#include "matrix.cuh"
#include "plan.cuh"

constexpr int PER_BLOCK = SEL_L / CMP_D;            // compressed keys that start in a selection block
constexpr int CARRY = CMP_L / CMP_D - 1;            // earlier ones that reach into it
constexpr int KEYS = (64 / PER_BLOCK) * PER_BLOCK;  // compressed keys taken per step: whole blocks
constexpr int BLOCKS = KEYS / PER_BLOCK;
constexpr int TOP = SEL_N - 3;             // slots that are not forced
constexpr int SCORING_BYTES = 220 * 1024;  // of shared memory, whatever the GPU has
constexpr int STRIDE = 72;                 // floats of a row of probabilities; no bank conflicts
static_assert(PER_BLOCK <= 64 && CARRY <= 8, "compression too fine for the scoring tile");

// The queries of all heads of a group stay in shared memory. Where those of 64 tokens do not fit, a tile of 64 rows
// holds 32 tokens of two heads, or 16 of four. Only one such block fits a multiprocessor, so it has two teams
// (warpgroups), which take turns with the tiles, and warps apart that add up what all of them found for a token and
// rank the blocks meanwhile.
constexpr int teams(int split) { return split > 1 ? 2 : 1; }
constexpr int rounds(int split) {
  return (HPG + split * teams(split) - 1) / (split * teams(split));
}  // tiles of queries of a team
constexpr int shares_bytes(int split) { return split > 1 ? teams(split) * 128 * 32 * 4 : 0; }
constexpr int scoring_bytes(int split) {
  return (teams(split) * rounds(split) + 2) * PK * PANEL + 64 * (STRIDE + 8) * 4 + shares_bytes(split);
}
constexpr int SPLIT = scoring_bytes(1) < SCORING_BYTES ? 1 : scoring_bytes(2) < SCORING_BYTES ? 2 : 4;
constexpr int TOKENS = 64 / SPLIT;  // of a tile
constexpr int TEAMS = teams(SPLIT), ROUNDS = rounds(SPLIT), SCORERS = TEAMS * 128;
constexpr int RANKERS = 128 / SPLIT, THREADS = SPLIT > 1 ? SCORERS + RANKERS : SCORERS;
static_assert(scoring_bytes(SPLIT) < SCORING_BYTES, "heads of a group do not fit");

// Packed tiles hold whole blocks, unless a block has an odd number of compressed keys.
constexpr bool IN_PACKED_TILES = KEYS == 64;
// The usual case, four compressed keys a block and one carried over, is pooled in registers.
constexpr bool POOL_IN_REGISTERS = PER_BLOCK == 4 && CARRY == 1;
constexpr int PARTNER = POOL_IN_REGISTERS ? 2 : 1;  // lanes of a token, apart
EXPORT(select_blocks_shared, (TEAMS * ROUNDS + 2) * PK * PANEL + TEAMS * ROUNDS * 64 * 4 + 1024 +
                                 (POOL_IN_REGISTERS ? 0 : 64 * (STRIDE + 8) * 4) + shares_bytes(SPLIT))
EXPORT(select_blocks_threads, THREADS)
EXPORT(select_blocks_tokens, TOKENS)
EXPORT(select_forward_chunk, OUTER_CHUNK)
EXPORT(select_plan_words, PLAN_WORDS<Plan>)
EXPORT(select_plan_unions, PLAN_WORDS<PlanItems>)
EXPORT(select_plan_done, PLAN_WORDS<PlanChoice>)
EXPORT(select_union_tokens, UNION_TOKENS)
EXPORT(select_max_stretches, MAX_STRETCHES)
EXPORT(select_backward_chunk, SEL_CHUNK)

struct Top {
  float score[TOP > 0 ? TOP : 1];
  int block[TOP > 0 ? TOP : 1];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < TOP; i++) {
      score[i] = -1.0f;
      block[i] = NEVER;
    }
  }
  // Keeps the list sorted, score descending. Of equal scores the one offered first stays above.
  __device__ __forceinline__ void insert(float s, int b) {
#pragma unroll
    for (int i = TOP - 1; i >= 0; i--) {
      const bool here = s > score[i], above = i > 0 && s > score[i > 0 ? i - 1 : 0];
      block[i] = above ? block[i > 0 ? i - 1 : 0] : here ? b : block[i];
      score[i] = i > 0 ? fmaxf(score[i], fminf(s, score[i - 1])) : fmaxf(score[i], s);
    }
  }
  // A score that an offer must exceed: the token's two lists together already hold TOP blocks, all lower, that score at
  // least this much.
  __device__ __forceinline__ float threshold() const {
    float least = score[TOP > 0 ? TOP - 1 : 0];
    if (TOP > 1) {
      constexpr int HALF = TOP / 2, REST = TOP - HALF;  // HALF of one list and REST of the other
      least = fmaxf(least, __shfl_xor_sync(~0u, least, PARTNER));
      const float theirs = __shfl_xor_sync(~0u, score[HALF - 1], PARTNER);
      const float rest = score[REST - 1];
      const float mixed = fminf(rest, theirs);
      least = fmaxf(least, fmaxf(mixed, __shfl_xor_sync(~0u, mixed, PARTNER)));
    }
    return least;
  }
  // The TOP best of both lists of the token. Both are sorted: the better of each entry and the other list's opposite
  // entry are the best of both.
  __device__ __forceinline__ void merge() {
    int best[TOP > 0 ? TOP : 1];
#pragma unroll
    for (int e = 0; e < TOP; e++) {
      const float s = __shfl_xor_sync(~0u, score[TOP - 1 - e], PARTNER);
      const int b = __shfl_xor_sync(~0u, block[TOP - 1 - e], PARTNER);
      best[e] = s > score[e] || (s == score[e] && b < block[e]) ? b : block[e];
    }
#pragma unroll
    for (int e = 0; e < TOP; e++) block[e] = best[e];
  }
  // Every candidate, where there are no more than slots.
  __device__ __forceinline__ void take_all(int current) {
#pragma unroll
    for (int e = 0; e < TOP; e++) block[e] = e + 1 < current - 1 ? e + 1 : NEVER;
  }
  // Block numbers in ascending order: odd-even transposition sort.
  __device__ __forceinline__ void sort_blocks() {
#pragma unroll
    for (int pass = 0; pass < TOP; pass++)
#pragma unroll
      for (int e = pass & 1; e + 1 < TOP; e += 2) {
        const int a = min(block[e], block[e + 1]), b = max(block[e], block[e + 1]);
        block[e] = a;
        block[e + 1] = b;
      }
  }
};

// Writes a token's row of `selected`: block 0, the chosen blocks, cur - 1, cur, then -1; and counts the chosen ones.
// selected, ranks: the row [SEL_N]; counts: the entry of block 0, `stretches` apart from block to block, or null. Both
// threads of a token have the same list: side 0 takes the even slots, side 1 the odd ones.
__device__ __forceinline__ void write_selection(const Top& top, int side, int current, int* selected, int* ranks,
                                                int* counts, int stretches) {
  int chosen = 0;  // fewer than there are candidates when scores are NaN
#pragma unroll
  for (int e = 0; e < TOP; e++) chosen += top.block[e] != NEVER;
  // All counts are asked for before the first answer is waited for.
  constexpr int SLOTS = (SEL_N + 1) / 2;
  int block[SLOTS], rank[SLOTS];
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    const int even = i > 0 && i * 2 - 1 < TOP ? top.block[i > 0 && i * 2 - 1 < TOP ? i * 2 - 1 : 0] : NEVER;
    const int odd = i * 2 < TOP ? top.block[i * 2 < TOP ? i * 2 : 0] : NEVER;
    block[i] = side ? odd : even;
    rank[i] = 0;
    if (counts != nullptr && block[i] != NEVER)
      rank[i] = atomicAdd(counts + (i64)block[i] * stretches, 1);  // place in the block's list
  }
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    const int slot = i * 2 + side;
    const int after = slot - 1 - chosen;  // after the chosen ones: cur - 1 if it is neither 0 nor cur, then cur
    if (slot >= SEL_N) break;
    const int last = after == 0 && current >= 2 ? current - 1 : after == (current >= 2) && current >= 1 ? current : -1;
    selected[slot] = slot == 0 ? 0 : block[i] != NEVER ? block[i] : last;
    if (counts != nullptr && block[i] != NEVER) ranks[slot] = rank[i];
  }
}

// One block scores TOKENS tokens of one group: for each tile of compressed keys it adds exp2(s - lse) over
// the heads in registers, pools them into selection blocks and keeps a running top list, two threads a
// token. Candidates lie before block cur - 1, so every compressed key they touch is visible: no mask.
// counts [G, blocks, stretches] may be null. grid (tiles of TOKENS tokens of all sequences, groups)
extern "C" __global__ void __launch_bounds__(THREADS, HPG* PK <= 6 ? 3 : 1) select_blocks(
    const bf16* q, const bf16* k_cmp, const unsigned char* packed, const float* lse_cmp, int* selected, int* counts,
    int* ranks, const int* cu_seqlens, const int* cu_cmp, const int* cu_blocks, int sequences, int stretch,
    int stretches) {
  // ---- Shared memory, and which token and list this thread has
  extern __shared__ unsigned char shared[];
  __shared__ __align__(8) u64 barriers[6];
  Place place;
  if (!find_place(
          cu_seqlens, sequences, gridDim.x - 1 - blockIdx.x, [](int length) { return (length + TOKENS - 1) / TOKENS; },
          [](int length) { return (count_compressed(length) + 63) / 64; }, place))
    return;
  const int team = SPLIT == 1 ? 0 : threadIdx.x / 128, thread = SPLIT == 1 ? threadIdx.x : threadIdx.x % 128,
            lane = thread & 31, warp = thread / 32, group = blockIdx.y;
  const bool scores = SPLIT == 1 || threadIdx.x < SCORERS, ranks_blocks = SPLIT == 1 || !scores;
  const u32 origin = shared_address(shared), base = (origin + 1023) & ~1023u;
  const u32 keys = base + TEAMS * ROUNDS * PK * PANEL, floats = keys + 2 * PK * PANEL;
  float* const shifts = (float*)(shared + (floats - origin));  // [ROUNDS][TEAMS][64] lse in base 2
  float* const chance = shifts + TEAMS * ROUNDS * 64;          // [64][STRIDE] summed over heads
  float* const carry = chance + 64 * STRIDE;                   // [64][8] the last CARRY keys of the tile before
  float* const shares = chance + (POOL_IN_REGISTERS ? 0 : 64 * (STRIDE + 8));  // [32][SCORERS] sums of a thread's heads

  const int t0 = place.tile * TOKENS, tokens = min(TOKENS, place.length - t0);
  // Two threads a token, each with its own list, later merged: neighbours in the general case; with
  // pooling in registers lanes 0 and 2 of a quad for its upper row, 1 and 3 for its lower one.
  const int mine = POOL_IN_REGISTERS ? warp * 16 + lane / 4 + (lane & 1) * 8 : thread / 2;
  const int side = POOL_IN_REGISTERS ? (lane >> 1) & 1 : thread & 1;
  const int t = t0 + mine, current = t / SEL_L;
  const int last = (t0 + tokens - 1) / SEL_L;
  const int needed = min(max(last - 1, 0) * PER_BLOCK, cu_cmp[place.sequence + 1] - cu_cmp[place.sequence]);
  const int steps = TOP == 0 || last + 1 <= SEL_N ? 0 : (needed + KEYS - 1) / KEYS;
  Top top;
  top.clear();

  if (steps > 0) {
    // ---- Barriers, the first tiles of keys, queries [HPG][TOKENS, DK] and their lse
    const i64 cmp_first = cu_cmp[place.sequence];
    const u32 full = shared_address(barriers), empty = full + 16;  // two stages each
    const u32 added = full + 32, taken = full + 40;                // shares are complete; shares were read
    const auto request =
        [&](int i) {  // tile i of keys, by the first warp; or, when packed tiles do not fit the blocks, by all
          const u32 to = keys + (i & 1) * PK * PANEL;
          if (IN_PACKED_TILES) {
            bulk_expect(full + (i & 1) * 8, PK * PANEL, lane);
            bulk_copy(to, packed + ((i64)(place.units + i) * GROUPS + group) * PACKED, PK * PANEL, full + (i & 1) * 8,
                      lane);
            bulk_end(full + (i & 1) * 8, lane);
          } else {
            if (scores)
              load_panel<DK, SCORERS>(to, threadIdx.x, k_cmp, [&](int r) {
                const int key = i * KEYS + r;
                return r < KEYS && key < needed ? (cmp_first + key) * GROUPS + group : -1;
              });
            copies_commit();
          }
        };
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; i++) {
        barrier_init(full + i * 8, FULL_ARRIVALS);
        barrier_init(empty + i * 8, TEAMS * 4);
      }
      barrier_init(added, TEAMS * 4);
      barrier_init(taken, RANKERS / 32);
      matrix_publish();
    }
    __syncthreads();
    if (IN_PACKED_TILES && threadIdx.x < 32)
      for (int i = 0; i < 2 && i < steps; i++) request(i);
    // Row r of a round's tile is a token of one head. Rows that do not exist repeat others: their lse is infinite, so
    // nothing comes of them.
    const u32 query0 = (u32)(place.first + t0) * HEADS + group * HPG;
#pragma unroll
    for (int round = 0; round < TEAMS * ROUNDS; round++) {
      const auto query = [&](int r) {
        return query0 + min(r % TOKENS, tokens - 1) * HEADS + min(round * SPLIT + r / TOKENS, HPG - 1);
      };
      if constexpr (SPLIT == 1) load_rows<DK>(base + round * PK * PANEL, q, query);
      else if (scores) load_panel<DK, SCORERS>(base + round * PK * PANEL, threadIdx.x, q, query);
    }
    constexpr int ALL_ROWS = TEAMS * ROUNDS * 64, ALL_HEADS = TEAMS * ROUNDS * SPLIT;
#pragma unroll
    for (int i = 0; i < (ALL_ROWS + SCORERS - 1) / SCORERS; i++) {
      const int at = i * SCORERS + threadIdx.x, token = at / ALL_HEADS,
                head = at % ALL_HEADS;  // neighbours read neighbours
      if (scores && at < ALL_ROWS)
        shifts[head / SPLIT * 64 + head % SPLIT * TOKENS + token] =
            token < tokens && head < HPG ? LOG2_E * lse_cmp[query0 + (i64)token * HEADS + head] : positive_infinity();
    }
    if (!POOL_IN_REGISTERS)
      for (int c = threadIdx.x; c < 64 * 8; c += THREADS) carry[c] = 0.0f;
    float tail = 0.0f;  // the key before this thread's next block
    if (!IN_PACKED_TILES) request(0);
    copies_commit();
    copies_wait<0>();
    matrix_publish();
    __syncthreads();
    const float c = scale_log2();
    const int row = warp * 16 + lane / 4;

    for (int i = 0; i < steps; i++) {
      // ---- Wait for tile i: compressed keys [KEYS, DK]
      if (IN_PACKED_TILES) {
        if (scores) barrier_wait(full + (i & 1) * 8, (i >> 1) & 1);
      } else {
        copies_wait<0>();
        matrix_publish();
        __syncthreads();
        if (i + 1 < steps) request(i + 1);
      }
      // ---- Probabilities [64 rows, KEYS], summed over the heads. The first head overwrites: 0 + p would cost an
      // instruction each.
      float sum[32];
      if (SPLIT > 1) {
#pragma unroll
        for (int e = 0; e < 32; e++) sum[e] = 0.0f;
      }
      if (scores) {
        const u32 tile = handle(keys + (i & 1) * PK * PANEL), queries = handle(base + team * PK * PANEL);
        float score[2][32];
        matrix_begin();
        product_rows<DK>(score[0], queries, tile);
        matrix_commit();
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
          if (IN_PACKED_TILES && round == 0 && threadIdx.x < 32 && i > 0 &&
              i + 1 < steps) {  // the stage that the last step read
            barrier_wait(empty + ((i - 1) & 1) * 8, ((i - 1) >> 1) & 1);
            request(i + 1);
          }
          if (round + 1 < ROUNDS) {
            matrix_begin();
            product_rows<DK>(score[(round + 1) & 1], advance(queries, (round + 1) * TEAMS * PK * PANEL), tile);
            matrix_commit();
            matrix_wait<1>();
          } else {
            matrix_wait<0>();
            if (IN_PACKED_TILES && lane == 0) barrier_arrive(empty + (i & 1) * 8);
          }
          hold(score[round & 1]);
          const float* const shift = shifts + (round * TEAMS + team) * 64 + row;
          const float shift0 = shift[0], shift1 = shift[8];
#pragma unroll
          for (int e = 0; e < 32; e++) {
            const float weight = exp2_approximate(fmaf(score[round & 1][e], c, (e & 2) ? -shift1 : -shift0));
            sum[e] = round == 0 ? weight : sum[e] + weight;
          }
        }
      }
      // ---- Where heads share a tile: scoring warps hand their sums to the ranking warps
      if constexpr (SPLIT > 1) {
        if (scores) {
          if (i > 0) barrier_wait(taken, (i - 1) & 1);
#pragma unroll
          for (int e = 0; e < 32; e++) shares[e * SCORERS + threadIdx.x] = sum[e];
          __syncwarp();
          if (lane == 0) barrier_arrive(added);
          continue;
        }
        barrier_wait(added, i & 1);
#pragma unroll
        for (int e = 0; e < 32; e++)
#pragma unroll
          for (int part = 0; part < SPLIT * TEAMS; part++) sum[e] += shares[e * SCORERS + part * RANKERS + thread];
        __syncwarp();
        if (lane == 0) barrier_arrive(taken);
      }
      // The tile's offers that beat the list's end, as a mask; then every lane inserts its next one at the
      // same time: as many rounds as the busiest lane has candidates, and the insertion is in the code once.
      // ---- Importance [tokens, BLOCKS]: probabilities pooled by the tokens that the blocks share
      constexpr int OFFERS = (BLOCKS + 1) / 2;
      float offers[OFFERS];
      u32 waiting = 0;
      const float least = top.threshold();
      const auto offer = [&](int n, float importance, int block, bool present) {
        offers[n] = importance;
        if (present && block > 0 && block < current - 1 && importance > least) waiting |= 1u << n;
      };
      if constexpr (POOL_IN_REGISTERS) {
        // Weights 1 | 2 2 2 1. Lanes 0 and 1 of a quad hold the four keys of one block, 2 and 3 of the next,
        // for two rows; they trade so that each lane has one (row, block).
        const bool odd = lane & 1;
#pragma unroll
        for (int n = 0; n < 8; n++) {
          const float upper = odd ? 2.0f * sum[n * 4] + sum[n * 4 + 1] : 2.0f * (sum[n * 4] + sum[n * 4 + 1]);
          const float lower = odd ? 2.0f * sum[n * 4 + 2] + sum[n * 4 + 3] : 2.0f * (sum[n * 4 + 2] + sum[n * 4 + 3]);
          const float pooled = (odd ? lower : upper) + __shfl_xor_sync(~0u, odd ? upper : lower, 1);
          const float theirs = __shfl_xor_sync(~0u, sum[n * 4 + 1], 1);  // even lanes: last key of the upper row
          const float end = __shfl_xor_sync(~0u, odd ? sum[n * 4 + 3] : theirs, 2);  // last key of the other block
          offer(n, pooled + (lane & 2 ? end : tail), i * BLOCKS + n * 2 + side, true);
          tail = end;
        }
      } else {
        // A warp's tokens are the sixteen rows of its accumulators: no block-wide barrier from here on.
#pragma unroll
        for (int n = 0; n < 8; n++) {
          *(float2*)(chance + row * STRIDE + n * 8 + (lane & 3) * 2) = make_float2(sum[n * 4], sum[n * 4 + 1]);
          *(float2*)(chance + (row + 8) * STRIDE + n * 8 + (lane & 3) * 2) =
              make_float2(sum[n * 4 + 2], sum[n * 4 + 3]);
        }
        __syncwarp();
#pragma unroll
        for (int b = 0; b < (BLOCKS + 1) / 2; b++) {
          const int local = side * ((BLOCKS + 1) / 2) + b, block = i * BLOCKS + local;
          float importance = 0.0f;
          if (local < BLOCKS) {
#pragma unroll
            for (int o = -CARRY; o < PER_BLOCK; o++) {
              const int begin = o * CMP_D > 0 ? o * CMP_D : 0;
              const int end = o * CMP_D + CMP_L < SEL_L ? o * CMP_D + CMP_L : SEL_L;
              const int key = local * PER_BLOCK + o;
              const float p = key >= 0 ? chance[mine * STRIDE + key] : carry[mine * 8 + key + CARRY];
              importance += (float)((end - begin) / CMP_D) * p;
            }
          }
          offer(b, importance, block, local < BLOCKS);
        }
        __syncwarp();
        if (side == 0)
#pragma unroll
          for (int o = 0; o < CARRY; o++) carry[mine * 8 + o] = chance[mine * STRIDE + KEYS - CARRY + o];
        __syncwarp();
      }
      // ---- Insertion into the running list
#pragma unroll 1
      while (__any_sync(~0u, waiting != 0)) {
        const int n = __ffs(waiting) - 1;
        float importance = -2.0f;
#pragma unroll
        for (int e = 0; e < OFFERS; e++)
          if (n == e) importance = offers[e];
        const int place_in_step = POOL_IN_REGISTERS ? n * 2 + side : side * OFFERS + n;
        top.insert(importance, i * BLOCKS + place_in_step);
        waiting &= waiting - 1;
      }
    }
    // ---- Both lists of a token become one
    if (!ranks_blocks) return;
    top.merge();
  } else {  // few blocks: all are selected
    top.take_all(current);
  }
  if (!ranks_blocks || mine >= tokens) return;
  top.sort_blocks();
  const i64 row = ((i64)(place.first + t) * GROUPS + group) * SEL_N;
  const i64 list =
      ((i64)group * cu_blocks[sequences] + cu_blocks[place.sequence]) * stretches + (place.first + t) / stretch;
  write_selection(top, side, current, selected + row, ranks + row, counts == nullptr ? nullptr : counts + list,
                  stretches);
}

// A warp per list: where each stretch begins inside the list (a list is ordered by stretch), its length, and
// each (list, stretch) gets a place among the stretch's work items. grid (lists / 8)
extern "C" __global__ void __launch_bounds__(256) select_totals(const int* counts, int* begins, int* totals,
                                                                int* places, Plan* plan, const int* cu_blocks,
                                                                int sequences, int stretches) {
  const int all = cu_blocks[sequences] * GROUPS, list = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (list >= all) return;
  int base = 0;
  for (int from = 0; from < stretches; from += 32) {
    const int s = from + lane, count = s < stretches ? counts[(i64)list * stretches + s] : 0;
    const int sum = warp_prefix_sum(count);
    if (s < stretches) begins[(i64)list * stretches + s] = base + sum - count;
    if (count > 0)
      places[(i64)list * stretches + s] = atomicAdd(plan->stretch_items + s, (count + OUTER_CHUNK - 1) / OUTER_CHUNK);
    base += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) totals[list] = base;
}

// One block of 1024 threads: offsets [2, G * blocks + 1] of every list and of its backward work items (forced
// tokens included), and where each stretch's forward work items start.
extern "C" __global__ void __launch_bounds__(1024) select_index(const int* totals, int* offsets, Plan* plan,
                                                                const int* cu_seqlens, const int* cu_blocks,
                                                                int sequences, int stretches) {
  __shared__ int sums[2][32];
  __shared__ int bases[2];
  __shared__ int items[MAX_STRETCHES];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const int blocks = cu_blocks[sequences], all = blocks * GROUPS;
  if (thread < 2) bases[thread] = 0;
  if (thread < stretches) items[thread] = plan->stretch_items[thread];
  __syncthreads();
  if (thread < stretches) {
    int base = 0;
    for (int e = 0; e < thread; e++) base += items[e];
    plan->stretch_base[thread] = base;
  }
  for (int from = 0; from < all; from += 1024) {
    const int i = from + thread;
    int value[2] = {0, 0};
    if (i < all) {
      const int at = i % blocks, s = sequence_of(cu_blocks, sequences, at);
      const int length = cu_seqlens[s + 1] - cu_seqlens[s], block = at - cu_blocks[s];
      const int forced = block == 0 ? length : min(length, (block + 2) * SEL_L) - block * SEL_L;
      value[0] = totals[i];
      value[1] = (value[0] + forced + SEL_CHUNK - 1) / SEL_CHUNK;
    }
    int before[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int sum = warp_prefix_sum(value[n]);
      before[n] = sum - value[n];
      if (lane == 31) sums[n][warp] = sum;
    }
    __syncthreads();
    if (warp < 2) {
      const int mine = sums[warp][lane];
      const int sum = warp_prefix_sum(mine);
      sums[warp][lane] = sum - mine + bases[warp];
      __syncwarp();
      if (lane == 31) bases[warp] += sum;
    }
    __syncthreads();
    if (i < all)
#pragma unroll
      for (int n = 0; n < 2; n++) offsets[n * (all + 1) + i] = before[n] + sums[n][warp];
    __syncthreads();
  }
  if (thread < 2) offsets[thread * (all + 1) + all] = bases[thread];
}

// Writes the work items, a warp per list: forward (list, place in it), backward (list, chunk). Blocks: lists / 8
__device__ __forceinline__ void write_items(int number, const int* offsets, const int* begins, const int* places,
                                            const Plan* plan, int* forward_items, int* backward_items,
                                            const int* cu_blocks, int sequences, int stretches) {
  const int all = cu_blocks[sequences] * GROUPS, list = number * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (list >= all) return;
  const int from = offsets[all + 1 + list], to = offsets[all + 2 + list], total = offsets[list + 1] - offsets[list];
  for (int i = from + lane; i < to; i += 32) ((int2*)backward_items)[i] = make_int2(list, i - from);
  for (int s = lane; s < stretches; s += 32) {
    const i64 at = (i64)list * stretches + s;
    const int begin = begins[at], end = s + 1 < stretches ? begins[at + 1] : total;
    if (begin == end) continue;
    int2* const items = (int2*)forward_items + plan->stretch_base[s] + places[at];
    for (int i = 0; begin + i * OUTER_CHUNK < end; i++) items[i] = make_int2(list, begin + i * OUTER_CHUNK);
  }
}

// Union of the blocks of every tile of UNION_TOKENS tokens, a warp each; the last block chooses, for every stretch, the
// kernel of the selected branch, and schedules the KV-outer one. choice: ADAPTIVE takes tile-union where the mean union
// is at most `limit` blocks, KV-outer otherwise; other choices are taken as they are. A tile that lies in two counts in
// both. Blocks: tiles of all groups / 8; shared: 8 * words * 4 bytes, words as in selected_union
__device__ __forceinline__ void choose_kernels(int number, int numbers, u32* bitmaps, const int* selected, Plan* plan,
                                               const int* cu_seqlens, int sequences, int words, int stretch,
                                               int stretches, int choice, float limit) {
  __shared__ int choices[MAX_STRETCHES], pieces;
  __shared__ bool last;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, at = number * 8 + warp, group = at % GROUPS;
  u32* const bits = bitmaps + warp * words;
  Place place;
  if (find_place(
          cu_seqlens, sequences, at / GROUPS, [](int length) { return (length + UNION_TOKENS - 1) / UNION_TOKENS; },
          place)) {
    const int t0 = place.tile * UNION_TOKENS, tokens = min(UNION_TOKENS, place.length - t0);
    for (int w = lane; w < words; w += 32) bits[w] = 0;
    __syncwarp();
    for (int i = lane; i < tokens * SEL_N; i += 32) {
      const int block = selected[((i64)(place.first + t0 + i / SEL_N) * GROUPS + group) * SEL_N + i % SEL_N];
      if (block >= 0) atomicOr(bits + block / 32, 1u << (block & 31));
    }
    __syncwarp();
    int count = 0;
    for (int w = lane; w < words; w += 32) count += __popc(bits[w]);
    count = warp_sum(count);
    if (lane == 0) {
      const int from = (place.first + t0) / stretch, to = (place.first + t0 + tokens - 1) / stretch;
      for (int s = from; s <= to; s++) {
        atomicAdd(plan->union_sizes + s, count);
        atomicAdd(plan->union_tiles + s, 1);
      }
      __threadfence();
    }
  }
  __syncthreads();
  if (thread == 0) last = atomicAdd(&plan->choosers_done, 1) == numbers - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (thread < stretches) {
    const int s = thread, unions = atomicAdd(plan->union_sizes + s, 0), tiles = atomicAdd(plan->union_tiles + s, 0);
    const int mine = choice == ADAPTIVE    ? ((float)unions <= limit * (float)tiles ? TILE_UNION : KV_OUTER)
                     : choice == ALTERNATE ? (s & 1 ? KV_OUTER : TILE_UNION)
                                           : choice;
    choices[s] = plan->choice[s] = mine;
  }
  __syncthreads();
  if (thread < stretches) {
    int piece = 0;
    for (int s = 0; s < thread; s++) piece += choices[s] == KV_OUTER;
    if (choices[thread] == KV_OUTER) {
      plan->piece_stretch[piece] = thread;
      plan->piece_items[piece] = plan->stretch_items[thread];
      plan->piece_merges[piece] = merge_items(thread, stretch, cu_seqlens[sequences]);
      piece++;
    }
    if (thread == stretches - 1) {
      plan->pieces = pieces = piece;
      plan->union_stretches = stretches - piece;
    }
  }
  __syncthreads();
  if (thread < pieces + LAG + 1) {
    int ticket = 0;
    for (int e = 0; e < thread; e++)
      ticket += (e < pieces ? plan->piece_items[e] : 0) + (e >= LAG ? plan->piece_merges[e - LAG] : 0);
    plan->first_ticket[thread] = ticket;
  }
}

// Writes each chosen (token, slot) into its block's list: entry = position in the sequence * 64 + slot.
// One thread per (token, group, slot)
__device__ __forceinline__ void write_lists(int number, const int* selected, const int* ranks, const int* offsets,
                                            const int* begins, u32* lists, const int* cu_seqlens, const int* cu_blocks,
                                            int sequences, int stretch, int stretches) {
  const int tokens = cu_seqlens[sequences];
  const i64 i = (i64)number * 256 + threadIdx.x;
  if (i >= (i64)tokens * GROUPS * SEL_N) return;
  const int block = selected[i], slot = (int)(i % SEL_N), group = (int)(i / SEL_N % GROUPS),
            token = (int)(i / SEL_N / GROUPS);
  if (block <= 0) return;
  const int s = sequence_of(cu_seqlens, sequences, token), t = token - cu_seqlens[s];
  if (block >= t / SEL_L - 1) return;
  const i64 list = (i64)group * cu_blocks[sequences] + cu_blocks[s] + block;
  lists[offsets[list] + begins[list * stretches + token / stretch] + ranks[i]] = (u32)t * 64 + slot;
}

// What follows from the index, side by side in one launch: the first `choosers` blocks choose, the next `itemizers`
// write the work items, the rest the lists. Each part can be left out. choice, limit: see above.
extern "C" __global__ void __launch_bounds__(256) select_finish(
    const int* selected, const int* ranks, const int* offsets, const int* begins, const int* places, Plan* plan,
    int* forward_items, int* backward_items, u32* lists, const int* cu_seqlens, const int* cu_blocks, int sequences,
    int words, int stretch, int stretches, int choice, float limit, int choosers, int itemizers) {
  extern __shared__ u32 bitmaps[];
  const int number = blockIdx.x;
  if (number < choosers)
    choose_kernels(number, choosers, bitmaps, selected, plan, cu_seqlens, sequences, words, stretch, stretches, choice,
                   limit);
  else if (number < choosers + itemizers)
    write_items(number - choosers, offsets, begins, places, plan, forward_items, backward_items, cu_blocks, sequences,
                stretches);
  else
    write_lists(number - choosers - itemizers, selected, ranks, offsets, begins, lists, cu_seqlens, cu_blocks,
                sequences, stretch, stretches);
}

// Puts every list in ascending order through a bitmap of the sequence: the same selection then always
// gives the same sums. grid (blocks, groups); shared: bitmap of the longest sequence, (max_length + 31) / 32 words.
extern "C" __global__ void __launch_bounds__(256) select_sort(const int* selected, const int* offsets, u32* lists,
                                                              const int* cu_seqlens, const int* cu_blocks,
                                                              int sequences) {
  extern __shared__ u32 bits[];
  __shared__ int sums[8];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const int blocks = cu_blocks[sequences], at = blockIdx.x, group = blockIdx.y;
  const int from = offsets[group * blocks + at], to = offsets[group * blocks + at + 1];
  if (to - from < 2) return;
  const int s = sequence_of(cu_blocks, sequences, at);
  const int first = cu_seqlens[s], words = (cu_seqlens[s + 1] - first + 31) / 32, block = at - cu_blocks[s];
  for (int w = thread; w < words; w += 256) bits[w] = 0;
  __syncthreads();
  for (int i = from + thread; i < to; i += 256) atomicOr(bits + lists[i] / 64 / 32, 1u << (lists[i] / 64 % 32));
  __syncthreads();
  int base = from;
  for (int w0 = 0; w0 < words; w0 += 256) {
    u32 word = w0 + thread < words ? bits[w0 + thread] : 0;
    const int own = __popc(word), sum = warp_prefix_sum(own);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int position = base + sum - own;
    for (int w = 0; w < 8; w++) {
      if (w < warp) position += sums[w];
      base += sums[w];
    }
    while (word != 0) {
      const int t = (w0 + thread) * 32 + __ffs(word) - 1;
      word &= word - 1;
      const int* const row = selected + ((i64)(first + t) * GROUPS + group) * SEL_N;
      int slot = 0;
      while (row[slot] != block) slot++;
      lists[position++] = (u32)t * 64 + slot;
    }
    __syncthreads();
  }
}
