// Partial results of a branch by the warps of a block, and their merge.
#pragma once
#include "decode.cuh"

constexpr int ROW = DV + 8;  // numbers from one head's result to the next in shared memory, for the banks

// Slot WARPS is that of the compressed block that the token completes.
template <int WARPS> struct Partials {
  alignas(16) float results[WARPS + 1][HPG][ROW];
  float tops[WARPS + 1][HPG], sums[WARPS + 1][HPG];
};

template <int VECTOR> struct alignas(4 * VECTOR) Vector {
  float x[VECTOR];
};

// Merged results of head r: the maximum, the sum and the results from column c on, relative to the maximum.
template <int VECTOR> struct Merged {
  float top, sum;
  Vector<VECTOR> result;

  // extra: the slot of the completed block counts too.
  template <int WARPS> __device__ __forceinline__ Merged(const Partials<WARPS>& p, int r, int c, bool extra) {
    top = extra ? p.tops[WARPS][r] : -positive_infinity();
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, p.tops[w][r]);
    const float base = top == -positive_infinity() ? 0.0f : top;
    sum = 0.0f;
    result = {};
    const auto add = [&](int w) {
      const float factor = exp2_approximate(p.tops[w][r] - base);
      const Vector<VECTOR> x = *(const Vector<VECTOR>*)&p.results[w][r][c];
      sum += factor * p.sums[w][r];
#pragma unroll
      for (int e = 0; e < VECTOR; e++) result.x[e] += factor * x.x[e];
    };
#pragma unroll
    for (int w = 0; w < WARPS; w++) add(w);
    if (extra) add(WARPS);
  }
};
