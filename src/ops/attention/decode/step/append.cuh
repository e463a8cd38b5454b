// A new token of a decode step goes into the cache: its keys and values into their pages, its raw rows to those that
// compressed blocks to come need; where it completes a compressed block that block is made and seen by the heads.
#pragma once
#include "decode.cuh"

// 0 = compressed keys are not rotated, 1 = before the compression, 2 = after it
#ifndef CMP_ROPE
#define CMP_ROPE 2
#endif
// 1 = queries and keys are rotated in the window branch alone (nsa.rope: window); CMP_ROPE is then 0
#ifndef ROPE_WINDOW
#define ROPE_WINDOW 0
#endif
static_assert(!ROPE_WINDOW || CMP_ROPE == 0, "positions in the window alone: compressed keys have none");

// Partial softmax of the heads: maxima [HPG], sums [HPG], results [HPG][DV].
struct Partial {
  float *tops, *sums, *results;
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

// New keys of one branch, rotated if ROTATED, and values go to their page, by `threads` threads.
template <int SIZE, bool ROTATED = true>
__device__ __forceinline__ void append(bf16* page, int g, int slot, const bf16* keys, const bf16* values,
                                       const float2* rotation, int thread, int threads) {
  bf16* const to = keys_of<SIZE>(page, g) + slot * DK;
  if (!ROTATED)
    for (int c = thread; c < DK; c += threads) to[c] = keys[c];
  for (int j = thread; ROTATED && j < DK / 2; j += threads) {
    const float a = read_one(keys + j), b = read_one(keys + j + DK / 2);
    const float2 turn = rotation[j];
    write_one(to + j, a * turn.x - b * turn.y);
    write_one(to + j + DK / 2, b * turn.x + a * turn.y);
  }
  bf16* const columns = values_of<SIZE>(page, g) + slot;
  for (int c = thread; c < DV; c += threads) columns[c * SIZE] = values[c];
}

// Partial softmax of heads that see one key alone. ROW: stride between the results of two heads.
template <int ROW = DV>
__device__ __forceinline__ void see_one(const bf16* q, const float* key, const float* value, const Partial& to) {
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < HPG; r += blockDim.x / 32) {
    float dot = 0.0f;
    for (int c = lane; c < DK; c += 32) dot += key[c] * read_one(q + r * DK + c);
    dot = warp_sum(dot);
    if (lane == 0) to.tops[r] = dot * (LOG2_E / sqrtf((float)DK)), to.sums[r] = 1.0f;
    for (int c = lane; c < DV; c += 32) to.results[r * ROW + c] = low_bf16(pack_bf16(value[c], 0.0f));
  }
}

// Keys and values of the token for one group in shared memory: compressed, selected and window branch.
constexpr int TOKEN = 3 * (DK + DV);

// The part of a token that one thread copies from the row of the projection: on its way while the queries are rotated.
struct TokenPiece {
  uint4 piece;

  __device__ __forceinline__ void load(const bf16* row, int g) {
    if (threadIdx.x >= TOKEN / 8) return;
    const int branch = threadIdx.x / ((DK + DV) / 8), c = threadIdx.x % ((DK + DV) / 8) * 8;
    piece = *(const uint4*)(row + AT_CMP + branch * (KEYS + VALUES) + (c < DK ? g * DK + c : KEYS + g * DV + c - DK));
  }
  __device__ __forceinline__ void store(bf16* token) const {
    if (threadIdx.x < TOKEN / 8) ((uint4*)token)[threadIdx.x] = piece;
  }
};

// True if the token at `position` completes a compressed block.
__device__ __forceinline__ bool completes_block(int position) {
  return position - count_compressed(position) * CMP_D == CMP_L - 1;
}

// Side by side: a quarter of the threads for the pages of the selected branch, another for those of the window, the
// others for the raw rows.
template <int THREADS> __device__ __forceinline__ int append_task() { return (int)threadIdx.x / (THREADS / 4); }

// The page that the thread's task of `append_token` writes to.
template <int THREADS> __device__ __forceinline__ bf16* page_of_task(const Caches& caches, int b, int position) {
  const int task = append_task<THREADS>();
  const Cached& cached = task == 0 ? caches.sel : task == 1 ? caches.win : caches.tail;
  return cached.page(b, task == 0 ? position / SEL_L : task == 1 ? position / PAGE : 0);
}

// By a whole block of threads, for one (sequence, group). page: of the thread's task. rotation: [2][DK / 2], of the
// token's position and of the compressed block's that it may complete: then the heads see the block and leave that in
// `to`. token [TOKEN], q (the queries of the compressed branch), key [DK] and block [DK + DV] are shared memory.
template <int THREADS, int ROW = DV>
__device__ __forceinline__ void append_token(const Caches& caches, bf16* page, int b, int g, int position,
                                             const bf16* token, const float2* rotation, const float* weight_keys,
                                             const float* weight_values, const Partial& to, const bf16* q, float* key,
                                             float* block) {
  const int known = count_compressed(position), slot = position - known * CMP_D;  // of the new row among the raw ones
  constexpr int QUARTER = THREADS / 4;
  const int task = append_task<THREADS>(), thread = threadIdx.x % QUARTER;
  const bf16 *const selected = token + DK + DV, *const window = selected + DK + DV;
  if (task == 0)
    append<SEL_L, !ROPE_WINDOW>(page, g, position % SEL_L, selected, selected + DK, rotation, thread, QUARTER);
  else if (task == 1) append<PAGE>(page, g, position % PAGE, window, window + DK, rotation, thread, QUARTER);
  else
    for (int c = (int)threadIdx.x - 2 * QUARTER; c < DK + DV; c += 2 * QUARTER) {
      const bool is_key = c < DK;
      float x = read_one(token + c);
      if (CMP_ROPE == 1 && is_key) {
        const int j = c % (DK / 2);
        const float a = read_one(token + j), d = read_one(token + j + DK / 2);
        const float2 turn = rotation[j];
        x = c < DK / 2 ? a * turn.x - d * turn.y : d * turn.x + a * turn.y;
        x = low_bf16(pack_bf16(x, 0.0f));
      }
      // keys [CMP_L][KEYS], then values [CMP_L][VALUES]
      block[c] = push_raw(is_key ? page : page + CMP_L * KEYS, slot, is_key ? KEYS : VALUES,
                          is_key ? g * DK + c : g * DV + c - DK, x, is_key ? weight_keys : weight_values);
    }
  if (slot != CMP_L - 1) return;
  __syncthreads();
  bf16* const compressed = caches.cmp.page(b, known / PAGE);
  for (int c = threadIdx.x; c < DK; c += THREADS) {
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
    write_one(keys_of<PAGE>(compressed, g) + known % PAGE * DK + c, x);
  }
  for (int c = threadIdx.x; c < DV; c += THREADS)
    write_one(values_of<PAGE>(compressed, g) + c * PAGE + known % PAGE, block[DK + c]);
  __syncthreads();
  see_one<ROW>(q, key, block + DK, to);
}
