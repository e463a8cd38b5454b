// Importance of a selection block: the attention that a group's heads pay to the compressed blocks it overlaps.
#pragma once
#include "decode.cuh"

constexpr int STRIDE = SEL_L / CMP_D, LEAD = CMP_L / CMP_D - 1, WEIGHTS = LEAD + STRIDE;
constexpr int ROOM = SEL_N - 3;                              // blocks that are not forced
constexpr int STRETCH = STRIDE <= 16 ? 256 : 4096 / STRIDE;  // selection blocks whose importance is computed at a time

static_assert(STRIDE * CMP_D == SEL_L && STRETCH >= 1, "d divides l'");

// probability [WEIGHTS]: of the compressed blocks that overlap the selection block, summed over the heads. The result
// is not negative; NaN becomes 0 and ranks last.
__device__ __forceinline__ float importance_of(const float* probability) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WEIGHTS; i++) {
    const int at = (i - LEAD) * CMP_D, stop = at + CMP_L;
    const int shared = (stop < SEL_L ? stop : SEL_L) - (at > 0 ? at : 0);
    sum += (float)shared / (float)CMP_D * probability[i];
  }
  return sum >= 0.0f ? sum : 0.0f;
}
