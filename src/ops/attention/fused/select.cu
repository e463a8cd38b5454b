// Selection: fp32 importance of every block for every (token, group), and the exact top n. No S x S/l' buffer exists.
//   top-blocks.cuh      the running list of the best blocks of a token
//   inverted-index.cuh  which tokens selected a block: the lists that the KV-outer kernels walk
#include "inverted-index.cuh"
#include "matrix.cuh"
#include "top-blocks.cuh"

constexpr int KEYS = (64 / PER_BLOCK) * PER_BLOCK;  // compressed keys taken per step: whole blocks
constexpr int BLOCKS = KEYS / PER_BLOCK;
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
EXPORT(select_blocks_shared, (TEAMS * ROUNDS + 2) * PK * PANEL + TEAMS * ROUNDS * 64 * 4 + 1024 +
                                 (POOL_IN_REGISTERS ? 0 : 64 * (STRIDE + 8) * 4) + shares_bytes(SPLIT))
EXPORT(select_blocks_threads, THREADS)
EXPORT(select_blocks_tokens, TOKENS)

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
