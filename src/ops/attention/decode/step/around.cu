// Kernels around a product of cuBLASLt in a decode step of a large batch: the norm before it, the activation after it.
#include "decode.cuh"

constexpr int NORM_THREADS = 128, NORM_WARPS = NORM_THREADS / 32;

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// RMSNorm of the rows of x [grid][inputs] into y. inputs is a multiple of 8.
extern "C" __global__ void __launch_bounds__(NORM_THREADS) step_norm(const bf16* x, const float* weight, float epsilon,
                                                                    bf16* y, int inputs) {
  __shared__ float sums[NORM_WARPS];
  let_next_start();
  wait_for_previous();
  const i64 row = (i64)blockIdx.x * inputs;
  float values[8], squares = 0.0f;
  for (int c = 8 * threadIdx.x; c < inputs; c += 8 * NORM_THREADS) {
    load(values, x + row + c);
#pragma unroll
    for (int i = 0; i < 8; i++) squares += values[i] * values[i];
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int w = 0; w < NORM_WARPS; w++) squares += sums[w];
  const float scale = 1.0f / sqrtf(squares / inputs + epsilon);
  for (int c = 8 * threadIdx.x; c < inputs; c += 8 * NORM_THREADS) {
    float factors[8];
    load(values, x + row + c);
    load(factors, weight + c);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] *= scale * factors[i];
    store(y + row + c, values);
  }
}

// y [count] = SiLU of x; with `gated` SwiGLU of x [rows][2 * results], the gate's columns first. Four numbers a thread:
// results is a multiple of 4. x and y may be the same without `gated`.
extern "C" __global__ void __launch_bounds__(256) step_activate(const bf16* x, bf16* y, int results, int gated,
                                                                int count) {
  let_next_start();
  wait_for_previous();
  const int i = 4 * ((int)blockIdx.x * 256 + threadIdx.x);
  if (i >= count) return;
  const i64 from = gated ? (i64)(i / results) * 2 * results + i % results : i;
  float values[4], others[4];
  load(values, x + from);
  if (gated) load(others, x + from + results);
#pragma unroll
  for (int k = 0; k < 4; k++) values[k] = silu(values[k]) * (gated ? others[k] : 1.0f);
  store(y + i, values);
}
