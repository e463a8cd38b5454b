// First half of attention in a decode step: every sequence's new token is put into the cache, and its heads see the
// compressed keys.
//
// Block (split, group, sequence): the units of 32 compressed keys are shared out among SPLITS blocks of four warps; each
// leaves a maximum, a sum and a result for every head, and the scores, which the second half selects by. The last block
// (split == SPLITS) writes the token's keys and values into their pages, and where the token completes a compressed
// block it makes that block and sees it: so the others need only what was there before, and load it before they wait.
//
// DENSE: a model with dense attention, whose heads see all earlier tokens in place of compressed keys.
#include "append.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;

#ifndef DENSE
#define DENSE 0
#endif

struct Merge {
  alignas(16) float results[WARPS][HPG][DV];
  float tops[WARPS][HPG], sums[WARPS][HPG];
  int seen;
};

__device__ __forceinline__ void see_split(const bf16* q, Unit& unit, bool loaded, const Cached& cmp, int b, int g,
                                          int known, int first, int end, float* scores, i64 capacity, Running& running,
                                          int* seen) {
  Queries queries;
  queries.load(q);
  const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
  for (int u = first; u < end; u += WARPS) {
    if (!loaded) unit.load<PAGE>(cmp.page(b, u * UNIT / PAGE), g, u * UNIT % PAGE);
    loaded = false;
    const int high = known - u * UNIT < UNIT ? known - u * UNIT : UNIT;
    if (lane == 0) atomicAdd(seen, high);
    running.see(unit, queries, 0, high, [&](int half, int i, const float* x, float, float, float) {
      const int r = row + 8 * half;
      if (DENSE || r >= HPG) return;
      // [sequence][group][head][compressed block]; an unfinished unit ends in -inf
      float* to = scores + (((i64)b * GROUPS + g) * HPG + r) * capacity + u * UNIT + 8 * t + 2 * i;
      *(float2*)to = make_float2(x[0], x[1]);
    });
  }
}

// rotations: [batch][2][DK / 2] cosines and sines of the token's position, then of the block's that it may complete.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
step_compressed(const bf16* projection, const int* positions, const float2* rotations, const i64* cmp_tables, i64 cmp_place,
                const i64* sel_tables, i64 sel_place, const i64* win_tables, i64 win_place, const i64* tail_tables,
                i64 tail_place, const float* weight_keys, const float* weight_values, float* partial, float* scores,
                i64 capacity, int splits) {
  __shared__ __align__(16) bf16 q[16 * DK];
  __shared__ Merge merge;
  let_next_start();
  const int split = blockIdx.x, g = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32;
  const int position = positions[b], known = DENSE ? position : count_compressed(position);
  const bf16* const row = projection + (i64)b * (DENSE ? AT_SEL : WIDTH);
  const float2* const rotation = rotations + b * DK;
  const Cached cmp = DENSE ? Cached{win_tables, win_place} : Cached{cmp_tables, cmp_place};
  const Partial to(partial, splits, (i64)b * GROUPS + g, split);
  if (split < splits) {
    const int units = (known + UNIT - 1) / UNIT, share = (units + splits - 1) / splits;
    const int begin = split * share, end = begin + share < units ? begin + share : units;
    Unit unit;
    const bool any = begin + warp < end;
    if (any) unit.load<PAGE>(cmp.page(b, (begin + warp) * UNIT / PAGE), g, (begin + warp) * UNIT % PAGE);
    wait_for_previous();
    rotate_queries(q, row, rotation, g);
    if (threadIdx.x == 0) merge.seen = 0;
    __syncthreads();
    Running running;
    running.reset();
    if (any) see_split(q, unit, true, cmp, b, g, known, begin + warp, end, scores, capacity, running, &merge.seen);
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
    if (threadIdx.x == 0) *to.seen = (float)merge.seen;
    return;
  }
  wait_for_previous();
  __shared__ float key[DK], block[DK + DV];
  if (DENSE) {
    append<PAGE>(cmp.page(b, position / PAGE), g, position % PAGE, row + AT_CMP + g * DK, row + AT_CMP + KEYS + g * DV,
                 rotation);
    rotate_queries(q, row, rotation, g);
    __syncthreads();
    const bf16* const page = cmp.page(b, position / PAGE);
    for (int c = threadIdx.x; c < DK; c += THREADS) key[c] = read_one(keys_of<PAGE>((bf16*)page, g) + position % PAGE * DK + c);
    for (int c = threadIdx.x; c < DV; c += THREADS) block[DK + c] = read_one(row + AT_CMP + KEYS + g * DV + c);
    __syncthreads();
    see_one(q, key, block + DK, to);
    return;
  }
  const Caches caches = {cmp, {sel_tables, sel_place}, {win_tables, win_place}, {tail_tables, tail_place}};
  append_token(caches, b, g, position, row, rotation, weight_keys, weight_values, to, q, key, block);
}
