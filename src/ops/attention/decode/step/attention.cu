// Sparse attention of a decode step, one launch: a cluster of CLUSTER blocks for each (sequence, group) puts the new
// token into the cache, sees the compressed keys, selects blocks by their scores, sees those and the window, and sums
// the three branches by their gates.
//
// The blocks of a cluster share out everything: ranges of the compressed keys, the selection blocks of that range to
// rank, units of 32 keys to see, numbers of the result. What others need a block writes into their shared memory before
// they wait for each other, three times in all; scores stay in shared memory as far as they fit (SCORES_SHARED). For
// few sequences of long contexts a cluster per group leaves most of the GPU idle: there spread.cu runs first (SPREAD).
#include "append.cuh"
#include "cluster.cuh"
#include "importance.cuh"
#include "ranking.cuh"

#ifndef SCORES_SHARED
#define SCORES_SHARED 1
#endif
// 1: spread.cu has seen the compressed keys, put the token into the cache and left the best blocks of every share.
#ifndef SPREAD
#define SPREAD 0
#endif

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int AHEAD = DK + DV <= 128 ? 2 : 1;  // units of a warp on their way at once: as many as registers hold
constexpr int NUMBERS = (HPG * DV + CLUSTER - 1) / CLUSTER;  // of the result, that a block writes
constexpr int SELECTION = 1, SELECTED = 2, WINDOWED = 4, COMPRESSED = 8;  // parts of the work, to be timed one by one
constexpr int CMP = 0, SEL = 1, WIN = 2;
// Whether the window is seen while the blocks of a cluster exchange importances, or before: with few blocks, which have
// more of it, that is faster.
constexpr bool WINDOW_MEANWHILE = CLUSTER >= 4;
constexpr int SPLITS = CLUSTER * WARPS;  // shares of spread.cu: one for every warp

struct Shared {
  alignas(16) bf16 q[16 * DK];
  // Of every warp, for one branch after the other, and of the compressed block that the token completes.
  alignas(16) float results[WARPS + 1][HPG][DV];
  float tops[WARPS + 1][HPG], sums[WARPS + 1][HPG];
  // What the blocks of the cluster found: all maxima and sums, and the numbers of the result that are this block's.
  float block_tops[3][CLUSTER][HPG], block_sums[3][CLUSTER][HPG], block_results[3][CLUSTER][NUMBERS];
  int block_seen[3][CLUSTER];
  u32 block_best[CLUSTER], most;
  float share[3][CLUSTER][HPG], lse[HPG], gates[HPG][3];
  float key[DK], block[DK + DV], completed;
  float probability[STRETCH * STRIDE + LEAD];
  Ranking<THREADS, ROOM> ranking;
  int selected[SEL_N], count, seen[3];
};

// Scores of the compressed keys of a pair: those of a rank in its shared memory, rows 2 apart modulo the banks; or all
// of them in memory.
struct Scores {
  float* own;
  i64 row;
  int range, rank;  // keys of a rank

  __device__ __forceinline__ float* at(int r, int key) const {
    return own + r * row + (SCORES_SHARED ? key - rank * range : key);
  }
  __device__ __forceinline__ float read(int r, int key) const {
    if (!SCORES_SHARED) return own[r * row + key];
    const int owner = key / range;
    const float* const there = own + r * row + key - owner * range;
    return owner == rank ? *there : read_from(owner, there);
  }
};

// Warps to block, of which the last slot may belong to the completed block; each block of the cluster gets its part.
__device__ __forceinline__ void merge_warps(Shared& s, int branch, int slots, int rank) {
  __syncthreads();
  for (int i = threadIdx.x; i < HPG * DV; i += THREADS) {
    const int r = i / DV, c = i % DV;
    float top = -positive_infinity();
#pragma unroll
    for (int w = 0; w <= WARPS; w++) top = fmaxf(top, w < slots ? s.tops[w][r] : -positive_infinity());
    const float base = top == -positive_infinity() ? 0.0f : top;
    float sum = 0.0f, result = 0.0f;
#pragma unroll
    for (int w = 0; w <= WARPS; w++) {
      if (w >= slots) break;
      const float factor = exp2_approximate(s.tops[w][r] - base);
      sum += factor * s.sums[w][r];
      result += factor * s.results[w][r][c];
    }
    write_to(i / NUMBERS, &s.block_results[branch][rank][i % NUMBERS], result);
    if (c < CLUSTER) write_to(c, &s.block_tops[branch][rank][r], top), write_to(c, &s.block_sums[branch][rank][r], sum);
  }
}

// The blocks' shares in a branch, divided by its sum; of the compressed branch the log-sum too.
__device__ __forceinline__ void weigh_blocks(Shared& s, int branch, int r) {
  float top = -positive_infinity(), factors[CLUSTER], sum = 0.0f;
#pragma unroll
  for (int c = 0; c < CLUSTER; c++) top = fmaxf(top, s.block_tops[branch][c][r]);
  const float base = top == -positive_infinity() ? 0.0f : top;
#pragma unroll
  for (int c = 0; c < CLUSTER; c++) {
    factors[c] = exp2_approximate(s.block_tops[branch][c][r] - base);
    sum += factors[c] * s.block_sums[branch][c][r];
  }
#pragma unroll
  for (int c = 0; c < CLUSTER; c++) s.share[branch][c][r] = sum > 0.0f ? factors[c] / sum : 0.0f;
  if (branch == CMP) s.lse[r] = base + log2f(sum);
}

// Importance of the candidates first ... end - 1, those of this rank, written to all blocks of the cluster.
// Never negative; NaN becomes 0 and ranks last. s.most: the bits of the largest one.
__device__ __forceinline__ void compute_importance(Shared& s, float* importance, const Scores& scores, int first,
                                                   int end) {
  for (int begin = first; begin < end; begin += STRETCH) {
    const int blocks = end - begin < STRETCH ? end - begin : STRETCH;
    const int from = begin * STRIDE - LEAD, count = blocks * STRIDE + LEAD;
    for (int i = threadIdx.x; i < count; i += THREADS) {
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < HPG; r++) sum += exp2_approximate(scores.read(r, from + i) - s.lse[r]);
      s.probability[i] = sum;
    }
    __syncthreads();
    u32 most = 0;
    for (int j = threadIdx.x; j < blocks; j += THREADS) {
      const float sum = importance_of(s.probability + j * STRIDE);
      most = max(most, __float_as_uint(sum));
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) write_to(c, importance + begin + j, sum);
    }
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0) atomicMax(&s.most, most);
    __syncthreads();
  }
}

// A share of the compressed keys that spread.cu has seen, as if this warp had. record: null without one.
__device__ __forceinline__ void take_record(Shared& s, const float* record) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = lane; i < HPG; i += 32) {
    s.tops[warp][i] = record ? record[i] : -positive_infinity();
    s.sums[warp][i] = record ? record[HPG + i] : 0.0f;
  }
  float* const results = &s.results[warp][0][0];
#pragma unroll 8
  for (int i = lane; i < HPG * DV; i += 32) results[i] = record ? record[2 * HPG + i] : 0.0f;
  if (lane == 0 && record) atomicAdd(&s.seen[CMP], (int)record[RECORD - 1]);
}

// Ranks the best blocks of all shares of spread.cu, `all` candidates having been shared out. important, candidates:
// [SPLITS][ROOM] of the pair. importance: room for three numbers of each.
__device__ __forceinline__ void rank_best_of_shares(Shared& s, float* importance, const float* important,
                                                    const int* candidates, int all) {
  const int share = (all + SPLITS - 1) / SPLITS, kept = share < ROOM ? share : ROOM, whole = all / share;
  const int rest = all - whole * share, count = whole * kept + (rest < kept ? rest : kept);
  int* const ties = (int*)(importance + count + 1);
  int* const index = ties + count + 1;
  u32 most = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const int at = i / kept * ROOM + i % kept;
    importance[1 + i] = important[at], index[1 + i] = candidates[at];
    most = max(most, __float_as_uint(important[at]));
  }
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) atomicMax(&s.most, most);
  __syncthreads();
  keep_most_important(s.ranking, importance, s.most, ties, count);
  for (int i = threadIdx.x; i < ROOM; i += THREADS) s.ranking.best[i] = index[s.ranking.best[i]];
  __syncthreads();
}

// Whether more blocks exist than are selected, and the cluster ranks them.
__device__ __forceinline__ bool ranks_blocks(int position) { return ROOM > 0 && position / SEL_L + 1 > SEL_N; }

// The importance of this rank's candidates goes to all blocks of the cluster, before they wait for each other.
__device__ __forceinline__ void offer_candidates(Shared& s, float* importance, const Scores& scores, int position) {
  const int all = position / SEL_L - 2;
  // The candidate's first key decides whose it is.
  const auto first_of = [&](int rank) {
    const int first = (rank * scores.range + STRIDE - 1) / STRIDE;
    return first < 1 ? 1 : first > all + 1 ? all + 1 : first;
  };
  const int first = first_of(scores.rank), end = scores.rank == CLUSTER - 1 ? all + 1 : first_of(scores.rank + 1);
  compute_importance(s, importance, scores, first, end);
  if (threadIdx.x < CLUSTER) write_to((int)threadIdx.x, &s.block_best[scores.rank], s.most);
}

// selected[0 ... count): block 0, the chosen ones ascending, current - 1, current. The blocks of the cluster have
// waited for each other since they offered candidates.
__device__ __forceinline__ void select_blocks(Shared& s, float* importance, const float* important,
                                              const int* candidates, int position) {
  const int current = position / SEL_L, all = current - 2;
  if (current + 1 <= SEL_N) {
    for (int i = threadIdx.x; i <= current; i += THREADS) s.selected[i] = i;
    if (threadIdx.x == 0) s.count = current + 1;
    __syncthreads();
    return;
  }
  if (SPREAD) {
    rank_best_of_shares(s, importance, important, candidates, all);
  } else if (ROOM > 0) {
    u32 most = 0;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) most = max(most, s.block_best[c]);
    keep_most_important(s.ranking, importance, most, (int*)(importance + all + 1), all);
  }
  for (int i = threadIdx.x; i < ROOM; i += THREADS) {
    int place = 1;
#pragma unroll
    for (int k = 0; k < ROOM; k++) place += s.ranking.best[k] < s.ranking.best[i];
    s.selected[place] = s.ranking.best[i];
  }
  if (threadIdx.x == 0)
    s.selected[0] = 0, s.selected[SEL_N - 2] = current - 1, s.selected[SEL_N - 1] = current, s.count = SEL_N;
  __syncthreads();
}

// rotations: [batch][2][DK / 2] cosines and sines of the token's position, then of the block's that it may complete.
// memory: [batch][HEADS][capacity] where scores do not fit into shared memory; records, important and candidates: what
// spread.cu leaves. chosen: [batch][GROUPS][SEL_N]; reads:
// [batch][GROUPS][3], keys seen by each branch. out: [batch][HEADS][DV].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
step_attention(const bf16* projection, const float* logits, const float* bias, const int* positions,
               const float2* rotations, const i64* cmp_tables, i64 cmp_place, const i64* sel_tables, i64 sel_place,
               const i64* win_tables, i64 win_place, const i64* tail_tables, i64 tail_place, const float* weight_keys,
               const float* weight_values, float* memory, i64 capacity, const float* records, const float* important,
               const int* candidates, int gate, float temperature, float gate_cmp, float gate_sel, float gate_win,
               int* chosen, int* reads, bf16* out, int parts) {
  extern __shared__ float4 shared_memory[];
  Shared& s = *(Shared*)shared_memory;
  let_next_start();
  cluster_arrive();  // others may write here from now on
  const int rank = cluster_rank(), g = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 pair = (i64)b * GROUPS + g;
  const Caches caches = {
      {cmp_tables, cmp_place}, {sel_tables, sel_place}, {win_tables, win_place}, {tail_tables, tail_place}};
  const Table cmp(caches.cmp, b), sel(caches.sel, b), win(caches.win, b);
  const int position = positions[b], known = count_compressed(position), t = lane % 4;
  const int units = (known + UNIT - 1) / UNIT, share = (units + CLUSTER - 1) / CLUSTER;
  const int begin = rank * share, stop = begin + share < units ? begin + share : units;
  const int end = SPREAD || !(parts & COMPRESSED) ? begin : stop;
  // Behind the fixed memory: this rank's scores, then two numbers for every selection block.
  const i64 room = SCORES_SHARED ? ((capacity / UNIT + CLUSTER - 1) / CLUSTER) * UNIT + 2 : 0;
  float* const behind = (float*)(&s + 1);
  float* const importance = behind + room * HPG;
  const Scores scores = SCORES_SHARED ? Scores{behind, room, share * UNIT, rank}
                                      : Scores{memory + pair * HPG * capacity, capacity, share * UNIT, rank};
  // ---- 1. Compressed keys of this rank: units of 32 keys on their way before the wait for the queries
  Unit unit[AHEAD];
  const auto load_compressed = [&](Unit& to, int u) { to.load<PAGE>(cmp.page(u * UNIT / PAGE), g, u * UNIT % PAGE); };
#pragma unroll
  for (int n = 0; n < AHEAD; n++) {
    const int u = begin + warp + n * WARPS;
    if (u < end) load_compressed(unit[n], u);
    else unit[n].clear();
  }
  for (int i = threadIdx.x; i < s.ranking.BINS; i += THREADS) s.ranking.histogram[i] = 0;
  if (threadIdx.x == 0) s.ranking.held = s.ranking.tied = 0, s.most = 0;
  if (threadIdx.x < 3) s.seen[threadIdx.x] = 0;
  wait_for_previous();
  const bf16* const row = projection + (i64)b * WIDTH;
  const float2* const rotation = rotations + b * DK;
  const bool appends = !SPREAD && rank == CLUSTER - 1 && (parts & COMPRESSED);
  if (appends)
    append_token(caches, b, g, position, row, rotation, weight_keys, weight_values,
                 Partial{s.tops[WARPS], s.sums[WARPS], &s.results[WARPS][0][0], &s.completed}, s.q, s.key, s.block);
  rotate_queries(s.q, row, rotation, g);
  __syncthreads();
  Queries queries;
  queries.load(s.q);
  Running running;
  running.reset();
  int seen = 0;
  for (int first = begin + warp; first < end; first += AHEAD * WARPS)
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      const int u = first + n * WARPS, next = u + AHEAD * WARPS;
      if (u >= end) break;
      const int high = known - u * UNIT < UNIT ? known - u * UNIT : UNIT;
      running.see(unit[n], queries, 0, high, [&](int half, int i, const float* x, float, float, float) {
        const int r = lane / 4 + 8 * half;  // an unfinished unit ends in -inf
        if (r < HPG) *(float2*)scores.at(r, u * UNIT + 8 * t + 2 * i) = make_float2(x[0], x[1]);
      });
      seen += high;
      if (next < end) load_compressed(unit[n], next);
    }
  if (SPREAD) take_record(s, parts & COMPRESSED ? records + (pair * SPLITS + rank * WARPS + warp) * RECORD : nullptr);
  else running.finish(s.tops[warp], s.sums[warp], &s.results[warp][0][0]);
  if (lane == 0 && seen > 0) atomicAdd(&s.seen[CMP], seen);
  // ---- 2. Window: on its way while the blocks of the cluster wait for each other: all of it but the newest tokens was
  // there before. Warps take its units from the other end than those of the selected blocks: who has none of the one
  // has of the other.
  const int low = position + 1 > WINDOW ? position + 1 - WINDOW : 0;
  int u = low / UNIT + (CLUSTER * WARPS - 1 - rank * WARPS - warp);
  bool loaded = (parts & WINDOWED) && (u + 1) * UNIT <= position;
  if (loaded) unit[0].load<PAGE>(win.page(u * UNIT / PAGE), g, u * UNIT % PAGE);
  cluster_wait();  // all have started
  merge_warps(s, CMP, appends ? WARPS + 1 : WARPS, rank);
  cluster_arrive();
  if (threadIdx.x < HPG)
    compute_gates(s.gates, threadIdx.x, logits + (i64)b * 3 * HEADS, bias, g,
                  {gate, temperature, {gate_cmp, gate_sel, gate_win}});
  cluster_wait();
  for (int r = threadIdx.x; r < HPG; r += THREADS) weigh_blocks(s, CMP, r);
  const bool ranks = !SPREAD && (parts & SELECTION) && ranks_blocks(position);
  const auto offer = [&] {
    if (WINDOW_MEANWHILE) __syncthreads();  // the log-sums; otherwise the merge of the window's warps has waited
    offer_candidates(s, importance, scores, position);
    cluster_arrive();
  };
  if (ranks && WINDOW_MEANWHILE) offer();
  const auto ignore = [](int, int, const float*, float, float, float) {};
  running.reset();
  seen = 0;
  if (parts & WINDOWED)
    for (; u * UNIT <= position; u += CLUSTER * WARPS) {
      const int from_key = low - u * UNIT > 0 ? low - u * UNIT : 0;
      const int to_key = position + 1 - u * UNIT < UNIT ? position + 1 - u * UNIT : UNIT;
      if (!loaded) unit[0].load<PAGE>(win.page(u * UNIT / PAGE), g, u * UNIT % PAGE);
      loaded = false;
      running.see(unit[0], queries, from_key, to_key, ignore);
      seen += to_key - from_key;
    }
  running.finish(s.tops[warp], s.sums[warp], &s.results[warp][0][0]);
  if (lane == 0 && seen > 0) atomicAdd(&s.seen[WIN], seen);
  merge_warps(s, WIN, WARPS, rank);
  // ---- 3. Selection: importance of the blocks from the scores of 1, the top n
  if (ranks && !WINDOW_MEANWHILE) offer();
  if (ranks) cluster_wait();
  int* const list = chosen + pair * SEL_N;
  if (parts & SELECTION) {
    const i64 best = pair * SPLITS * (ROOM > 0 ? ROOM : 1);
    select_blocks(s, importance, important + best, candidates + best, position);
    if (rank == 0)
      for (int i = threadIdx.x; i < SEL_N; i += THREADS) list[i] = i < s.count ? s.selected[i] : -1;
  } else {
    if (threadIdx.x == 0) s.count = position / SEL_L + 1 < SEL_N ? position / SEL_L + 1 : SEL_N;
    for (int i = threadIdx.x; i < SEL_N; i += THREADS) s.selected[i] = list[i];
    __syncthreads();
  }
  // ---- 4. Selected blocks
  constexpr int PER_BLOCK = SEL_L / UNIT;
  running.reset();
  seen = 0;
  const int selected_units = parts & SELECTED ? s.count * PER_BLOCK : 0;
  const auto keys_of_unit = [&](int u) {  // none beyond the newest token
    return position + 1 - s.selected[u / PER_BLOCK] * SEL_L - u % PER_BLOCK * UNIT;
  };
  for (int first = rank * WARPS + warp; first < selected_units; first += AHEAD * CLUSTER * WARPS) {
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      const int u = first + n * CLUSTER * WARPS;
      if (u < selected_units && keys_of_unit(u) > 0)
        unit[n].load<SEL_L>(sel.page(s.selected[u / PER_BLOCK]), g, u % PER_BLOCK * UNIT);
    }
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      const int u = first + n * CLUSTER * WARPS;
      if (u >= selected_units || keys_of_unit(u) <= 0) continue;
      const int high = min(keys_of_unit(u), UNIT);
      running.see(unit[n], queries, 0, high, ignore);
      seen += high;
    }
  }
  running.finish(s.tops[warp], s.sums[warp], &s.results[warp][0][0]);
  if (lane == 0 && seen > 0) atomicAdd(&s.seen[SEL], seen);
  merge_warps(s, SEL, WARPS, rank);
  // ---- 5. Keys read, and the gated sum: each rank writes NUMBERS of the [HPG * DV] results
  if (threadIdx.x < 3) {
    const int completed = threadIdx.x == CMP && appends ? (int)s.completed : 0;
    write_to(0, &s.block_seen[threadIdx.x][rank], s.seen[threadIdx.x] + completed);
  }
  cluster_arrive();
  cluster_wait();
  for (int i = threadIdx.x; i < 2 * HPG; i += THREADS) weigh_blocks(s, 1 + i / HPG, i % HPG);
  if (rank == 0 && threadIdx.x >= THREADS - 3) {
    const int branch = threadIdx.x - (THREADS - 3);
    int all = 0;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) all += s.block_seen[branch][c];
    reads[pair * 3 + branch] = all;
  }
  __syncthreads();
  for (int k = threadIdx.x; k < NUMBERS; k += THREADS) {
    const int i = rank * NUMBERS + k, r = i / DV;
    if (i >= HPG * DV) continue;
    float sum = 0.0f;
#pragma unroll
    for (int branch = 0; branch < 3; branch++)
#pragma unroll
      for (int c = 0; c < CLUSTER; c++)
        sum += s.gates[r][branch] * s.share[branch][c][r] * s.block_results[branch][c][k];
    write_one(out + ((i64)b * HEADS + g * HPG) * DV + i, sum);
  }
}

extern "C" __device__ int step_attention_shared = sizeof(Shared);
