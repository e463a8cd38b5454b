// Second half of attention in a decode step: a cluster of CLUSTER blocks for each (sequence, group) merges what the
// compressed branch left, selects blocks by its scores, sees the selected blocks and the window, and sums the three
// branches by their gates.
//
// The blocks of a cluster share out everything: ranges of the selection blocks to rank, units of 32 keys to see, numbers
// of the result to merge; what they find they read from each other's shared memory. DENSE: nothing is left but the merge.
#include "decode.cuh"

#ifndef CLUSTER
#define CLUSTER 8
#endif
#ifndef DENSE
#define DENSE 0
#endif

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int STRIDE = SEL_L / CMP_D, LEAD = CMP_L / CMP_D - 1, WEIGHTS = LEAD + STRIDE;  // of the importance
constexpr int ROOM = SEL_N - 3;                                                           // blocks that are not forced
constexpr int STRETCH = STRIDE <= 16 ? 256 : 4096 / STRIDE;                               // selection blocks ranked at a time
constexpr int SPLITS_AT_MOST = 64;
constexpr int ALL_SPLITS = (SPLITS_AT_MOST + 1 + 31) / 32;  // of a lane
constexpr int SELECTION = 1, SELECTED = 2, WINDOWED = 4;  // parts of the work, to be timed one by one

static_assert(STRIDE * CMP_D == SEL_L && STRETCH >= 1, "d divides l'");

#if CLUSTER > 1
// All writes of the cluster's blocks to their shared memory are there.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ int cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return (int)rank;
}
// The same place in the shared memory of another block of the cluster.
template <class X> __device__ __forceinline__ X read_from(int rank, const X* own) {
  static_assert(sizeof(X) == 4, "words only");
  u32 at = (u32)__cvta_generic_to_shared(own), there, x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(there) : "memory");
  return *(X*)&x;
}
#else
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
__device__ __forceinline__ int cluster_rank() { return 0; }
template <class X> __device__ __forceinline__ X read_from(int, const X* own) { return *own; }
#endif

struct Shared {
  bf16 q[16 * DK];
  // The compressed branch: factor of every split, log-sum of every head.
  float factor[SPLITS_AT_MOST + 1][HPG], lse[HPG], gates[HPG][3];
  float probability[STRETCH * STRIDE + LEAD];
  int best[ROOM + 1], held, counts[2][WARPS];
  int selected[SEL_N], count, seen[2];
  // Selected and window branch: of every warp, then of the block.
  alignas(16) float results[2][WARPS][HPG][DV];
  float tops[2][WARPS][HPG], sums[2][WARPS][HPG];
  float block_tops[2][HPG], block_sums[2][HPG], block_results[2][HPG][DV];
  float share[2][CLUSTER][HPG], whole[2][HPG];
};

// Importance of the candidates 1 ... all: each rank computes a range of them, then all have all. In powers of two times the
// weights 1, 2, ..., so never negative; a number that is none ranks last.
__device__ __forceinline__ void compute_importance(Shared& s, float* importance, const float* scores, i64 capacity, int all,
                                                   int rank) {
  const int range = (all + CLUSTER - 1) / CLUSTER;
  const int first = 1 + rank * range, end = first + range < 1 + all ? first + range : 1 + all;
  for (int begin = first; begin < end; begin += STRETCH) {
    const int blocks = end - begin < STRETCH ? end - begin : STRETCH;
    const int from = begin * STRIDE - LEAD, count = blocks * STRIDE + LEAD;
    constexpr int AHEAD = 4;  // keys of a thread whose scores are on the way at once
    for (int base = threadIdx.x; base < count; base += AHEAD * THREADS) {
      float score[AHEAD][HPG];
#pragma unroll
      for (int n = 0; n < AHEAD; n++) {
        const int i = base + n * THREADS < count ? base + n * THREADS : count - 1;
#pragma unroll
        for (int r = 0; r < HPG; r++) score[n][r] = scores[r * capacity + from + i];
      }
#pragma unroll
      for (int n = 0; n < AHEAD; n++) {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < HPG; r++) sum += exp2_approximate(score[n][r] - s.lse[r]);
        if (base + n * THREADS < count) s.probability[base + n * THREADS] = sum;
      }
    }
    __syncthreads();
    for (int j = threadIdx.x; j < blocks; j += THREADS) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < WEIGHTS; i++) {
        const int at = (i - LEAD) * CMP_D, stop = at + CMP_L;
        const int shared = (stop < SEL_L ? stop : SEL_L) - (at > 0 ? at : 0);
        sum += (float)shared / (float)CMP_D * s.probability[j * STRIDE + i];
      }
      importance[begin + j] = sum >= 0.0f ? sum : 0.0f;
    }
    __syncthreads();
  }
  cluster_sync();
  if (CLUSTER > 1)
    for (int j = 1 + threadIdx.x; j <= all; j += THREADS) {
      const int owner = (j - 1) / range;
      if (owner != rank) importance[j] = read_from(owner, importance + j);
    }
  __syncthreads();
}

// The ROOM most important of the candidates 1 ... all, the lower index among equals, in any order. Numbers that are not
// negative compare as their bits do: the bits of the last one that is taken are found from the top, by counting.
__device__ __forceinline__ void keep_best(Shared& s, const float* importance, int all) {
  int turn = 0;
  const auto count = [&](u32 least) {
    int own = 0;
    for (int j = 1 + threadIdx.x; j <= all; j += THREADS) own += __float_as_uint(importance[j]) >= least;
    own = __reduce_add_sync(~0u, own);
    if (threadIdx.x % 32 == 0) s.counts[turn][threadIdx.x / 32] = own;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += s.counts[turn][w];
    turn ^= 1;  // the next count writes elsewhere: who is late may still read these
    return total;
  };
  u32 least = 0;
  int taken = all;
  for (u32 bit = 1u << 30; bit != 0 && taken != ROOM; bit >>= 1) {
    const int more = count(least | bit);
    if (more >= ROOM) least |= bit, taken = more;
  }
  if (threadIdx.x == 0) s.held = 0;
  __syncthreads();
  // With more than ROOM at or above the limit some are equal to it: those above it first.
  const bool tie = taken != ROOM;
  for (int j = 1 + threadIdx.x; j <= all; j += THREADS) {
    const u32 bits = __float_as_uint(importance[j]);
    if (tie ? bits > least : bits >= least) s.best[atomicAdd(&s.held, 1)] = j;
  }
  __syncthreads();
  if (tie && threadIdx.x == 0)
    for (int j = 1; s.held < ROOM; j++)
      if (__float_as_uint(importance[j]) == least) s.best[s.held++] = j;
  __syncthreads();
}

// selected[0 ... count): block 0, the chosen ones ascending, current - 1, current.
__device__ __forceinline__ void select_blocks(Shared& s, float* importance, const float* scores, i64 capacity, int position,
                                              int rank) {
  const int current = position / SEL_L;
  if (current + 1 <= SEL_N) {
    for (int i = threadIdx.x; i <= current; i += THREADS) s.selected[i] = i;
    if (threadIdx.x == 0) s.count = current + 1;
    __syncthreads();
    return;
  }
  if (ROOM > 0) {
    compute_importance(s, importance, scores, capacity, current - 2, rank);
    keep_best(s, importance, current - 2);
  }
  for (int i = threadIdx.x; i < ROOM; i += THREADS) {
    int place = 1;
    for (int k = 0; k < ROOM; k++) place += s.best[k] < s.best[i];
    s.selected[place] = s.best[i];
  }
  if (threadIdx.x == 0) s.selected[0] = 0, s.selected[SEL_N - 2] = current - 1, s.selected[SEL_N - 1] = current, s.count = SEL_N;
  __syncthreads();
}

// A branch's part of this block: warps to block.
__device__ __forceinline__ void merge_warps(Shared& s, int branch) {
  for (int i = threadIdx.x; i < HPG * DV; i += THREADS) {
    const int r = i / DV, c = i % DV;
    float top = -positive_infinity();
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, s.tops[branch][w][r]);
    const float base = top == -positive_infinity() ? 0.0f : top;
    float sum = 0.0f, result = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float factor = exp2_approximate(s.tops[branch][w][r] - base);
      sum += factor * s.sums[branch][w][r];
      result += factor * s.results[branch][w][r][c];
    }
    s.block_results[branch][r][c] = result;
    if (c == 0) s.block_tops[branch][r] = top, s.block_sums[branch][r] = sum;
  }
}

// partial: [batch][GROUPS][splits + 1] records, as step_compressed leaves them. chosen: [batch][GROUPS][SEL_N]; reads:
// [batch][GROUPS][3], keys seen by each branch, or null.
// out: [batch][HEADS][DV].
extern "C" __global__ void __launch_bounds__(THREADS, 2)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
step_attend(const bf16* projection, const float* logits, const float* bias, const int* positions, const float2* rotations,
            const i64* sel_tables, i64 sel_place, const i64* win_tables, i64 win_place, const float* partial,
            const float* scores, i64 capacity, int splits, int gate, float temperature, float gate_cmp, float gate_sel,
            float gate_win, int* chosen, int* reads, bf16* out, int parts) {
  extern __shared__ float4 shared_memory[];
  Shared& s = *(Shared*)shared_memory;
  float* const importance = (float*)(&s + 1);  // of every selection block
  let_next_start();
  const int rank = cluster_rank(), g = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int position = positions[b];
  // The window first: all of it but the newest token was there before this step, so it is on its way before the wait.
  // Warps take its units from the other end than those of the selected blocks: who has none of the one has of the other.
  const Cached win = {win_tables, win_place};
  const int low = position + 1 > WINDOW ? position + 1 - WINDOW : 0;
  int u = low / UNIT + (CLUSTER * WARPS - 1 - rank * WARPS - warp);
  Unit unit;
  bool loaded = (parts & WINDOWED) && (u + 1) * UNIT <= position;
  if (loaded) unit.load<PAGE>(win.page(b, u * UNIT / PAGE), g, u * UNIT % PAGE);
  wait_for_previous();
  const i64 pair = (i64)b * GROUPS + g;
  const float* const from = partial + pair * (splits + 1) * RECORD;
  rotate_queries(s.q, projection + (i64)b * (DENSE ? AT_SEL : WIDTH), rotations + b * DK, g);
  compute_gates(s.gates, logits + (i64)b * 3 * HEADS, bias, g, {gate, temperature, {gate_cmp, gate_sel, gate_win}});
  if (threadIdx.x < 2) s.seen[threadIdx.x] = 0;
  // The compressed branch's maximum and sum, a warp for each head.
  for (int r = warp; r < HPG; r += WARPS) {
    float tops[ALL_SPLITS], sums[ALL_SPLITS], top = -positive_infinity(), sum = 0.0f;
#pragma unroll
    for (int n = 0; n < ALL_SPLITS; n++) {
      const int i = lane + 32 * n;
      tops[n] = i <= splits ? from[i * RECORD + r] : -positive_infinity();
      sums[n] = i <= splits ? from[i * RECORD + HPG + r] : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < ALL_SPLITS; n++) top = fmaxf(top, tops[n]);
    top = warp_max(top);
    const float base = top == -positive_infinity() ? 0.0f : top;
#pragma unroll
    for (int n = 0; n < ALL_SPLITS; n++) tops[n] = exp2_approximate(tops[n] - base), sum += tops[n] * sums[n];
    sum = warp_sum(sum);
#pragma unroll
    for (int n = 0; n < ALL_SPLITS; n++)
      if (lane + 32 * n <= splits) s.factor[lane + 32 * n][r] = sum > 0.0f ? tops[n] / sum : 0.0f;
    if (lane == 0) s.lse[r] = base + log2f(sum);
  }
  __syncthreads();
  Queries queries;
  queries.load(s.q);
  Running running;
  const auto ignore = [](int, int, const float*, float, float, float) {};
  running.reset();
  int seen = 0;
  if (parts & WINDOWED)
    for (; u * UNIT <= position; u += CLUSTER * WARPS) {
      const int from_key = low - u * UNIT > 0 ? low - u * UNIT : 0;
      const int to_key = position + 1 - u * UNIT < UNIT ? position + 1 - u * UNIT : UNIT;
      if (!loaded) unit.load<PAGE>(win.page(b, u * UNIT / PAGE), g, u * UNIT % PAGE);
      loaded = false;
      running.see(unit, queries, from_key, to_key, ignore);
      seen += to_key - from_key;
    }
  running.finish(s.tops[1][warp], s.sums[1][warp], &s.results[1][warp][0][0]);
  if (lane == 0 && seen > 0) atomicAdd(&s.seen[1], seen);
  int* const list = chosen + pair * SEL_N;
  if (parts & SELECTION) {
    select_blocks(s, importance, scores + pair * HPG * capacity, capacity, position, rank);
    if (rank == 0)
      for (int i = threadIdx.x; i < SEL_N; i += THREADS) list[i] = i < s.count ? s.selected[i] : -1;
  } else if (parts & SELECTED) {
    if (threadIdx.x == 0) s.count = position / SEL_L + 1 < SEL_N ? position / SEL_L + 1 : SEL_N;
    for (int i = threadIdx.x; i < SEL_N; i += THREADS) s.selected[i] = list[i];
    __syncthreads();
  }
  constexpr int PER_BLOCK = SEL_L / UNIT;
  running.reset();
  seen = 0;
  if (parts & SELECTED) {
    const Cached sel = {sel_tables, sel_place};
    for (int u = rank * WARPS + warp; u < s.count * PER_BLOCK; u += CLUSTER * WARPS) {
      const int index = s.selected[u / PER_BLOCK], first = u % PER_BLOCK * UNIT, left = position + 1 - index * SEL_L - first;
      if (left <= 0) continue;
      unit.load<SEL_L>(sel.page(b, index), g, first);
      running.see(unit, queries, 0, left < UNIT ? left : UNIT, ignore);
      seen += left < UNIT ? left : UNIT;
    }
  }
  running.finish(s.tops[0][warp], s.sums[0][warp], &s.results[0][warp][0][0]);
  if (lane == 0 && seen > 0) atomicAdd(&s.seen[0], seen);
  __syncthreads();
  merge_warps(s, 0);
  merge_warps(s, 1);
  cluster_sync();
  // Shares of the blocks in each branch, divided by the branch's sum.
  for (int i = threadIdx.x; i < 2 * HPG; i += THREADS) {
    const int branch = i / HPG, r = i % HPG;
    float top = -positive_infinity(), tops[CLUSTER];
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) tops[c] = read_from(c, &s.block_tops[branch][r]), top = fmaxf(top, tops[c]);
    const float base = top == -positive_infinity() ? 0.0f : top;
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      tops[c] = exp2_approximate(tops[c] - base);
      sum += tops[c] * read_from(c, &s.block_sums[branch][r]);
    }
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) s.share[branch][c][r] = sum > 0.0f ? tops[c] / sum : 0.0f;
  }
  if (reads != nullptr && rank == 0 && threadIdx.x < 2) {
    int all = 0;
    for (int c = 0; c < CLUSTER; c++) all += read_from(c, &s.seen[threadIdx.x]);
    reads[pair * 3 + 1 + threadIdx.x] = all;
  }
  if (reads != nullptr && rank == 0 && threadIdx.x == 2) {
    float all = 0.0f;
#pragma unroll 16
    for (int i = 0; i <= splits; i++) all += from[i * RECORD + RECORD - 1];
    reads[pair * 3] = (int)all;
  }
  __syncthreads();
  // Four threads for each number of this block's part of the result.
  constexpr int NUMBERS = (HPG * DV + CLUSTER - 1) / CLUSTER;
  for (int base = 0; base < NUMBERS * 4; base += THREADS) {
    const int k = (base + threadIdx.x) / 4, quarter = threadIdx.x % 4, i = rank * NUMBERS + k;
    const bool present = k < NUMBERS && i < HPG * DV;
    const int r = present ? i / DV : 0, c = present ? i % DV : 0;
    float cmp = 0.0f, sel = 0.0f, win = 0.0f;
    if (present) {
#pragma unroll 4
      for (int n = quarter; n <= splits; n += 4) {
        const float factor = s.factor[n][r];
        if (factor != 0.0f) cmp += factor * from[n * RECORD + 2 * HPG + i];
      }
      for (int n = quarter; n < CLUSTER; n += 4) {
        sel += s.share[0][n][r] * read_from(n, &s.block_results[0][r][c]);
        win += s.share[1][n][r] * read_from(n, &s.block_results[1][r][c]);
      }
    }
    float sum = s.gates[r][0] * cmp + s.gates[r][1] * sel + s.gates[r][2] * win;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (present && quarter == 0) write_one(out + ((i64)b * HEADS + g * HPG) * DV + i, sum);
  }
  cluster_sync();  // nobody leaves while its memory is read
}

extern "C" __device__ int step_attend_shared = sizeof(Shared);
