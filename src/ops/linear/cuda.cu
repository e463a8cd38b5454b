// The bias of a linear layer; the products are cuBLASLt's.
#include "elements.cuh"

typedef DTYPE T;

constexpr int ROWS = 128;  // of a partial sum of the bias's gradient (cuda.ts has the same)

// y [rows, outputs] += bias [outputs]
extern "C" __global__ void __launch_bounds__(256) bias_forward(T* y, const float* bias, i64 rows, i64 outputs) {
  const i64 count = rows * outputs, threads = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads)
    write_one(y + i, read_one(y + i) + bias[i % outputs]);
}

// partial[blockIdx.y] = the column sums of ROWS rows of dy, 32 columns a block: a warp adds every eighth row.
extern "C" __global__ void __launch_bounds__(256)
bias_partial(const T* dy, float* partial, i64 rows, i64 outputs) {
  __shared__ float sums[8][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 column = (i64)blockIdx.x * 32 + lane, first = (i64)blockIdx.y * ROWS;
  const i64 end = rows - first < ROWS ? rows : first + ROWS;
  float sum = 0.0f;
  if (column < outputs) {
#pragma unroll 4
    for (i64 r = first + warp; r < end; r += 8) sum += read_one(dy + r * outputs + column);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= outputs) return;
#pragma unroll
  for (int w = 1; w < 8; w++) sum += sums[w][lane];
  partial[(i64)blockIdx.y * outputs + column] = sum;
}

extern "C" __global__ void __launch_bounds__(1024)
bias_backward(const float* partial, i64 partials, float* d_bias, i64 outputs, int accumulate) {
  add_partial_sums(partial, partials, d_bias, outputs, accumulate);
}
