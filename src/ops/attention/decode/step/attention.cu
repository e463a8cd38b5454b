// Sparse attention of a decode step, one launch: a cluster of CLUSTER blocks for each (sequence, group) puts the new
// token into the cache, sees the compressed keys, selects blocks by their scores, sees those and the window, and sums
// the three branches by their gates.
//
// The blocks of a cluster share out everything: ranges of the compressed keys, the selection blocks of that range to
// rank, units of 32 keys to see, numbers of the result. What others need a block sends into their shared memory, three
// times in all: sums of the compressed branch, the best of its selection blocks, and results. Scores stay in shared
// memory as far as they fit (SCORES_SHARED). For few sequences of long contexts a cluster per group leaves most of the
// GPU idle: there spread.cu runs first (SPREAD).
#include "append.cuh"
#include "cluster.cuh"
#include "importance.cuh"
#include "partials.cuh"
#include "ranking.cuh"

#ifndef SCORES_SHARED
#define SCORES_SHARED 1
#endif
// 1: spread.cu has seen the compressed keys, put the token into the cache and left the best blocks of every share.
#ifndef SPREAD
#define SPREAD 0
#endif

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int AHEAD = DK + DV <= 128 ? 2 : 1;  // units of a warp in flight: as many as registers hold
constexpr int SELECTION = 1, SELECTED = 2, WINDOWED = 4, COMPRESSED = 8;  // parts of the work, to be timed one by one
constexpr int CMP = 0, SEL = 1, WIN = 2;
// True: the window is computed while the blocks of a cluster exchange candidates, and merged together with the selected
// blocks. False: it is computed before them, because a single block waits for no other.
constexpr bool WINDOW_MEANWHILE = CLUSTER > 1;
// Elements of the result that a block writes: multiples of eight, so that eight belong to one head. Rows are padded so
// that the next block's elements are in other banks.
constexpr int NUMBERS = (HPG * DV + 8 * CLUSTER - 1) / (8 * CLUSTER) * 8;
constexpr int NUMBERS_ROW = CLUSTER > 1 ? NUMBERS + 32 / CLUSTER : NUMBERS;
constexpr int PLACES = ROOM > 0 ? ROOM : 1;
// In small clusters every warp offers the best of its candidates, in large ones every block.
constexpr bool WARPS_OFFER = !SPREAD && CLUSTER <= 2;
constexpr int LISTS = WARPS_OFFER ? WARPS : 1;
constexpr int LISTED = CLUSTER * LISTS * PLACES;  // candidates that the blocks of a cluster exchange
constexpr int OFFERED = (LISTED + 3) / 4 * 4;
// Candidates of a block up to which they are compared each with each, if blocks offer; of spread.cu the best of WARPS
// shares.
constexpr int COUNTED = SPREAD ? (WARPS * PLACES + 3) / 4 * 4 : 256;
// Candidates of a warp up to which it ranks them itself.
constexpr int MAX_OF_LANE = 4, MAX_OF_WARP = 32 * MAX_OF_LANE;
constexpr int SPLITS = CLUSTER * WARPS;  // shares of spread.cu: one for every warp
// Selection blocks whose importance a warp computes at a time, and the compressed keys of these.
constexpr int PASS = STRIDE <= 4 ? 32 : STRIDE <= 128 ? 128 / STRIDE : 1, PASS_KEYS = PASS * STRIDE;
constexpr int BEFORE = (LEAD + 1) / 2 * 2;  // room for the keys before them, so that pairs of keys are aligned
constexpr int PROBABILITIES = WARPS_OFFER ? WARPS * (BEFORE + PASS_KEYS + PASS_KEYS % 2) : STRETCH * STRIDE + LEAD;
constexpr int SUMS = 0, CANDIDATES = 1, RESULTS = 2;  // exchanges of the cluster

static_assert(LEAD <= 32, "a lane for each compressed block that begins before a selection block");

struct Shared {
  alignas(16) bf16 q[8 * HALVES * DK], token[TOKEN];
#if ROPE_WINDOW
  alignas(16) bf16 window_q[8 * HALVES * DK];
#endif
  Partials<WARPS> partials[WINDOW_MEANWHILE ? 2 : 1];  // one branch after the other; a window merged late in the second
  // Partial results of the cluster's blocks: all maxima and sums, and this block's elements of the result.
  alignas(16) float block_results[3][CLUSTER][NUMBERS_ROW];
  Vector<2> block_stats[3][CLUSTER][HPG];  // maximum and sum
  int block_seen[3][CLUSTER];
  // This block's candidates, if few, and those that the cluster's blocks offer (`count_ahead`).
  alignas(16) int order[WARPS_OFFER ? WARPS * MAX_OF_WARP : COUNTED], offered[OFFERED];
  int index[SPREAD ? COUNTED : 1], offered_index[OFFERED];
  alignas(16) int kept[WARPS_OFFER ? WARPS : 1][2 * KEPT];
  u64 exchanges[3];
  u32 most;
  float gates[HPG][3];
  float key[DK], block[DK + DV];
  alignas(8) float probability[SPREAD ? 1 : PROBABILITIES];
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
  // Keys that `at` can read, up to a limit.
  __device__ __forceinline__ int first() const { return SCORES_SHARED && CLUSTER > 1 ? rank * range : 0; }
  __device__ __forceinline__ int end(int limit) const {
    return SCORES_SHARED && CLUSTER > 1 ? min(limit, (rank + 1) * range) : limit;
  }
  // Score of a key that any rank computed.
  __device__ __forceinline__ float read(int r, int key) const {
    if (!SCORES_SHARED || CLUSTER == 1) return *at(r, key);
    return read_from(key / range, own + r * row + key % range);
  }
};

// Over CLUSTER neighbouring lanes, one for each block of the cluster.
__device__ __forceinline__ float max_of_blocks(float x) {
#pragma unroll
  for (int lanes = 1; lanes < CLUSTER; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}
__device__ __forceinline__ float sum_of_blocks(float x) {
#pragma unroll
  for (int lanes = 1; lanes < CLUSTER; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// Warps to block: COUNT branches from `branch` on, of partials[0] and the next. Each block of the cluster gets its
// part.
template <int COUNT>
__device__ __forceinline__ void merge_warps(Shared& s, int branch, bool extra, int rank, int exchange) {
  constexpr int VECTOR = 4, TASKS = HPG * DV / VECTOR;
  u64* const to_exchange = &s.exchanges[exchange];
  __syncthreads();
  // Scores and the appended token become visible with the first exchange. The last warp has the least to merge.
  if (exchange == SUMS && CLUSTER > 1 && threadIdx.x >= THREADS - CLUSTER)
    exchange_arrive(to_exchange, threadIdx.x - (THREADS - CLUSTER));
  for (int i = threadIdx.x; i < COUNT * TASKS; i += THREADS) {
    const int which = i / TASKS, n = i % TASKS * VECTOR, r = n / DV, c = n % DV;
    const Merged<VECTOR> merged(s.partials[which], r, c, extra);
    send_to(n / NUMBERS, (Vector<VECTOR>*)&s.block_results[branch + which][rank][n % NUMBERS], merged.result,
            to_exchange);
    for (int to = c / VECTOR; to < CLUSTER; to += DV / VECTOR)
      send_to(to, &s.block_stats[branch + which][rank][r], Vector<2>{merged.top, merged.sum}, to_exchange);
  }
}
// Bytes that a block receives of one branch.
__device__ __forceinline__ int branch_bytes(int rank) {
  const int numbers = min(max(HPG * DV - rank * NUMBERS, 0), NUMBERS);
  return 4 * CLUSTER * (numbers + 2 * HPG);
}

// The maximum and the inverse of the sum of every head of the compressed branch over the blocks of the cluster, in each
// warp for itself: a lane for each head.
struct Softmax {
  float top[HPG], inverse[HPG];

  __device__ __forceinline__ Softmax(const Shared& s) {
    const int lane = threadIdx.x % 32, r = lane < HPG ? lane : HPG - 1;
    Vector<2> stats[CLUSTER];
    float most = -positive_infinity(), sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) stats[c] = s.block_stats[CMP][c][r], most = fmaxf(most, stats[c].x[0]);
    const float base = most == -positive_infinity() ? 0.0f : most;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) sum += exp2_approximate(stats[c].x[0] - base) * stats[c].x[1];
    const float share = __fdividef(1.0f, sum);
#pragma unroll
    for (int i = 0; i < HPG; i++) top[i] = __shfl_sync(~0u, base, i), inverse[i] = __shfl_sync(~0u, share, i);
  }
  __device__ __forceinline__ float probability(int r, float score) const {
    return exp2_approximate(score - top[r]) * inverse[r];
  }
};

// Importance of `count` candidates from block `first` on. Never negative; NaN becomes 0 and ranks last.
__device__ __forceinline__ void compute_importance(Shared& s, float* importance, const Scores& scores, int first,
                                                   int count) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Keys of other ranks, before and after its own, are read by the last warp, the first ones while others compute.
  const int lead = max(0, scores.first() - (first * STRIDE - LEAD));
  const bool is_lead = warp == WARPS - 1 && lane < lead;
  float ahead[HPG];
#pragma unroll
  for (int r = 0; r < HPG; r++) ahead[r] = is_lead ? scores.read(r, first * STRIDE - LEAD + lane) : 0.0f;
  const Softmax softmax(s);
  for (int begin = 0; begin < count; begin += STRETCH) {
    const int blocks = count - begin < STRETCH ? count - begin : STRETCH;
    const int from = (first + begin) * STRIDE - LEAD, end = from + blocks * STRIDE + LEAD;
    const int own_from = max(from, scores.first()), own_end = scores.end(end);
    if (is_lead && begin == 0) {
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < HPG; r++) sum += softmax.probability(r, ahead[r]);
      s.probability[lane] = sum;
    }
    if (warp == WARPS - 1)
      for (int key = own_end + lane; key < end; key += 32) {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < HPG; r++) sum += softmax.probability(r, scores.read(r, key));
        s.probability[key - from] = sum;
      }
    // Two at a time, so that one is read while the other is added up.
    for (int key = own_from + threadIdx.x; key < own_end; key += 2 * THREADS) {
      const int other = key + THREADS < own_end ? key + THREADS : key;
      float sums[2] = {};
#pragma unroll
      for (int r = 0; r < HPG; r++) {
        sums[0] += softmax.probability(r, *scores.at(r, key));
        sums[1] += softmax.probability(r, *scores.at(r, other));
      }
      s.probability[key - from] = sums[0], s.probability[other - from] = sums[1];
    }
    __syncthreads();
    for (int j = threadIdx.x; j < blocks; j += THREADS)
      importance[begin + j] = importance_of(s.probability + j * STRIDE);
    __syncthreads();
  }
}

// Importance of the candidates begin ... end - 1 of a block, of which number 0 is selection block `first`, by one warp.
// Never negative; NaN becomes 0 and ranks last.
__device__ __forceinline__ void compute_importance_of_warp(Shared& s, float* importance, const Scores& scores,
                                                           const Softmax& softmax, int first, int begin, int end) {
  const int lane = threadIdx.x % 32;
  float* const probability = s.probability + threadIdx.x / 32 * (PROBABILITIES / WARPS);
  const auto probability_of = [&](const auto& score) {
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < HPG; r++) sum += softmax.probability(r, score(r));
    return sum;
  };
  for (int at = begin; at < end; at += PASS) {
    const int blocks = min(PASS, end - at), from = (first + at) * STRIDE;
    // Keys before the first block: those of another rank, or of the pass before.
    float lead = 0.0f;
    if (lane < LEAD) {
      const int key = from - LEAD + lane;
      const auto score = [&](int r) { return key < scores.first() ? scores.read(r, key) : *scores.at(r, key); };
      lead = at != begin ? probability[BEFORE + PASS_KEYS - LEAD + lane] : probability_of(score);
    }
    __syncwarp();
    if (lane < LEAD) probability[BEFORE - LEAD + lane] = lead;
    // A rank's keys are whole units. Two keys at a time, where all of a block are the rank's.
    constexpr bool IN_PAIRS = STRIDE % 2 == 0 && UNIT % STRIDE == 0;
    if (IN_PAIRS)
#pragma unroll
      for (int n = 0; n < PASS_KEYS; n += 64) {
        const int i = n + 2 * lane;
        if (i >= blocks * STRIDE) continue;
        float sums[2] = {};
#pragma unroll
        for (int r = 0; r < HPG; r++) {
          const float2 x = *(const float2*)scores.at(r, from + i);
          sums[0] += softmax.probability(r, x.x), sums[1] += softmax.probability(r, x.y);
        }
        *(float2*)(probability + BEFORE + i) = make_float2(sums[0], sums[1]);
      }
#pragma unroll
    for (int n = 0; n < (IN_PAIRS ? 0 : PASS_KEYS); n += 32) {
      const int key = from + n + lane;
      if (n + lane >= blocks * STRIDE) continue;
      // Only a block of more than a unit ends in keys of the next rank.
      if (UNIT % STRIDE == 0 || key < scores.end(key + 1))
        probability[BEFORE + n + lane] = probability_of([&](int r) { return *scores.at(r, key); });
      else
        probability[BEFORE + n + lane] = probability_of([&](int r) { return scores.read(r, key); });
    }
    __syncwarp();
    for (int j = lane; j < blocks; j += 32)
      importance[at + j] = importance_of(probability + BEFORE - LEAD + j * STRIDE);
  }
}

// This block's candidate goes to all blocks of the cluster, as number `place` of the list. Of two threads with the same
// arguments one writes the importance, the other the index. Every place of a list is written: with -1 where there is
// no candidate.
__device__ __forceinline__ void offer(Shared& s, int list, int place, int bits, int index, int half) {
  const int at = list * PLACES + place;
#pragma unroll
  for (int c = 0; c < CLUSTER; c++)
    if (half == 0) send_to(c, &s.offered[at], bits, &s.exchanges[CANDIDATES]);
    else send_to(c, &s.offered_index[at], index, &s.exchanges[CANDIDATES]);
}

// Offers the best of the candidates order[0 ... count), of which order[count ... whole fours) are -1. index_of(i): the
// block. Two lanes for a candidate.
template <class Index>
__device__ __forceinline__ void offer_counted(Shared& s, const int* order, int rank, int count, const Index& index_of) {
  const int half = threadIdx.x % 2;
  for (int begin = 0; begin < max(count, ROOM); begin += THREADS / 2) {
    const int i = begin + (int)threadIdx.x / 2, j = i < count ? i : count - 1;
    int place = i;
    if (count > 0) {
      place = count_ahead<2>(order, (count + 3) / 4, j, half);
      place += __shfl_xor_sync(~0u, place, 1);
    }
    if (i >= count) place = i;
    if (place < ROOM) offer(s, rank, place, i < count ? order[i] : -1, i < count ? index_of(i) : 0, half);
  }
}

// A share of the compressed keys that spread.cu has seen, as if this warp had. record: null without one.
__device__ __forceinline__ void take_record(Shared& s, const float* record) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Partials<WARPS>& to = s.partials[0];
  for (int i = lane; i < HPG; i += 32) {
    to.tops[warp][i] = record ? record[i] : -positive_infinity();
    to.sums[warp][i] = record ? record[HPG + i] : 0.0f;
  }
#pragma unroll 12
  for (int i = lane; i < HPG * DV; i += 32) to.results[warp][i / DV][i % DV] = record ? record[2 * HPG + i] : 0.0f;
  if (lane == 0 && record) atomicAdd(&s.seen[CMP], (int)record[RECORD - 1]);
}

// Offers the best of many candidates, importance[1 ... count]; behind them is room for as many numbers. first: the
// block of the first one. Not inlined: most contexts need none of its code.
__device__ __noinline__ void offer_ranked(Shared& s, int rank, float* importance, int first, int count) {
  u32 most = 0;
  for (int i = 1 + threadIdx.x; i <= count; i += THREADS) most = max(most, __float_as_uint(importance[i]));
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) atomicMax(&s.most, most);
  __syncthreads();
  keep_most_important(s.ranking, importance, s.most, (int*)(importance + count + 1), count);
  for (int i = threadIdx.x; i < 2 * LISTS * PLACES; i += THREADS) {
    const bool is_best = i / 2 < ROOM;
    const int k = is_best ? s.ranking.best[i / 2] : 1;
    offer(s, rank * LISTS, i / 2, is_best ? (int)__float_as_uint(importance[k]) : -1, first - 1 + k, i % 2);
  }
}

// True if more blocks exist than are selected, so that the cluster ranks them.
__device__ __forceinline__ bool ranks_blocks(int position) { return ROOM > 0 && position / SEL_L + 1 > SEL_N; }

// The best of this rank's selection blocks go to all blocks of the cluster, before they wait for each other. memory:
// room for two numbers of each selection block.
__device__ __forceinline__ void offer_candidates(Shared& s, float* memory, const Scores& scores, int position) {
  const int all = position / SEL_L - 2;
  // The candidate's first key decides whose it is.
  const auto first_of = [&](int rank) {
    const int first = (rank * scores.range + STRIDE - 1) / STRIDE;
    return first < 1 ? 1 : first > all + 1 ? all + 1 : first;
  };
  const int first = first_of(scores.rank), end = scores.rank == CLUSTER - 1 ? all + 1 : first_of(scores.rank + 1);
  const int count = end - first;
  if (WARPS_OFFER) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Whole fours of every warp, so that they are aligned.
    const int share = ((count + WARPS - 1) / WARPS + 3) / 4 * 4;
    const int own = warp * share, own_end = min(own + share, count), own_count = max(own_end - own, 0);
    const bool fits = share <= MAX_OF_WARP;
    compute_importance_of_warp(s, fits ? (float*)s.order : memory + 1, scores, Softmax(s), first, own, own_end);
    if (fits) {
      if (lane < 3 && own_count % 4 != 0 && own_count % 4 + lane < 4) s.order[own_end + lane] = -1;
      __syncwarp();
      take_best<ROOM, MAX_OF_LANE>(s.order + own, own_count, s.kept[warp], [&](int place, int i, int bits) {
        offer(s, scores.rank * LISTS + warp, place, bits, first + own + i, 0);
        offer(s, scores.rank * LISTS + warp, place, bits, first + own + i, 1);
      });
      return;
    }
    __syncthreads();
  } else {
    const bool few = count <= COUNTED;
    if (few && threadIdx.x < 3 && count + (int)threadIdx.x < COUNTED) s.order[count + threadIdx.x] = -1;
    compute_importance(s, few ? (float*)s.order : memory + 1, scores, first, count);
    if (few) {
      offer_counted(s, s.order, scores.rank, count, [&](int i) { return first + i; });
      return;
    }
  }
  offer_ranked(s, scores.rank, memory, first, count);
}

// The same of the blocks that spread.cu has kept of this rank's shares. important, candidates: [SPLITS][ROOM] of the
// pair.
__device__ __forceinline__ void offer_kept(Shared& s, const float* important, const int* candidates, int rank,
                                           int position) {
  const int all = position / SEL_L - 2, share = (all + SPLITS - 1) / SPLITS;
  for (int i = threadIdx.x; i < COUNTED; i += THREADS) {
    const int first = (rank * WARPS + i / PLACES) * share, at = rank * WARPS * PLACES + i;
    const bool present = i < WARPS * PLACES && i % PLACES < min(share, all - first);
    s.order[i] = present ? (int)__float_as_uint(important[at]) : -1;
    s.index[i] = present ? candidates[at] : 0;
  }
  __syncthreads();
  offer_counted(s, s.order, rank, COUNTED, [&](int i) { return s.index[i]; });
}

// selected[0 ... count): block 0, the best of what the blocks of the cluster have offered, current - 1, current.
__device__ __forceinline__ void select_blocks(Shared& s, int position) {
  const int current = position / SEL_L;
  if (current + 1 <= SEL_N) {
    for (int i = threadIdx.x; i <= current; i += THREADS) s.selected[i] = i;
    if (threadIdx.x == 0) s.count = current + 1;
    __syncthreads();
    return;
  }
  if (threadIdx.x == 0)
    s.selected[0] = 0, s.selected[SEL_N - 2] = current - 1, s.selected[SEL_N - 1] = current, s.count = SEL_N;
  if constexpr (WARPS_OFFER && OFFERED > THREADS / 2) {
    if (threadIdx.x < 32)
      take_best<ROOM, (LISTED + 31) / 32>(s.offered, LISTED, s.kept[0], [&](int place, int i, int bits) {
        if (bits >= 0) s.selected[1 + place] = s.offered_index[i];
      });
  } else {
    for (int begin = 0; begin < OFFERED; begin += THREADS / 2) {
      const int i = begin + (int)threadIdx.x / 2, j = i < OFFERED ? i : OFFERED - 1;
      int place = count_ahead<2>(s.offered, OFFERED / 4, j, threadIdx.x % 2);
      place += __shfl_xor_sync(~0u, place, 1);
      if (i < OFFERED && place < ROOM && s.offered[i] >= 0) s.selected[1 + place] = s.offered_index[i];
    }
  }
  __syncthreads();
}

// list [SEL_N]: the selected blocks, ascending; -1 where there are fewer.
__device__ __forceinline__ void write_selection(const Shared& s, int* list) {
  for (int i = threadIdx.x; i < SEL_N; i += THREADS) {
    const int own = i < s.count ? s.selected[i] : -1;
    int place = i < s.count ? 0 : i;
    for (int k = 0; k < s.count; k++) place += s.selected[k] < own;
    list[place] = own;
  }
}

// The gated sum of the branches: this rank's numbers of the result of a pair, [HPG * DV]. A warp takes eight numbers of
// one head. First a lane has the weight of a block of the cluster in a branch, then four lanes add up a number.
__device__ __forceinline__ void write_sum(const Shared& s, bf16* out, int rank) {
  constexpr int TERMS = 3 * CLUSTER;
  const int lane = threadIdx.x % 32, term = lane < TERMS ? lane : TERMS - 1, branch = term / CLUSTER;
  const int column = lane / 4, t = lane % 4;
  for (int first = threadIdx.x / 32 * 8; first < NUMBERS; first += WARPS * 8) {
    const int i = rank * NUMBERS + first, r = i / DV;
    if (i >= HPG * DV) return;
    const Vector<2> stats = s.block_stats[branch][term % CLUSTER][r];
    const float own = stats.x[0], top = max_of_blocks(own);
    const float factor = top == -positive_infinity() ? 0.0f : exp2_approximate(own - top);
    const float total = sum_of_blocks(factor * stats.x[1]);
    const float weight = total > 0.0f ? s.gates[r][branch] * __fdividef(factor, total) : 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < TERMS; n += 4) {
      const int of = n + t < TERMS ? n + t : 0;
      const float x = __shfl_sync(~0u, weight, of) * (&s.block_results[0][0][0])[of * NUMBERS_ROW + first + column];
      sum += n + t < TERMS ? x : 0.0f;
    }
    sum = quad_sum(sum);
    if (t == 0) write_one(out + i + column, sum);
  }
}

// rotations: [batch][2][DK / 2] cosines and sines of the token's position, then of the block's that it may complete.
// memory: [batch][HEADS][capacity] where scores do not fit into shared memory; records, important and candidates: what
// spread.cu leaves. chosen: [batch][GROUPS][SEL_N]; reads: [batch][GROUPS][3], keys seen by each branch. out:
// [batch][HEADS][DV].
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
  const int rank = cluster_rank();
  if ((int)threadIdx.x < OFFERED - LISTED) s.offered[LISTED + threadIdx.x] = -1;
  if (threadIdx.x == 0) {
    exchange_begin(&s.exchanges[SUMS], CLUSTER, branch_bytes(rank));
    exchange_begin(&s.exchanges[CANDIDATES], 0, 8 * LISTED);
    exchange_begin(&s.exchanges[RESULTS], 0, 2 * branch_bytes(rank) + (rank == 0 ? 3 * 4 * CLUSTER : 0));
  }
  cluster_arrive();  // others may write here from now on
  const int g = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
  float* const ranked = behind + room * HPG;
  const Scores scores = SCORES_SHARED ? Scores{behind, room, share * UNIT, rank}
                                      : Scores{memory + pair * HPG * capacity, capacity, share * UNIT, rank};
  // ---- 1. Compressed keys of this rank: units of 32 keys in flight before the wait for the queries
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
  // Warps take units of the window from the other end than those of the selected blocks: who has none of the one has
  // of the other.
  const int low = position + 1 > WINDOW ? position + 1 - WINDOW : 0;
  const int window_unit = low / UNIT + (CLUSTER * WARPS - 1 - rank * WARPS - warp);
  bool loads_window = (parts & WINDOWED) && (window_unit + 1) * UNIT <= position;
  bf16* const window_page = loads_window ? win.page(window_unit * UNIT / PAGE) : nullptr;
  const bool appends = !SPREAD && rank == CLUSTER - 1 && (parts & COMPRESSED);
  const bool ranks = (parts & SELECTION) && ranks_blocks(position);
  bf16* const token_page = appends ? page_of_task<THREADS>(caches, b, position) : nullptr;
  wait_for_previous();
  const bf16* const row = projection + (i64)b * WIDTH;
  const float2* const rotation = rotations + b * DK;
  TokenPiece piece;
  if (appends) piece.load(row, g);
#if ROPE_WINDOW
  copy_queries<THREADS>(s.q, row, g);
  rotate_queries<THREADS>(s.window_q, row, rotation, g);
#else
  rotate_queries<THREADS>(s.q, row, rotation, g);
#endif
  if (appends) piece.store(s.token);
  // By the last warps, which have the fewest queries.
  const Gate gates = {gate, temperature, {gate_cmp, gate_sel, gate_win}};
  if (threadIdx.x >= THREADS - 3 * HPG)
    load_gate(s.gates, (int)threadIdx.x - (THREADS - 3 * HPG), logits + (i64)b * 3 * HEADS, bias, g, gates);
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
  Partials<WARPS>& partials = s.partials[0];
  if (SPREAD) take_record(s, parts & COMPRESSED ? records + (pair * SPLITS + rank * WARPS + warp) * RECORD : nullptr);
  else running.finish<ROW>(partials.tops[warp], partials.sums[warp], &partials.results[warp][0][0]);
  const bool completes = appends && completes_block(position);
  if (appends)
    append_token<THREADS, ROW>(caches, token_page, b, g, position, s.token, rotation, weight_keys, weight_values,
                               Partial{partials.tops[WARPS], partials.sums[WARPS], &partials.results[WARPS][0][0]},
                               s.q, s.key, s.block);
  if (lane == 0 && seen > 0) atomicAdd(&s.seen[CMP], seen);
  let_next_start();  // not before: its weights would delay the queries and the compressed keys
  // ---- 2. Window: in flight while the blocks of the cluster wait for each other, as far as no new token is in it
  const auto load_window = [&] {
    if (loads_window) unit[0].load<PAGE>(window_page, g, window_unit * UNIT % PAGE);
  };
  if (!WINDOW_MEANWHILE) load_window();
  cluster_wait();  // all have started
  merge_warps<1>(s, CMP, completes, rank, SUMS);
  if (SPREAD && ranks)
    offer_kept(s, important + pair * SPLITS * ROOM, candidates + pair * SPLITS * ROOM, rank, position);
  if (!SPREAD) exchange_wait(&s.exchanges[SUMS]);
  if (!SPREAD && ranks && WINDOW_MEANWHILE) offer_candidates(s, ranked, scores, position);
  // From here on this block reads no scores of others, and none ends before all have come here. They need each other's
  // candidates anyway; the barrier, which takes no time, says it to compute-sanitizer too.
  if (!SPREAD && CLUSTER > 1) cluster_arrive_relaxed();
  if (WINDOW_MEANWHILE) load_window();
  if (threadIdx.x < HPG) compute_gates(s.gates, threadIdx.x, gates);
  const auto ignore = [](int, int, const float*, float, float, float) {};
  running.reset();
  seen = 0;
#if ROPE_WINDOW
  queries.load(s.window_q);
#endif
  if (parts & WINDOWED)
    for (int u = window_unit; u * UNIT <= position; u += CLUSTER * WARPS) {
      const int from_key = low - u * UNIT > 0 ? low - u * UNIT : 0;
      const int to_key = position + 1 - u * UNIT < UNIT ? position + 1 - u * UNIT : UNIT;
      if (!loads_window) unit[0].load<PAGE>(win.page(u * UNIT / PAGE), g, u * UNIT % PAGE);
      loads_window = false;
      running.see(unit[0], queries, from_key, to_key, ignore);
      seen += to_key - from_key;
    }
#if ROPE_WINDOW
  queries.load(s.q);
#endif
  Partials<WARPS>& window = s.partials[WINDOW_MEANWHILE ? 1 : 0];
  running.finish<ROW>(window.tops[warp], window.sums[warp], &window.results[warp][0][0]);
  if (lane == 0 && seen > 0) atomicAdd(&s.seen[WIN], seen);
  if (!WINDOW_MEANWHILE) merge_warps<1>(s, WIN, false, rank, RESULTS);
  // ---- 3. Selection: importance of the blocks from the scores of 1, the top n
  if (!SPREAD && ranks && !WINDOW_MEANWHILE) offer_candidates(s, ranked, scores, position);
  if (ranks) exchange_wait(&s.exchanges[CANDIDATES]);
  int* const list = chosen + pair * SEL_N;
  // After the barrier that ends this, partial results of the first branch can be overwritten: until then a warp may
  // merge them, because an exchange is no barrier of the block.
  if (parts & SELECTION) {
    select_blocks(s, position);
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
  running.finish<ROW>(partials.tops[warp], partials.sums[warp], &partials.results[warp][0][0]);
  if (lane == 0 && seen > 0) atomicAdd(&s.seen[SEL], seen);
  merge_warps<WINDOW_MEANWHILE ? 2 : 1>(s, SEL, false, rank, RESULTS);
  // ---- 5. Keys read, and the gated sum
  if (threadIdx.x < 3)
    send_to(0, &s.block_seen[threadIdx.x][rank], s.seen[threadIdx.x] + (threadIdx.x == CMP && completes ? 1 : 0),
            &s.exchanges[RESULTS]);
  if ((parts & SELECTION) && rank == CLUSTER - 1) write_selection(s, list);
  if (SPREAD) exchange_wait(&s.exchanges[SUMS]);
  exchange_wait(&s.exchanges[RESULTS]);
  if (rank == 0 && threadIdx.x >= THREADS - 3) {
    const int branch = threadIdx.x - (THREADS - 3);
    int all = 0;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) all += s.block_seen[branch][c];
    reads[pair * 3 + branch] = all;
  }
  write_sum(s, out + pair * HPG * DV, rank);
  if (!SPREAD && CLUSTER > 1) cluster_wait();
}

extern "C" __device__ int step_attention_shared = sizeof(Shared);
