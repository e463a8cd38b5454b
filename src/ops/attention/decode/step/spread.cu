// The compressed branch of a decode step spread over the whole GPU, for few sequences of long contexts. Two launches
// run before attention.cu (SPREAD 1), whose clusters then read no compressed keys and rank few blocks:
//   step_scores  `splits` blocks per (sequence, group) attend to a share of the compressed keys each and store the
//                scores. The last one also puts the new token into the cache.
//   step_rank    as many blocks compute the importance of a share of the selection blocks each, and keep the ROOM best
#define READ_ONCE 1
#include "append.cuh"
#include "importance.cuh"
#include "partials.cuh"
#include "ranking.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int AHEAD = DK + DV <= 128 ? 2 : 1;  // units of a warp in flight: as many as registers hold

struct Shared {
  alignas(16) bf16 q[8 * HALVES * DK], token[TOKEN];
  Partials<WARPS> partials;
  float key[DK], block[DK + DV];
  int seen;
};

// grid (splits, GROUPS, batch). rotations: [batch][2][DK / 2], as in attention.cu. scores: [batch][HEADS][capacity], in
// powers of two. records: [batch][GROUPS][splits][RECORD], a share's maxima, sums, results and number of keys.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
step_scores(const bf16* projection, const int* positions, const float2* rotations, const i64* cmp_tables, i64 cmp_place,
            const i64* sel_tables, i64 sel_place, const i64* win_tables, i64 win_place, const i64* tail_tables,
            i64 tail_place, const float* weight_keys, const float* weight_values, float* scores, i64 capacity,
            float* records) {
  extern __shared__ float4 shared_memory[];
  Shared& s = *(Shared*)shared_memory;
  let_next_start();
  const int split = blockIdx.x, splits = gridDim.x, g = blockIdx.y, b = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const i64 pair = (i64)b * GROUPS + g;
  const Caches caches = {{cmp_tables, cmp_place}, {sel_tables, sel_place}, {win_tables, win_place},
                         {tail_tables, tail_place}};
  const Table cmp(caches.cmp, b);
  const int position = positions[b], known = count_compressed(position);
  const int units = (known + UNIT - 1) / UNIT, share = (units + splits - 1) / splits;
  const int begin = split * share, end = begin + share < units ? begin + share : units;
  Unit unit[AHEAD];
  const auto load_compressed = [&](Unit& to, int u) { to.load<PAGE>(cmp.page(u * UNIT / PAGE), g, u * UNIT % PAGE); };
  // Earlier steps wrote the keys, so they can be loaded before the wait for this step's queries.
#pragma unroll
  for (int n = 0; n < AHEAD; n++) {
    const int u = begin + warp + n * WARPS;
    if (u < end) load_compressed(unit[n], u);
    else unit[n].clear();
  }
  if (threadIdx.x == 0) s.seen = 0;
  const bool appends = split == splits - 1, completes = appends && completes_block(position);
  bf16* const token_page = appends ? page_of_task<THREADS>(caches, b, position) : nullptr;
  wait_for_previous();
  const bf16* const row = projection + (i64)b * WIDTH;
  const float2* const rotation = rotations + b * DK;
  TokenPiece piece;
  if (appends) piece.load(row, g);
#if ROPE_WINDOW
  copy_queries<THREADS>(s.q, row, g);
#else
  rotate_queries<THREADS>(s.q, row, rotation, g);
#endif
  if (appends) piece.store(s.token);
  __syncthreads();
  Queries queries;
  queries.load(s.q);
  Running running;
  running.reset();
  int seen = 0;
  float* const own = scores + pair * HPG * capacity;
  for (int first = begin + warp; first < end; first += AHEAD * WARPS)
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      const int u = first + n * WARPS, next = u + AHEAD * WARPS;
      if (u >= end) break;
      const int high = known - u * UNIT < UNIT ? known - u * UNIT : UNIT;
      running.see(unit[n], queries, 0, high, [&](int half, int i, const float* x, float, float, float) {
        const int r = lane / 4 + 8 * half;  // an unfinished unit ends in -inf
        if (r < HPG) *(float2*)(own + r * capacity + u * UNIT + 8 * t + 2 * i) = make_float2(x[0], x[1]);
      });
      seen += high;
      if (next < end) load_compressed(unit[n], next);
    }
  Partials<WARPS>& partials = s.partials;
  running.finish<ROW>(partials.tops[warp], partials.sums[warp], &partials.results[warp][0][0]);
  if (lane == 0 && seen > 0) atomicAdd(&s.seen, seen);
  if (appends)
    append_token<THREADS, ROW>(caches, token_page, b, g, position, s.token, rotation, weight_keys, weight_values,
                               Partial{partials.tops[WARPS], partials.sums[WARPS], &partials.results[WARPS][0][0]},
                               s.q, s.key, s.block);
  __syncthreads();
  float* const record = records + (pair * splits + split) * RECORD;
  for (int i = 2 * threadIdx.x; i < HPG * DV; i += 2 * THREADS) {
    const int r = i / DV, c = i % DV;
    const Merged<2> merged(partials, r, c, completes);
    record[2 * HPG + i] = merged.result.x[0], record[2 * HPG + i + 1] = merged.result.x[1];
    if (c == 0) record[r] = merged.top, record[HPG + r] = merged.sum;
  }
  if (threadIdx.x == 0) record[RECORD - 1] = (float)(s.seen + (completes ? 1 : 0));
}

constexpr int KEYS_OF_THREAD = 4;
constexpr int PASS = (KEYS_OF_THREAD * THREADS - LEAD) / STRIDE;  // selection blocks ranked at a time
constexpr int MAX_SPLITS = 64;

static_assert(PASS >= 1, "the compressed blocks of a selection block must fit a pass");

// Log-sum-exp of head r over all shares, in powers of two, in every lane of the warp.
__device__ __forceinline__ float log_sum(const float* records, int splits, int r) {
  const int lane = threadIdx.x % 32;
  float tops[MAX_SPLITS / 32], sums[MAX_SPLITS / 32];
#pragma unroll
  for (int n = 0; n < MAX_SPLITS / 32; n++) {
    const bool present = lane + 32 * n < splits;
    const float* const record = records + (i64)(present ? lane + 32 * n : 0) * RECORD + r;
    tops[n] = present ? record[0] : -positive_infinity();
    sums[n] = present ? record[HPG] : 0.0f;
  }
  const float top = warp_max(fmaxf(tops[0], tops[1]));
  const float sum = exp2_approximate(tops[0] - top) * sums[0] + exp2_approximate(tops[1] - top) * sums[1];
  return top + log2f(warp_sum(sum));
}

// grid (splits, GROUPS, batch), at most MAX_SPLITS. A share's best blocks, the most important first and the lower
// index among equals: important, candidates [batch][GROUPS][splits][ROOM]. Shares of fewer blocks leave the rest as it
// was: attention.cu computes how many there are. Dynamic shared memory: a number for every block of a share.
//
// The next layer's step_scores loads keys meanwhile, so a load takes long: all scores of a thread are requested at
// once, before the records are read.
extern "C" __global__ void __launch_bounds__(THREADS)
step_rank(const int* positions, const float* scores, i64 capacity, const float* records, float* important,
          int* candidates) {
  extern __shared__ float4 shared_memory[];
  float* const importance = (float*)shared_memory;
  __shared__ float lse[HPG], probability[KEYS_OF_THREAD * THREADS];
  let_next_start();
  const int split = blockIdx.x, splits = gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 pair = (i64)blockIdx.z * GROUPS + blockIdx.y;
  const int current = positions[blockIdx.z] / SEL_L, all = current - 2;  // block 0 and the last two are forced
  const int share = (all + splits - 1) / splits, first = 1 + split * share;
  const int end = first + share < all + 1 ? first + share : all + 1;
  wait_for_previous();
  if (current + 1 <= SEL_N || first >= end) return;
  const float* const own = scores + pair * HPG * capacity;
  for (int begin = first; begin < end; begin += PASS) {
    const int blocks = end - begin < PASS ? end - begin : PASS;
    const int from = begin * STRIDE - LEAD, count = blocks * STRIDE + LEAD;
    float x[KEYS_OF_THREAD][HPG];
#pragma unroll
    for (int n = 0; n < KEYS_OF_THREAD; n++) {
      const int i = threadIdx.x + n * THREADS;
#pragma unroll
      for (int r = 0; r < HPG; r++) x[n][r] = i < count ? own[r * capacity + from + i] : 0.0f;
    }
    if (begin == first) {
      for (int r = warp; r < HPG; r += WARPS) {
        const float sum = log_sum(records + pair * splits * RECORD, splits, r);
        if (lane == 0) lse[r] = sum;
      }
      __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < KEYS_OF_THREAD; n++) {
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < HPG; r++) sum += exp2_approximate(x[n][r] - lse[r]);
      probability[threadIdx.x + n * THREADS] = sum;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < blocks; j += THREADS)
      importance[begin - first + j] = importance_of(probability + j * STRIDE);
    __syncthreads();
  }
  const int count = end - first;
  int* const order = (int*)importance;
  if (threadIdx.x < (4 - count % 4) % 4) order[count + threadIdx.x] = -1;
  __syncthreads();
  for (int j = threadIdx.x; j < count; j += THREADS) {
    const int place = count_ahead<1>(order, (count + 3) / 4, j, 0);
    if (place >= ROOM) continue;
    const i64 at = (pair * splits + split) * ROOM + place;
    important[at] = importance[j], candidates[at] = first + j;
  }
}

extern "C" __device__ int step_scores_shared = sizeof(Shared);
