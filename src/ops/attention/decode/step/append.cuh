// A new token of a decode step goes into the cache: its keys and values into their pages, its raw rows to those that
// compressed blocks to come need; where it completes a compressed block that block is made and seen by the heads.
#pragma once
#include "decode.cuh"

// 0 = compressed keys are not rotated, 1 = before the compression, 2 = after it
#ifndef CMP_ROPE
#define CMP_ROPE 2
#endif

// Where the heads leave what they saw: maxima [HPG], sums [HPG], results [HPG][DV], and the number of keys.
struct Partial {
  float *tops, *sums, *results, *seen;
};

// Tables and the layer's places in them, of every kind of page.
struct Caches {
  Cached cmp, sel, win, tail;
};

// Column `column` of the raw rows of keys or values: the new number joins them, and where they fill a block the block's
// number is returned and the rows that no later block needs are dropped. weight: phi conv [CMP_L][width], null for avg.
__device__ __forceinline__ float push_raw(bf16* tail, int row, int width, int column, float x, const float* weight) {
  if (row < CMP_L - 1) {
    write_one(tail + row * width + column, x);
    return 0.0f;
  }
  float sum = 0.0f;
#pragma unroll 16
  for (int p = 0; p < CMP_L - 1; p++)
    sum += (weight != nullptr ? weight[p * width + column] : 1.0f) * read_one(tail + p * width + column);
  sum += (weight != nullptr ? weight[(CMP_L - 1) * width + column] : 1.0f) * x;
#pragma unroll 16
  for (int p = CMP_D; p < CMP_L - 1; p++) tail[(p - CMP_D) * width + column] = tail[p * width + column];
  if (CMP_D < CMP_L) write_one(tail + (CMP_L - 1 - CMP_D) * width + column, x);  // blocks side by side need none of it
  return weight != nullptr ? sum : sum / CMP_L;
}

// New keys of one branch, rotated, and values go to their page, by `threads` threads.
template <int SIZE> __device__ __forceinline__ void append(bf16* page, int g, int slot, const bf16* keys,
                                                           const bf16* values, const float2* rotation, int thread,
                                                           int threads) {
  bf16* const to = keys_of<SIZE>(page, g) + slot * DK;
  for (int j = thread; j < DK / 2; j += threads) {
    const float a = read_one(keys + j), b = read_one(keys + j + DK / 2);
    const float2 turn = rotation[j];
    write_one(to + j, a * turn.x - b * turn.y);
    write_one(to + j + DK / 2, b * turn.x + a * turn.y);
  }
  bf16* const columns = values_of<SIZE>(page, g) + slot;
  for (int c = thread; c < DV; c += threads) columns[c * SIZE] = values[c];
}

// What the heads leave that see one key alone.
__device__ __forceinline__ void see_one(const bf16* q, const float* key, const float* value, const Partial& to) {
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < HPG; r += blockDim.x / 32) {
    float dot = 0.0f;
    for (int c = lane; c < DK; c += 32) dot += key[c] * read_one(q + r * DK + c);
    dot = warp_sum(dot);
    if (lane == 0) to.tops[r] = dot * (LOG2_E / sqrtf((float)DK)), to.sums[r] = 1.0f, *to.seen = 1.0f;
    for (int c = lane; c < DV; c += 32) to.results[r * DV + c] = low_bf16(pack_bf16(value[c], 0.0f));
  }
}

// By a whole block of threads, for one (sequence, group). row: of the projection; rotation: [2][DK / 2], of the token's
// position and of the compressed block's that it may complete. q [16 * DK], key [DK] and block [DK + DV] are shared
// memory.
__device__ __forceinline__ void append_token(const Caches& caches, int b, int g, int position, const bf16* row,
                                             const float2* rotation, const float* weight_keys,
                                             const float* weight_values, const Partial& to, bf16* q, float* key,
                                             float* block) {
  const int known = count_compressed(position), slot = position - known * CMP_D;  // of the new row among the raw ones
  const bool complete = slot == CMP_L - 1;
  // Side by side: a quarter of the threads for each branch's pages, the others for the raw rows.
  const int quarter = blockDim.x / 4, thread = threadIdx.x % quarter, task = threadIdx.x / quarter;
  if (task == 0)
    append<SEL_L>(caches.sel.page(b, position / SEL_L), g, position % SEL_L, row + AT_SEL + g * DK,
                  row + AT_SEL + KEYS + g * DV, rotation, thread, quarter);
  if (task == 1)
    append<PAGE>(caches.win.page(b, position / PAGE), g, position % PAGE, row + AT_WIN + g * DK,
                 row + AT_WIN + KEYS + g * DV, rotation, thread, quarter);
  // keys [CMP_L][KEYS], then values [CMP_L][VALUES]
  bf16* const tail = caches.tail.page(b, 0);
  for (int c = (int)threadIdx.x - 2 * quarter; c < DK + DV; c += 2 * quarter) {
    if (c < 0) break;
    if (c < DK) {
      const bf16* from = row + AT_CMP + g * DK;
      float x = read_one(from + c);
      if (CMP_ROPE == 1) {
        const int j = c % (DK / 2);
        const float a = read_one(from + j), d = read_one(from + j + DK / 2);
        const float2 turn = rotation[j];
        x = c < DK / 2 ? a * turn.x - d * turn.y : d * turn.x + a * turn.y;
        x = low_bf16(pack_bf16(x, 0.0f));
      }
      block[c] = push_raw(tail, slot, KEYS, g * DK + c, x, weight_keys);
    } else {
      const float x = read_one(row + AT_CMP + KEYS + g * DV + c - DK);
      block[c] = push_raw(tail + CMP_L * KEYS, slot, VALUES, g * DV + c - DK, x, weight_values);
    }
  }
  if (!complete) {
    for (int i = threadIdx.x; i < HPG; i += blockDim.x) to.tops[i] = -positive_infinity(), to.sums[i] = 0.0f;
    for (int i = threadIdx.x; i < HPG * DV; i += blockDim.x) to.results[i] = 0.0f;
    if (threadIdx.x == 0) *to.seen = 0.0f;
    return;
  }
  rotate_queries(q, row, rotation, g);
  __syncthreads();
  bf16* const page = caches.cmp.page(b, known / PAGE);
  for (int c = threadIdx.x; c < DK; c += blockDim.x) {
    const int j = c % (DK / 2);
    // rounded, rotated, rounded: as a prefill does it
    float a = low_bf16(pack_bf16(block[j], 0.0f)), d = low_bf16(pack_bf16(block[j + DK / 2], 0.0f));
    float x = c < DK / 2 ? a : d;
    if (CMP_ROPE == 2) {
      const float2 turn = rotation[DK / 2 + j];
      x = c < DK / 2 ? a * turn.x - d * turn.y : d * turn.x + a * turn.y;
      x = low_bf16(pack_bf16(x, 0.0f));
    }
    key[c] = x;
    write_one(keys_of<PAGE>(page, g) + known % PAGE * DK + c, x);
  }
  for (int c = threadIdx.x; c < DV; c += blockDim.x)
    write_one(values_of<PAGE>(page, g) + c * PAGE + known % PAGE, block[DK + c]);
  __syncthreads();
  see_one(q, key, block + DK, to);
}
