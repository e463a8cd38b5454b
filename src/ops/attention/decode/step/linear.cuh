// What the linear layers of a decode step share: SiLU, and the norm of x on its way to the tensor cores.
#pragma once
#include "decode.cuh"

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// Eight numbers times the norm's weights, rounded; their squares are added up.
__device__ __forceinline__ uint4 weigh(uint4 x, const float (&weight)[8], float& squares) {
  const u32 in[4] = {x.x, x.y, x.z, x.w};
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float a = low_bf16(in[i]), b = high_bf16(in[i]);
    squares += a * a + b * b;
    out[i] = pack_bf16(a * weight[2 * i], b * weight[2 * i + 1]);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}
