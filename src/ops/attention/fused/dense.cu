// Dense attention uses the window kernels and this one: the backward pass by rows, without a gate.
#include "common.cuh"

constexpr int LANES = DV <= 32 ? 4 : DV <= 64 ? 8 : DV <= 128 ? 16 : 32;

// delta = rowsum(d_out * out), shift = the log-sum-exp in base 2. Eight columns a thread, LANES threads a row (token,
// head).
extern "C" __global__ void __launch_bounds__(256) dense_prepare(const bf16* d_out, const bf16* out, const float* lse,
                                                                float* delta, float* shift, int tokens) {
  const i64 row = ((i64)blockIdx.x * 256 + threadIdx.x) / LANES, rows = (i64)tokens * HEADS;
  const int lane = threadIdx.x % LANES, column = lane * 8;
  float sum = 0.0f;
  if (row < rows && column < DV) {
    const uint4 a = *(const uint4*)(d_out + row * DV + column), b = *(const uint4*)(out + row * DV + column);
    sum += low_bf16(a.x) * low_bf16(b.x) + high_bf16(a.x) * high_bf16(b.x);
    sum += low_bf16(a.y) * low_bf16(b.y) + high_bf16(a.y) * high_bf16(b.y);
    sum += low_bf16(a.z) * low_bf16(b.z) + high_bf16(a.z) * high_bf16(b.z);
    sum += low_bf16(a.w) * low_bf16(b.w) + high_bf16(a.w) * high_bf16(b.w);
  }
#pragma unroll
  for (int s = 1; s < LANES; s *= 2) sum += __shfl_xor_sync(~0u, sum, s);
  if (row >= rows || lane != 0) return;
  delta[row] = sum;
  shift[row] = lse[row] * LOG2_E;  // finite: a token sees at least itself
}
