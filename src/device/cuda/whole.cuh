// What blocks that stay for a whole decode step do: wait for each other, and linear layers of few rows.
#pragma once

#ifdef __CUDA_ARCH__
// Read anew wherever it is used: what follows from a thread's index would otherwise be computed once for all phases of the
// step, before the loop over the layers, and stay in registers that weights and keys need.
struct ThisThread {
  int x;
};
__device__ __forceinline__ ThisThread this_thread() {
  ThisThread thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread.x));
  return thread;
}
#define threadIdx this_thread()
#endif

#include "decode.cuh"

#ifndef BATCH_TILES
#define BATCH_TILES 1
#endif

constexpr int THREADS = 384, WARPS = THREADS / 32;  // 168 registers each: keys, values and results of 32 keys fit
constexpr int ROWS = 16 * BATCH_TILES;  // of a tile of the batch
constexpr int COUNTERS_APART = 32;      // the barrier's count has a line of its own

// What another block wrote before it added is there for all threads of this block after a barrier of the block.
__device__ __forceinline__ u32 read_acquired(const u32* from) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
// One more, and 0 after `limit`.
__device__ __forceinline__ void count_released(u32* count, u32 limit) {
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(count), "r"(limit) : "memory");
}
__device__ __forceinline__ void add_released(int* count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}
__device__ __forceinline__ int add_ordered(int* count) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}
// In a loop that waits for another block.
__device__ __forceinline__ void pause_thread() {}

extern __shared__ float4 shared_memory[];

// Blocks count themselves in, from 0 to twice their number and round again: a barrier is over when the count has come to
// the other half. What blocks wrote before is seen by all who waited. Lies in shared memory; thread 0 alone uses it.
struct GridBarrier {
  u32* count;
  u32 half;

  // No barrier of this step is over yet.
  __device__ __forceinline__ void start(u32* from) { count = from, half = read_acquired(from) / gridDim.x; }
  __device__ __forceinline__ void arrive() const {
    __syncthreads();
    if (threadIdx.x == 0) count_released(count, 2 * gridDim.x - 1);
  }
  __device__ __forceinline__ void wait() {
    if (threadIdx.x == 0) {
      const u32 blocks = gridDim.x, before = half;
      const u32* const from = count;
      half = before ^ 1;
      // Below its number of blocks, or not: the half that the count is in.
      while ((read_acquired(from) >= blocks) == (before != 0)) pause_thread();
    }
    __syncthreads();
  }
};

// Puts this block's share of `count` numbers on the way to L2.
__device__ __forceinline__ void prefetch_share(const bf16* from, i64 count) {
#if __CUDA_ARCH__ >= 900
  const i64 share = (count / 8 + gridDim.x - 1) / gridDim.x * 8, first = share * blockIdx.x;
  const i64 numbers = first + share < count ? share : count - first;
  if (threadIdx.x == 0 && numbers > 0)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + first), "r"((u32)(2 * numbers)) : "memory");
#endif
}

// The most probable token so far, the lower of equals.
struct Best {
  float value = -positive_infinity();
  int index = 0x7fffffff;

  __device__ __forceinline__ void offer(float other, int at) {
    if (other > value || (other == value && at < index)) value = other, index = at;
  }
};

// y = x wᵀ: w [rows][INPUTS]; then `also` [also_rows][INPUTS] gives also_y in f32. With SwiGLU `rows` counts the results, and w
// has twice as many. norm: weights of an RMSNorm of x, f32 [INPUTS].
struct Linear {
  const bf16* x;
  const float* norm;
  float epsilon;
  const bf16* w;
  int rows;
  const bf16* also;
  int also_rows;
  float* also_y;
  const bf16* residual;
  int batch;
};

struct Ignore {
  __device__ __forceinline__ void operator()(int, int, float) const {}
};

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// A block takes TILES tiles of eight rows of w, whose columns its warps share out; then the next ones. All weights of its
// first tiles are in registers, or on the way, after `load`. KIND: 0 none, 1 SiLU, 2 SwiGLU.
template <int INPUTS, int TILES, bool NORM> struct Product {
  static constexpr int STEPS = INPUTS / 32, OWN = (STEPS + WARPS - 1) / WARPS, COLUMNS = 8 * TILES;
  static constexpr int RESULTS_OF_THREAD = (ROWS * COLUMNS + THREADS - 1) / THREADS;
  static constexpr int SHARED = (WARPS * ROWS * (COLUMNS + 1) + WARPS * ROWS) * (int)sizeof(float);
  static_assert(INPUTS % 32 == 0, "what the pieces need");

  uint4 weights[TILES][OWN], factors[NORM ? OWN : 1][2];

  template <int KIND> static __device__ __forceinline__ int own_tiles(const Linear& of) {
    return (of.rows + 7) / 8 * (KIND == 2 ? 2 : 1);
  }
  template <int KIND> static __device__ __forceinline__ int all_tiles(const Linear& of) {
    return own_tiles<KIND>(of) + (of.also_rows + 7) / 8;
  }
  static __device__ __forceinline__ bool has_step(int i) {
    return STEPS % WARPS == 0 || i * WARPS + (int)threadIdx.x / 32 < STEPS;
  }

  template <int KIND = 0> __device__ __forceinline__ void load(const Linear& of) {
    load<KIND>(of, blockIdx.x * TILES);
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    if (NORM)
#pragma unroll
      for (int i = 0; i < OWN; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)  // a number always: what stays undefined would hold its register for ever
          factors[NORM ? i : 0][half] =
              has_step(i) ? load_early(of.norm + (i * WARPS + warp) * 32 + 8 * t + 4 * half) : make_uint4(0, 0, 0, 0);
  }

  template <int KIND> __device__ __forceinline__ void load(const Linear& of, int first_tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int own = own_tiles<KIND>(of), all = all_tiles<KIND>(of);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int tile = first_tile + n;
      const bool is_own = tile < own;
      // SwiGLU: tiles 2i and 2i + 1 are the same eight results, of the first and of the second half
      int r = is_own ? (KIND == 2 ? tile / 2 : tile) * 8 + g : (tile - own) * 8 + g;
      const int last = (is_own ? of.rows : of.also_rows) - 1;
      if (r > last) r = last;  // its result is not written
      if (KIND == 2 && tile % 2 == 1) r += of.rows;
      const bf16* from = (is_own ? of.w : of.also) + (i64)r * INPUTS + 8 * t;
#pragma unroll
      for (int i = 0; i < OWN; i++)
        weights[n][i] = tile < all && has_step(i) ? load_early(from + (i * WARPS + warp) * 32) : make_uint4(0, 0, 0, 0);
    }
  }

  // Eight numbers times the norm's weights, rounded; their squares are added up.
  static __device__ __forceinline__ uint4 weigh(uint4 x, const uint4 (&factor)[2], float& squares) {
    const u32 in[4] = {x.x, x.y, x.z, x.w};
    const u32 by[8] = {factor[0].x, factor[0].y, factor[0].z, factor[0].w, factor[1].x, factor[1].y, factor[1].z, factor[1].w};
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float a = first_half(in[i]), b = second_half(in[i]);
      squares += a * a + b * b;
      out[i] = to_halves(a * __uint_as_float(by[2 * i]), b * __uint_as_float(by[2 * i + 1]));
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }

  // offer(k, r, value): number r of some row, always of the same row for the same thread and k.
  template <int KIND, class Output, class Offer = Ignore>
  __device__ __forceinline__ void run(const Linear& of, Output* y, float4* memory, const Offer& offer = Offer()) {
    static_assert(KIND != 2 || TILES % 2 == 0, "pairs of tiles");
    float* const sums = (float*)memory;  // [WARPS][ROWS][COLUMNS + 1]
    float* const squares = sums + WARPS * ROWS * (COLUMNS + 1);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int own = own_tiles<KIND>(of), all = all_tiles<KIND>(of);
    constexpr int RESULTS = KIND == 2 ? COLUMNS / 2 : COLUMNS;
    for (int first_tile = blockIdx.x * TILES; first_tile < all; first_tile += gridDim.x * TILES) {
      float acc[BATCH_TILES][TILES][4] = {}, square[BATCH_TILES][2] = {};
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        if (!has_step(i)) break;
#pragma unroll
        for (int m = 0; m < BATCH_TILES; m++) {
          uint4 a[2];
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int row = 16 * m + 8 * half + g;
            a[half] = row < of.batch ? *(const uint4*)(of.x + (i64)row * INPUTS + (i * WARPS + warp) * 32 + 8 * t)
                                     : make_uint4(0, 0, 0, 0);
            if (NORM) a[half] = weigh(a[half], factors[NORM ? i : 0], square[m][half]);
          }
#pragma unroll
          for (int n = 0; n < TILES; n++) {
            multiply_add(acc[m][n], a[0].x, a[1].x, a[0].y, a[1].y, weights[n][i].x, weights[n][i].y);
            multiply_add(acc[m][n], a[0].z, a[1].z, a[0].w, a[1].w, weights[n][i].z, weights[n][i].w);
          }
        }
      }
      // The next weights are on their way while the warps' sums are added up.
      if (first_tile + (int)gridDim.x * TILES < all) load<KIND>(of, first_tile + gridDim.x * TILES);
#pragma unroll
      for (int m = 0; m < BATCH_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = 16 * m + 8 * half + g;
          float own_square = square[m][half];
          if (NORM) {
            own_square += __shfl_xor_sync(~0u, own_square, 1);
            own_square += __shfl_xor_sync(~0u, own_square, 2);
          }
          if (row >= of.batch) continue;
#pragma unroll
          for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
              sums[(warp * ROWS + row) * (COLUMNS + 1) + 8 * n + 2 * t + e] = acc[m][n][2 * half + e];
          if (NORM && t == 0) squares[warp * ROWS + row] = own_square;
        }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < RESULTS_OF_THREAD; k++) {
        const int i = threadIdx.x + k * THREADS, row = i / RESULTS, column = i % RESULTS;
        if (row >= of.batch) continue;
        float scale = 1.0f;
        if (NORM) {
          float square = 0.0f;
#pragma unroll
          for (int w = 0; w < WARPS; w++) square += squares[w * ROWS + row];
          scale = 1.0f / sqrtf(square / INPUTS + of.epsilon);
        }
        const auto total = [&](int at) {
          float sum = 0.0f;
#pragma unroll
          for (int w = 0; w < WARPS; w++) sum += sums[(w * ROWS + row) * (COLUMNS + 1) + at];
          return sum * scale;
        };
        if (KIND == 2) {
          const int pair = column / 8, r = (first_tile / 2 + pair) * 8 + column % 8;
          if (r < of.rows)
            write_one(y + (i64)row * of.rows + r, silu(total(pair * 16 + column % 8)) * total(pair * 16 + 8 + column % 8));
          continue;
        }
        const int tile = first_tile + column / 8;
        if (tile >= own) {
          const int r = (tile - own) * 8 + column % 8;
          if (r < of.also_rows) of.also_y[(i64)row * of.also_rows + r] = total(column);
          continue;
        }
        const int r = tile * 8 + column % 8;
        if (r >= of.rows) continue;
        float value = total(column);
        if (KIND == 1) value = silu(value);
        if (of.residual != nullptr) value += read_one(of.residual + (i64)row * of.rows + r);
        write_one(y + (i64)row * of.rows + r, value);
        offer(k, r, value);
      }
      __syncthreads();
    }
  }

  // The best of this block's candidates for each row: values and indices [blocks][batch].
  static __device__ __forceinline__ void keep_best(const Best (&best)[RESULTS_OF_THREAD], int batch, float* values, int* indices,
                                                   float4* memory) {
    float* const value = (float*)memory;
    int* const index = (int*)(value + ROWS * COLUMNS);
#pragma unroll
    for (int k = 0; k < RESULTS_OF_THREAD; k++) {
      const int i = threadIdx.x + k * THREADS;
      if (i < ROWS * COLUMNS) value[i] = best[k].value, index[i] = best[k].index;
    }
    __syncthreads();
    for (int row = threadIdx.x; row < batch; row += THREADS) {
      Best all;
      for (int c = 0; c < COLUMNS; c++) all.offer(value[row * COLUMNS + c], index[row * COLUMNS + c]);
      values[blockIdx.x * batch + row] = all.value, indices[blockIdx.x * batch + row] = all.index;
    }
    __syncthreads();
  }
};
