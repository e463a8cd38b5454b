// The branch kernels, one per branch: any head size, any number of heads in a group, f32 or bf16 in memory and float
// arithmetic, on every GPU. The fused kernels are tested against them.
//
// Attention is worked through in tiles of 64 rows by 64 keys. Rows are (token, head) pairs of one KV group: the heads
// of a group share keys, so they are multiplied together. Which keys a token sees of a tile is one 64-bit mask, and the
// masks are all that dense, window, compressed and selected attention differ in (`Visible`).
//
// Grids are not made to measure: every block works through the tiles blockIdx.x, blockIdx.x + gridDim.x, ..., found
// from the offsets on the device, so the host need not know how long sequences are. Nothing is added atomically: every
// sum has one owner and one order, and results are the same bits in every run.
//
// If rows of a tile see different keys, the unseen probabilities are zero, and zero times a finite number adds
// nothing. But zero times infinity is NaN and would let the future through: a tile that holds
// infinities or NaN is multiplied with the mask tested for every product.
#pragma once

#include "elements.cuh"

#ifndef ELEMENT
#define ELEMENT f32  // type of queries, keys, values and their gradients in memory: f32 or bf16
#endif
#ifndef KEY_CHUNKS
#define KEY_CHUNKS 1  // head sizes in chunks of 64 columns, rounded up
#endif
#ifndef VALUE_CHUNKS
#define VALUE_CHUNKS 1
#endif
#ifndef FOURS
#define FOURS 0  // 1 when both head sizes are multiples of four: four elements are loaded and stored at once
#endif

typedef ELEMENT Element;

constexpr int TILE = 64;      // rows, keys and columns of a tile
constexpr int STRIDE = 68;    // floats from row to row in shared memory: rows start in different banks, 16-byte aligned
constexpr int THREADS = 256;  // 16 x 16, each with 4 x 4 of the 64 x 64 results
constexpr int WARPS = THREADS / 32;
constexpr int KC = KEY_CHUNKS, VC = VALUE_CHUNKS;
constexpr int RESIDENT = KC + VC <= 3 ? 2 : 1;  // blocks a multiprocessor should hold, what registers are rationed for
constexpr int NEVER = 0x7fffffff;

__device__ __forceinline__ float* tile_buffer(int index) {
  extern __shared__ float4 shared_memory[];
  return (float*)shared_memory + index * TILE * STRIDE;
}

// Maximum and sum over the sixteen threads of a row.
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Copies a tile from column `first` of rows of `width` elements into shared memory; row(r) is the row's number,
// negative for zeros. Returns a number that is 0 if and only if everything loaded is finite. With `other`, a tensor of
// the same layout, the dot product of row 16 * i + threadIdx.x / 16 with its row there is added to dots[i], over the
// columns of this thread.
template <class Row> __device__ __forceinline__ float load_tile(float* to, const Element* from, int width, int first,
                                                                Row row, const Element* other = nullptr,
                                                                float* dots = nullptr) {
  const int lane = threadIdx.x % 16;
  float zero = 0;
#pragma unroll
  for (int i = 0; i < TILE / 16; i++) {
    const int r = i * 16 + threadIdx.x / 16;
    const i64 at = row(r);
    float x[4] = {0, 0, 0, 0}, y[4] = {0, 0, 0, 0};
    if (FOURS) {
      const int column = first + lane * 4;
      if (at >= 0 && column < width) {
        load(x, from + at * width + column);
        if (other) load(y, other + at * width + column);
      }
      *(float4*)(to + r * STRIDE + lane * 4) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int column = first + j * 16 + lane;
        if (at >= 0 && column < width) {
          x[j] = read_one(from + at * width + column);
          if (other) y[j] = read_one(other + at * width + column);
        }
        to[r * STRIDE + j * 16 + lane] = x[j];
      }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      zero = fmaf(x[j], 0.0f, zero);
      if (other) dots[i] = fmaf(x[j], y[j], dots[i]);
    }
  }
  return zero;
}

// Four results of a row from column `column` on, times `factor`, added to the existing numbers or overwriting them.
__device__ __forceinline__ void put4(Element* row, int width, int column, const float (&x)[4], float factor,
                                     bool accumulate) {
  const float y[4] = {x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor};
  if (FOURS) {
    if (column < width) store(row + column, y, accumulate);
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (column + j < width) write_one(row + column + j, accumulate ? read_one(row + column + j) + y[j] : y[j]);
  }
}

// The three products of 64 x 64 tiles. Thread (y, x) of 16 x 16 has rows 4y ... 4y+3 of the result.

// c[i][j] += sum over columns of a[4y+i][column] * b[x+16j][column]
__device__ __forceinline__ void multiply_rows(float (&c)[4][4], const float* a, const float* b, int columns) {
  a += threadIdx.x / 16 * 4 * STRIDE;
  b += threadIdx.x % 16 * STRIDE;
#pragma unroll 2
  for (int column = 0; column < columns; column += 4) {
    float4 left[4], right[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      left[i] = *(const float4*)(a + i * STRIDE + column);
      right[i] = *(const float4*)(b + i * 16 * STRIDE + column);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        c[i][j] = fmaf(left[i].x, right[j].x, c[i][j]);
        c[i][j] = fmaf(left[i].y, right[j].y, c[i][j]);
        c[i][j] = fmaf(left[i].z, right[j].z, c[i][j]);
        c[i][j] = fmaf(left[i].w, right[j].w, c[i][j]);
      }
  }
}

__device__ __forceinline__ bool sees(u64 mask, int key) { return mask >> key & 1; }

// c[i][j] += sum over keys of a[4y+i][key] * b[key][4x+j]; guarded: over the keys the row sees.
template <bool GUARDED>
__device__ __forceinline__ void multiply_keys_(float (&c)[4][4], const float* a, const float* b, const u64* seen) {
  const int row = threadIdx.x / 16 * 4;
  a += row * STRIDE;
  b += threadIdx.x % 16 * 4;
#pragma unroll 2
  for (int key = 0; key < TILE; key += 4) {
    float left[4][4], right[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      load(left[i], a + i * STRIDE + key);
      load(right[i], b + (key + i) * STRIDE);
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (!GUARDED || sees(seen[row + i], key + k))
#pragma unroll
          for (int j = 0; j < 4; j++) c[i][j] = fmaf(left[i][k], right[k][j], c[i][j]);
  }
}

// c[i][j] += sum over rows of a[row][4y+i] * b[row][4x+j], a's columns being keys; guarded: over the rows that see the
// key.
template <bool GUARDED>
__device__ __forceinline__ void multiply_columns_(float (&c)[4][4], const float* a, const float* b, const u64* seen) {
  const int key = threadIdx.x / 16 * 4;
  a += key;
  b += threadIdx.x % 16 * 4;
#pragma unroll 4
  for (int row = 0; row < TILE; row++) {
    float left[4], right[4];
    load(left, a + row * STRIDE);
    load(right, b + row * STRIDE);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (!GUARDED || sees(seen[row], key + i))
#pragma unroll
        for (int j = 0; j < 4; j++) c[i][j] = fmaf(left[i], right[j], c[i][j]);
  }
}

// Both forms give the same bits where all numbers are finite. The guarded one is rare: it should not cost registers.
__device__ __noinline__ void multiply_keys_guarded(float (&c)[4][4], const float* a, const float* b, const u64* seen) {
  multiply_keys_<true>(c, a, b, seen);
}
__device__ __noinline__ void multiply_columns_guarded(float (&c)[4][4], const float* a, const float* b,
                                                      const u64* seen) {
  multiply_columns_<true>(c, a, b, seen);
}
__device__ __forceinline__ void multiply_keys(float (&c)[4][4], const float* a, const float* b, const u64* seen,
                                              bool guarded) {
  if (!guarded) {
    multiply_keys_<false>(c, a, b, seen);
    return;
  }
  // A copy: an array whose address is taken would not stay in registers.
  float copy[4][4];
  for (int i = 0; i < 16; i++) copy[i / 4][i % 4] = c[i / 4][i % 4];
  multiply_keys_guarded(copy, a, b, seen);
  for (int i = 0; i < 16; i++) c[i / 4][i % 4] = copy[i / 4][i % 4];
}
__device__ __forceinline__ void multiply_columns(float (&c)[4][4], const float* a, const float* b, const u64* seen,
                                                 bool guarded) {
  if (!guarded) {
    multiply_columns_<false>(c, a, b, seen);
    return;
  }
  float copy[4][4];
  for (int i = 0; i < 16; i++) copy[i / 4][i % 4] = c[i / 4][i % 4];
  multiply_columns_guarded(copy, a, b, seen);
  for (int i = 0; i < 16; i++) c[i / 4][i % 4] = copy[i / 4][i % 4];
}

// The columns of a chunk that hold something, in fours.
__device__ __forceinline__ int used_columns(int width, int chunk) {
  return min(TILE, (width - chunk * TILE + 3) / 4 * 4);
}

struct Inputs {
  const Element *q, *k, *v;          // [tokens, heads, dk], [keys, groups, dk], [keys, groups, dv]
  const int *offsets, *key_offsets;  // start of each sequence, in tokens and in keys
  i64 sequences;
  int heads, groups, dk, dv;

  __device__ int per_group() const { return heads / groups; }
  __device__ int tile_tokens() const { return TILE / per_group(); }  // at most 32 heads in a group
  __device__ float scale() const { return 1.0f / sqrtf((float)dk); }
};

// Finds the sequence and the tile of ever greater indices, `size` units to a tile.
struct Walk {
  const int* offsets;
  i64 sequences;
  int size;
  i64 sequence = 0, base = 0;
  int tile = 0, tiles = 0;

  __device__ Walk(const int* offsets, i64 sequences, int size) : offsets(offsets), sequences(sequences), size(size) {}

  __device__ bool seek(i64 index) {
    for (; sequence < sequences; sequence++, base += tiles) {
      tiles = (offsets[sequence + 1] - offsets[sequence] + size - 1) / size;
      if (index < base + tiles) {
        tile = (int)(index - base);
        return true;
      }
    }
    return false;
  }
};

// Tokens [t0, t1) of one sequence and one group, positions in the sequence; `keys` keys belong to it.
struct Span {
  i64 token0, key0;
  int length, keys, group, t0, t1;

  __device__ Span(const Inputs& in, i64 sequence, int group) : group(group), t0(0), t1(0) {
    token0 = in.offsets[sequence];
    length = (int)(in.offsets[sequence + 1] - token0);
    key0 = in.key_offsets[sequence];
    keys = (int)(in.key_offsets[sequence + 1] - key0);
  }
  __device__ i64 row(const Inputs& in, int t, int i) const {
    return (token0 + t) * in.heads + group * in.per_group() + i;
  }
  __device__ i64 key(const Inputs& in, int s) const { return s < keys ? (key0 + s) * in.groups + group : -1; }
};

// Bits [low, high) of a mask, as far as they exist.
__device__ __forceinline__ u64 bits_between(i64 low, i64 high) {
  low = low < 0 ? 0 : low;
  high = high > 64 ? 64 : high;
  return low >= high ? 0 : ~0ull >> (64 - (high - low)) << low;
}

// Visible for a token that sees the keys [low(t), high(t)), both never falling with t. Rule defines them, and
// [first_token(key), end_token(key)) are the tokens that may see a key, both never falling with the key.
template <class Rule> struct Banded {
  Rule rule;

  __device__ u64 mask(const Inputs&, const Span& span, int t, int k0) const {
    const i64 high = rule.high(t);
    return bits_between(rule.low(t) - k0, (high < span.keys ? high : span.keys) - k0);
  }
  // The next tile of keys after `after` that some token of the span sees; negative: no more. Asked by all threads.
  __device__ int next(const Inputs&, const Span& span, int after) const {
    const i64 high = rule.high(span.t1 - 1), least = rule.low(span.t0) / TILE;
    const int tile = after + 1 > least ? after + 1 : (int)least;
    return (i64)tile * TILE < (high < span.keys ? high : span.keys) ? tile : -1;
  }
  __device__ i64 first_token(int k0) const { return rule.first_token(k0); }
  __device__ i64 end_token(int k0) const { return rule.end_token(k0 + TILE - 1); }
};

// Rows of the tokens [t0, t1), then -1.
__device__ __forceinline__ void place_rows(i64* place, const Inputs& in, const Span& span) {
  if (threadIdx.x < TILE) {
    const int h = in.per_group(), t = span.t0 + threadIdx.x / h;
    place[threadIdx.x] = t < span.t1 ? span.row(in, t, threadIdx.x % h) : -1;
  }
}
template <class Visible> __device__ __forceinline__ void mark_rows(u64* seen, const Inputs& in, const Visible& visible,
                                                                   const Span& span, int k0) {
  if (threadIdx.x < TILE) {
    const int t = span.t0 + threadIdx.x / in.per_group();
    seen[threadIdx.x] = t < span.t1 ? visible.mask(in, span, t, k0) : 0;
  }
}

// Tiles of tokens are taken from the end of a sequence: they see most keys, and the longest work should not come last.
__device__ __forceinline__ void set_tokens(Span& span, const Walk& walk) {
  span.t0 = (walk.tiles - 1 - walk.tile) * walk.size;
  span.t1 = min(span.t0 + walk.size, span.length);
}

constexpr int FORWARD_BUFFERS = 3, BACKWARD_BUFFERS = 4;  // the host gives as many times TILE * STRIDE floats

// out and lse; a row that sees nothing gets 0 and -inf.
template <class Visible>
__device__ __forceinline__ void attend_forward(const Inputs& in, const Visible& visible, Element* out, float* lse) {
  __shared__ i64 place[TILE];
  __shared__ u64 seen[TILE];
  float *const queries = tile_buffer(0), *const others = tile_buffer(1), *const weights = tile_buffer(2);
  const int y = threadIdx.x / 16 * 4, x = threadIdx.x % 16;
  const float scale = in.scale();
  const auto row = [&](int r) { return place[r]; };
  Walk walk(in.offsets, in.sequences, in.tile_tokens());
  for (i64 item = blockIdx.x; walk.seek(item / in.groups); item += gridDim.x) {
    Span span(in, walk.sequence, (int)(item % in.groups));
    set_tokens(span, walk);
    __syncthreads();
    place_rows(place, in, span);
    __syncthreads();
    if (KC == 1) load_tile(queries, in.q, in.dk, 0, row);
    float result[VC][4][4] = {}, top[4], total[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) top[i] = -positive_infinity();
    for (int tile = visible.next(in, span, -1); tile >= 0; tile = visible.next(in, span, tile)) {
      const int k0 = tile * TILE;
      const auto key = [&](int r) { return span.key(in, k0 + r); };
      __syncthreads();
      mark_rows(seen, in, visible, span, k0);
      float score[4][4] = {};
#pragma unroll
      for (int c = 0; c < KC; c++) {
        if (c > 0) __syncthreads();
        if (KC > 1) load_tile(queries, in.q, in.dk, c * TILE, row);
        load_tile(others, in.k, in.dk, c * TILE, key);
        __syncthreads();
        multiply_rows(score, queries, others, used_columns(in.dk, c));
      }
      float shrink[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u64 mask = seen[y + i];
        float most = -positive_infinity();
#pragma unroll
        for (int j = 0; j < 4; j++) {
          score[i][j] = sees(mask, x + 16 * j) ? score[i][j] * scale : -positive_infinity();
          most = fmaxf(most, score[i][j]);
        }
        most = fmaxf(top[i], row_max(most));
        // Nothing seen so far: shift by 0, so that the exponentials are 0 and not NaN.
        const float shift = most == -positive_infinity() ? 0.0f : most;
        shrink[i] = top[i] == most ? 1.0f : expf(top[i] - shift);
        total[i] *= shrink[i];
        top[i] = most;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float p = expf(score[i][j] - shift);
          weights[(y + i) * STRIDE + x + 16 * j] = p;
          total[i] += p;
        }
      }
#pragma unroll
      for (int c = 0; c < VC; c++) {
        __syncthreads();
        const float zero = load_tile(others, in.v, in.dv, c * TILE, key);
        const bool guarded = __syncthreads_or(zero != 0.0f);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) result[c][i][j] *= shrink[i];
        multiply_keys(result[c], weights, others, seen, guarded);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float sum = row_sum(total[i]);
      const i64 at = place[y + i];
      if (at < 0) continue;
      const bool none = top[i] == -positive_infinity() && sum == 0.0f;
      const float factor = none ? 0.0f : 1.0f / sum;
      if (x == 0) lse[at] = none ? -positive_infinity() : top[i] + logf(sum);
#pragma unroll
      for (int c = 0; c < VC; c++) put4(out + at * in.dv, in.dv, c * TILE + x * 4, result[c][i], factor, false);
    }
  }
}
#include "branch-backward.cuh"

// The kernels of one operation: NAME_forward, NAME_backward_queries, NAME_backward_keys. ALSO(, i64 w) are parameters
// after the common ones, and VISIBLE, in parentheses, is made of them.
#define ALSO(...) __VA_ARGS__
#define ATTENTION_KERNELS(NAME, EXTRA, VISIBLE)                                                                       \
  extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) NAME##_forward(                                     \
      const Element* q, const Element* k, const Element* v, const int* offsets, const int* key_offsets, Element* out, \
      float* lse, i64 sequences, int heads, int groups, int dk, int dv EXTRA) {                                       \
    const Inputs in = {q, k, v, offsets, key_offsets, sequences, heads, groups, dk, dv};                              \
    attend_forward(in, VISIBLE, out, lse);                                                                            \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) NAME##_backward_queries(                            \
      const Element* q, const Element* k, const Element* v, const int* offsets, const int* key_offsets,               \
      const Element* out, const float* lse, const Element* d_out, Element* dq, i64 sequences, int heads, int groups,  \
      int dk, int dv, int accumulate EXTRA) {                                                                         \
    const Inputs in = {q, k, v, offsets, key_offsets, sequences, heads, groups, dk, dv};                              \
    attend_backward_queries(in, VISIBLE, Gradients{out, lse, d_out, accumulate != 0, false, false}, dq);              \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) NAME##_backward_keys(                               \
      const Element* q, const Element* k, const Element* v, const int* offsets, const int* key_offsets,               \
      const Element* out, const float* lse, const Element* d_out, Element* d_k, Element* d_v, i64 sequences,          \
      int heads, int groups, int dk, int dv, int accumulate_k, int accumulate_v EXTRA) {                              \
    const Inputs in = {q, k, v, offsets, key_offsets, sequences, heads, groups, dk, dv};                              \
    attend_backward_keys(in, VISIBLE, Gradients{out, lse, d_out, false, accumulate_k != 0, accumulate_v != 0}, d_k,   \
                         d_v);                                                                                        \
  }
