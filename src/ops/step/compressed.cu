// First half of attention in a decode step: every sequence's new token is put into the cache, and its heads see the
// compressed keys.
//
// Block (split, group, sequence): the units of 32 compressed keys are shared out among SPLITS blocks of four warps; each
// leaves a maximum, a sum and a result for every head, and the scores, which the second half selects by. The last block
// (split == SPLITS) writes the token's keys and values into their pages, and where the token completes a compressed
// block it makes that block and sees it: so the others need only what was there before, and load it before they wait.
//
// DENSE: a model with dense attention, whose heads see all earlier tokens in place of compressed keys.
#include "decode.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;

// 0 = compressed keys are not rotated, 1 = before the compression, 2 = after it
#ifndef DENSE
#define DENSE 0
#endif
#ifndef CMP_ROPE
#define CMP_ROPE 2
#endif

struct Merge {
  alignas(16) float results[WARPS][HPG][DV];
  float tops[WARPS][HPG], sums[WARPS][HPG];
  int seen;
};

// Places of one (sequence, group, split) in the partial results.
struct Partial {
  float *tops, *sums, *results, *seen;
  __device__ Partial(float* partial, int splits, int b, int g, int split) {
    const i64 at = ((i64)b * GROUPS + g) * (splits + 1) + split;
    tops = partial + at * RECORD, sums = tops + HPG, results = sums + HPG, seen = results + HPG * DV;
  }
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
    running.see(unit, queries, 0, high, [&](int half, int i, const float* x) {
      const int r = row + 8 * half;
      if (DENSE || r >= HPG) return;
      // [sequence][group][head][compressed block]; an unfinished unit ends in -inf
      float* to = scores + (((i64)b * GROUPS + g) * HPG + r) * capacity + u * UNIT + 8 * t + 2 * i;
      *(float2*)to = make_float2(x[0], x[1]);
    });
  }
}

// A number that the compression reads: raw row r of column c, or the new one.
__device__ __forceinline__ float raw(const bf16* tail, int row, int width, int column) {
  return read_one(tail + row * width + column);
}

// Column `column` of the raw rows of keys or values: the new number joins them, and where they fill a block the block's
// number is returned and the rows that no later block needs are dropped. weight: phi conv [CMP_L][width], null for avg.
__device__ __forceinline__ float push_raw(bf16* tail, int row, int width, int column, float x, const float* weight) {
  if (row < CMP_L - 1) {
    write_one(tail + row * width + column, x);
    return 0.0f;
  }
  float sum = 0.0f;
#pragma unroll 8
  for (int p = 0; p < CMP_L - 1; p++)
    sum += (weight != nullptr ? weight[p * width + column] : 1.0f) * raw(tail, p, width, column);
  sum += (weight != nullptr ? weight[(CMP_L - 1) * width + column] : 1.0f) * x;
#pragma unroll 8
  for (int p = CMP_D; p < CMP_L - 1; p++) tail[(p - CMP_D) * width + column] = tail[p * width + column];
  write_one(tail + (CMP_L - 1 - CMP_D) * width + column, x);
  return weight != nullptr ? sum : sum / CMP_L;
}

// New keys of one branch, rotated, and values go to their page.
template <int SIZE>
__device__ __forceinline__ void append(bf16* page, int g, int slot, const bf16* keys, const bf16* values, const float2* rotation) {
  bf16* const to = keys_of<SIZE>(page, g) + slot * DK;
  for (int j = threadIdx.x; j < DK / 2; j += THREADS) {
    const float a = read_one(keys + j), b = read_one(keys + j + DK / 2);
    const float2 turn = rotation[j];
    write_one(to + j, a * turn.x - b * turn.y);
    write_one(to + j + DK / 2, b * turn.x + a * turn.y);
  }
  bf16* const columns = values_of<SIZE>(page, g) + slot;
  for (int c = threadIdx.x; c < DV; c += THREADS) columns[c * SIZE] = values[c];
}

// What the heads leave that see one key alone.
__device__ __forceinline__ void see_one(const bf16* q, const float* key, const float* value, const Partial& to) {
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < HPG; r += WARPS) {
    float dot = 0.0f;
    for (int c = lane; c < DK; c += 32) dot += key[c] * read_one(q + r * DK + c);
    dot = warp_sum(dot);
    if (lane == 0) to.tops[r] = dot * (LOG2_E / sqrtf((float)DK)), to.sums[r] = 1.0f, *to.seen = 1.0f;
    for (int c = lane; c < DV; c += 32) to.results[r * DV + c] = first_half(to_halves(value[c], 0.0f));
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
  const Partial to(partial, splits, b, g, split);
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
  const int slot = position - known * CMP_D;  // of the new row among the raw ones
  const bool complete = slot == CMP_L - 1;
  append<SEL_L>(Cached{sel_tables, sel_place}.page(b, position / SEL_L), g, position % SEL_L, row + AT_SEL + g * DK,
                row + AT_SEL + KEYS + g * DV, rotation);
  append<PAGE>(Cached{win_tables, win_place}.page(b, position / PAGE), g, position % PAGE, row + AT_WIN + g * DK,
               row + AT_WIN + KEYS + g * DV, rotation);
  // keys [CMP_L][KEYS], then values [CMP_L][VALUES]
  bf16* const tail = Cached{tail_tables, tail_place}.page(b, 0);
  for (int c = threadIdx.x; c < DK + DV; c += THREADS) {
    if (c < DK) {
      const bf16* from = row + AT_CMP + g * DK;
      float x = read_one(from + c);
      if (CMP_ROPE == 1) {
        const int j = c % (DK / 2);
        const float a = read_one(from + j), d = read_one(from + j + DK / 2);
        const float2 turn = rotation[j];
        x = c < DK / 2 ? a * turn.x - d * turn.y : d * turn.x + a * turn.y;
        x = first_half(to_halves(x, 0.0f));
      }
      block[c] = push_raw(tail, slot, KEYS, g * DK + c, x, weight_keys);
    } else {
      const float x = read_one(row + AT_CMP + KEYS + g * DV + c - DK);
      block[c] = push_raw(tail + CMP_L * KEYS, slot, VALUES, g * DV + c - DK, x, weight_values);
    }
  }
  if (!complete) {
    for (int i = threadIdx.x; i < HPG; i += THREADS) to.tops[i] = -positive_infinity(), to.sums[i] = 0.0f;
    for (int i = threadIdx.x; i < HPG * DV; i += THREADS) to.results[i] = 0.0f;
    if (threadIdx.x == 0) *to.seen = 0.0f;
    return;
  }
  rotate_queries(q, row, rotation, g);
  __syncthreads();
  bf16* const page = cmp.page(b, known / PAGE);
  for (int c = threadIdx.x; c < DK; c += THREADS) {
    const int j = c % (DK / 2);
    // rounded, rotated, rounded: as a prefill does it
    float a = first_half(to_halves(block[j], 0.0f)), d = first_half(to_halves(block[j + DK / 2], 0.0f));
    float x = c < DK / 2 ? a : d;
    if (CMP_ROPE == 2) {
      const float2 turn = rotation[DK / 2 + j];
      x = c < DK / 2 ? a * turn.x - d * turn.y : d * turn.x + a * turn.y;
      x = first_half(to_halves(x, 0.0f));
    }
    key[c] = x;
    write_one(keys_of<PAGE>(page, g) + known % PAGE * DK + c, x);
  }
  for (int c = threadIdx.x; c < DV; c += THREADS) write_one(values_of<PAGE>(page, g) + c * PAGE + known % PAGE, block[DK + c]);
  __syncthreads();
  see_one(q, key, block + DK, to);
}
