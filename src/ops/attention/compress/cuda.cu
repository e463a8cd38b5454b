// Compression of blocks of tokens, and the unfolding of blocks for the mlp. Rows are [groups * size] = width numbers.
//
// Blocks overlap, so a token's gradient has several terms: it is gathered token by token, from the lowest block up.
// Sums over blocks (weights, position embedding) go through partial sums of a few blocks, added in a fixed order.
// VECTOR numbers are moved at a time: 16 bytes, or one where the layout does not allow that.
#include "elements.cuh"

typedef DTYPE T;

constexpr int N = VECTOR;
constexpr int BLOCKS_PER_PARTIAL = 16;  // blocks summed into one partial gradient (cuda.ts has the same)

#define LAYOUT_PARAMETERS \
  const i32 *offsets, const i32 *block_offsets, i64 sequences, i64 tokens, i64 blocks, i64 l, i64 d, i64 width
#define FIRST_TOKEN(block) first_token(offsets, block_offsets, sequences, d, block)

__device__
__forceinline__ i64 first_token(const i32* offsets, const i32* block_offsets, i64 sequences, i64 d, i64 block) {
  const int s = sequence_of(block_offsets, sequences, block);
  return offsets[s] + (block - block_offsets[s]) * d;
}

// The blocks [low, high) that hold a token, and the token's place in the lowest of them.
struct Blocks {
  i64 low, high, place;
};
__device__ __forceinline__ Blocks blocks_of(const i32* offsets, const i32* block_offsets, i64 sequences, i64 l, i64 d,
                                            i64 token) {
  const int s = sequence_of(offsets, sequences, token);
  const i64 position = token - offsets[s], count = block_offsets[s + 1] - block_offsets[s];
  const i64 low = position < l ? 0 : (position - l) / d + 1;
  i64 high = position / d + 1;
  if (high > count) high = count;
  if (high < low) high = low;
  return {block_offsets[s] + low, block_offsets[s] + high, position - low * d};
}

// Calls body(row, column) for N columns of every row, one thread each.
template <class Body> __device__ __forceinline__ void each_piece(i64 rows, i64 width, const Body& body) {
  const i64 vectors = width / N, count = rows * vectors, threads = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
    const i64 row = count <= 0xffffffffll ? (i64)((u32)i / (u32)vectors) : i / vectors;
    body(row, (i - row * vectors) * N);
  }
}

// y[block] = sum over p of weight[p] * x[first + p]; without weights the mean.
extern "C" __global__ void __launch_bounds__(128) compress_forward(const T* x, const float* weight, T* y,
                                                                   LAYOUT_PARAMETERS) {
  each_piece(blocks, width, [=](i64 block, i64 column) {
    const T* rows = x + FIRST_TOKEN(block) * width + column;
    float sum[N] = {};
    if (weight != nullptr) {
#pragma unroll 4
      for (i64 p = 0; p < l; p++) {
        float w[N], a[N];
        load(w, weight + p * width + column);
        load(a, rows + p * width);
#pragma unroll
        for (int k = 0; k < N; k++) sum[k] += w[k] * a[k];
      }
    } else {
#pragma unroll 4
      for (i64 p = 0; p < l; p++) {
        float a[N];
        load(a, rows + p * width);
#pragma unroll
        for (int k = 0; k < N; k++) sum[k] += a[k];
      }
      const float mean = 1.0f / (float)l;
#pragma unroll
      for (int k = 0; k < N; k++) sum[k] *= mean;
    }
    store(y + block * width + column, sum);
  });
}

// dx[token] (+)= sum over its blocks of weight[place] * dy[block].
extern "C" __global__ void __launch_bounds__(256) compress_backward_input(const T* dy, const float* weight, T* dx,
                                                                          LAYOUT_PARAMETERS, int accumulate) {
  const float mean = 1.0f / (float)l;
  each_piece(tokens, width, [=](i64 token, i64 column) {
    const Blocks at = blocks_of(offsets, block_offsets, sequences, l, d, token);
    float sum[N] = {};
    i64 p = at.place;
    for (i64 i = at.low; i < at.high; i++, p -= d) {
      float w[N], g[N];
      load(g, dy + i * width + column);
      if (weight != nullptr) load(w, weight + p * width + column);
#pragma unroll
      for (int k = 0; k < N; k++) sum[k] += (weight != nullptr ? w[k] : mean) * g[k];
    }
    store(dx + token * width + column, sum, accumulate);
  });
}

// partial[blockIdx.y][p] = sum over its blocks of dy[block] * x[first + p].
extern "C" __global__ void __launch_bounds__(256) compress_partial(const T* dy, const T* x, float* partial,
                                                                   LAYOUT_PARAMETERS) {
  __shared__ i64 first[BLOCKS_PER_PARTIAL];
  const i64 begin = (i64)blockIdx.y * BLOCKS_PER_PARTIAL, left = blocks - begin;
  const int count = (int)(left < BLOCKS_PER_PARTIAL ? left : BLOCKS_PER_PARTIAL);
  if (threadIdx.x < count) first[threadIdx.x] = FIRST_TOKEN(begin + threadIdx.x);
  __syncthreads();
  each_piece(l, width, [=](i64 p, i64 column) {
    float sum[N] = {};
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      float g[N], a[N];
      load(g, dy + (begin + i) * width + column);
      load(a, x + (first[i] + p) * width + column);
#pragma unroll
      for (int k = 0; k < N; k++) sum[k] += g[k] * a[k];
    }
    store(partial + (blockIdx.y * l + p) * width + column, sum);
  });
}

// out[block][group][p][size] = x[first + p][group][size] + position[p][group][size], a block of threads for each block.
extern "C" __global__ void __launch_bounds__(256) unfold_forward(const T* x, const float* position, T* out,
                                                                 LAYOUT_PARAMETERS, int groups) {
  const u32 pieces = (u32)(width / groups / N), count = (u32)(groups * l) * pieces;
  for (i64 block = blockIdx.x; block < blocks; block += gridDim.x) {
    const T* rows = x + FIRST_TOKEN(block) * width;
    for (u32 i = threadIdx.x; i < count; i += 256) {
      const u32 row = i / pieces, group = row / (u32)l;  // row = (group, p)
      const i64 at = (i64)(row - group * (u32)l) * width + (group * pieces + (i - row * pieces)) * N;
      float a[N], b[N];
      load(a, rows + at);
      load(b, position + at);
#pragma unroll
      for (int k = 0; k < N; k++) a[k] += b[k];
      store(out + block * l * width + (i64)i * N, a);
    }
  }
}

// Index of x[.][column] at position p in a row of the unfolded block.
__device__ __forceinline__ i64 unfolded(i64 column, i64 p, i64 l, i64 size) {
  const i64 group = column / size;
  return (group * l + p) * size + (column - group * size);
}

// dx[token] (+)= sum over its blocks of d_out at its place in the block.
extern "C" __global__ void __launch_bounds__(256) unfold_backward_input(const T* d_out, T* dx, LAYOUT_PARAMETERS,
                                                                        int groups, int accumulate) {
  const i64 size = width / groups;
  each_piece(tokens, width, [=](i64 token, i64 column) {
    const Blocks at = blocks_of(offsets, block_offsets, sequences, l, d, token);
    float sum[N] = {};
    i64 p = at.place;
    for (i64 i = at.low; i < at.high; i++, p -= d) {
      float g[N];
      load(g, d_out + i * l * width + unfolded(column, p, l, size));
#pragma unroll
      for (int k = 0; k < N; k++) sum[k] += g[k];
    }
    store(dx + token * width + column, sum, accumulate);
  });
}

// partial[blockIdx.y][p] = sum over its blocks of d_out.
extern "C" __global__ void __launch_bounds__(256) unfold_partial(const T* d_out, float* partial, i64 blocks, i64 l,
                                                                 i64 width, int groups) {
  const i64 begin = (i64)blockIdx.y * BLOCKS_PER_PARTIAL, left = blocks - begin, size = width / groups;
  const int count = (int)(left < BLOCKS_PER_PARTIAL ? left : BLOCKS_PER_PARTIAL);
  each_piece(l, width, [=](i64 p, i64 column) {
    const T* from = d_out + begin * l * width + unfolded(column, p, l, size);
    float sum[N] = {};
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      float g[N];
      load(g, from + i * l * width);
#pragma unroll
      for (int k = 0; k < N; k++) sum[k] += g[k];
    }
    store(partial + (blockIdx.y * l + p) * width + column, sum);
  });
}

extern "C" __global__ void __launch_bounds__(1024) add_partials(const float* partial, i64 partials, float* total,
                                                                i64 count, int accumulate) {
  add_partial_sums(partial, partials, total, count, accumulate);
}
