// Dense attention of a decode step: every sequence's new token is put into the cache, its heads see all earlier tokens,
// and a second launch merges what the blocks left.
//
// Block (split, group, sequence): units of 32 keys are shared out among SPLITS blocks of four warps; each leaves a
// record, a maximum, a sum and a result for every head and the keys it saw. The last block (split == SPLITS) writes the
// token's key and value and sees it alone: so the others need only what was there before, and load it before they wait.
#include "append.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int SPLITS_AT_MOST = 64;

struct Merge {
  alignas(16) float results[WARPS][HPG][DV];
  float tops[WARPS][HPG], sums[WARPS][HPG];
  int seen;
};

// The partial result of one (sequence, group, split). The number of keys follows the results.
__device__ __forceinline__ Partial record_of(float* partial, int splits, i64 pair, int split) {
  float* const tops = partial + (pair * (splits + 1) + split) * RECORD;
  return Partial{tops, tops + HPG, tops + 2 * HPG};
}

// projection: queries [HEADS][DK], keys [GROUPS][DK], values [GROUPS][DV] of every sequence.
extern "C" __global__ void __launch_bounds__(THREADS, 4) step_dense(const bf16* projection, const int* positions,
                                                                    const float2* rotations, const i64* tables,
                                                                    i64 place, float* partial, int splits) {
  __shared__ __align__(16) bf16 q[16 * DK];
  __shared__ Merge merge;
  let_next_start();
  const int split = blockIdx.x, g = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int position = positions[b];
  const bf16* const row = projection + (i64)b * AT_SEL;
  const float2* const rotation = rotations + b * DK;
  const Cached cached = {tables, place};
  const Partial to = record_of(partial, splits, (i64)b * GROUPS + g, split);
  if (split == splits) {
    __shared__ float key[DK], value[DV];
    wait_for_previous();
    bf16* const page = cached.page(b, position / PAGE);
    append<PAGE>(page, g, position % PAGE, row + AT_CMP + g * DK, row + AT_CMP + KEYS + g * DV, rotation, threadIdx.x,
                 THREADS);
    rotate_queries<THREADS, false>(q, row, rotation, g);
    __syncthreads();
    for (int c = threadIdx.x; c < DK; c += THREADS)
      key[c] = read_one(keys_of<PAGE>(page, g) + position % PAGE * DK + c);
    for (int c = threadIdx.x; c < DV; c += THREADS) value[c] = read_one(row + AT_CMP + KEYS + g * DV + c);
    __syncthreads();
    see_one(q, key, value, to);
    if (threadIdx.x == 0) to.results[HPG * DV] = 1.0f;
    return;
  }
  const int units = (position + UNIT - 1) / UNIT, share = (units + splits - 1) / splits;
  const int begin = split * share, end = begin + share < units ? begin + share : units;
  Unit unit;
  int u = begin + warp;
  bool loaded = u < end;
  if (loaded) unit.load<PAGE>(cached.page(b, u * UNIT / PAGE), g, u * UNIT % PAGE);
  wait_for_previous();
  rotate_queries<THREADS, false>(q, row, rotation, g);
  if (threadIdx.x == 0) merge.seen = 0;
  __syncthreads();
  Queries queries;
  queries.load(q);
  Running running;
  running.reset();
  for (; u < end; u += WARPS) {
    if (!loaded) unit.load<PAGE>(cached.page(b, u * UNIT / PAGE), g, u * UNIT % PAGE);
    loaded = false;
    const int high = position - u * UNIT < UNIT ? position - u * UNIT : UNIT;
    if (lane == 0) atomicAdd(&merge.seen, high);
    running.see(unit, queries, 0, high, [](int, int, const float*, float, float, float) {});
  }
  running.finish(merge.tops[warp], merge.sums[warp], &merge.results[warp][0][0]);
  __syncthreads();
  for (int i = threadIdx.x; i < HPG * DV; i += THREADS) {
    const int r = i / DV, c = i % DV;
    float top = merge.tops[0][r];
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, merge.tops[w][r]);
    const float base = top == -positive_infinity() ? 0.0f : top;
    float sum = 0.0f, result = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float factor = exp2_approximate(merge.tops[w][r] - base);
      sum += factor * merge.sums[w][r];
      result += factor * merge.results[w][r][c];
    }
    to.results[i] = result;
    if (c == 0) to.tops[r] = top, to.sums[r] = sum;
  }
  if (threadIdx.x == 0) to.results[HPG * DV] = (float)merge.seen;
}

// Block (head of the group, group, sequence). out: [batch][HEADS][DV]; reads: [batch][GROUPS][3], of which the first
// counts.
extern "C" __global__ void __launch_bounds__(THREADS) step_merge(const float* partial, int splits, int* reads,
                                                                 bf16* out) {
  __shared__ float factor[SPLITS_AT_MOST + 1];
  let_next_start();
  wait_for_previous();
  const int r = blockIdx.x, g = blockIdx.y, b = blockIdx.z, lane = threadIdx.x % 32;
  const i64 pair = (i64)b * GROUPS + g;
  const float* const from = partial + pair * (splits + 1) * RECORD;
  if (threadIdx.x < 32) {
    float top = -positive_infinity(), sum = 0.0f, seen = 0.0f;
    for (int n = lane; n <= splits; n += 32)
      top = fmaxf(top, from[n * RECORD + r]), seen += from[n * RECORD + RECORD - 1];
    top = warp_max(top);
    for (int n = lane; n <= splits; n += 32)
      sum += exp2_approximate(from[n * RECORD + r] - top) * from[n * RECORD + HPG + r];
    sum = warp_sum(sum);
    for (int n = lane; n <= splits; n += 32) factor[n] = exp2_approximate(from[n * RECORD + r] - top) / sum;
    seen = warp_sum(seen);
    if (r == 0 && lane < 3) reads[pair * 3 + lane] = lane == 0 ? (int)seen : 0;
  }
  __syncthreads();
  for (int c = threadIdx.x; c < DV; c += THREADS) {
    float result = 0.0f;
#pragma unroll 8
    for (int n = 0; n <= splits; n++)
      if (factor[n] != 0.0f) result += factor[n] * from[n * RECORD + 2 * HPG + r * DV + c];
    write_one(out + ((i64)b * HEADS + g * HPG + r) * DV + c, result);
  }
}
