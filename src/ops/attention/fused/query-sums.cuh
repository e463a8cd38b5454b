// fp32 sums of dQ that joint_gradients adds to and selected_query_gradient reads: per block of 64 tokens HPG tiles of
// 64 packed rows, each for all groups. A tile is in the order of the accumulators, so that a warp adds 512 bytes at
// once.
#pragma once
#include "common.cuh"

#define JOINT_SHAPE (DK == 64 && DV == 64 && SEL_L == 64)

// Index of columns `column` (even) and column + 1 of row `row` of a tile.
__device__ __forceinline__ int query_sum(int row, int column) {
  const int half = (row / 8) & 1, thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  return ((column / 16 * 2 + half) * 128 + thread) * 4 + column / 8 % 2 * 2;
}
