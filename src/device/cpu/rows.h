// Loops of row-wise kernels.
#pragma once
#include "runtime.h"
#include "simd.h"

constexpr int64_t kFloats = 1 << 13;  // numbers of one task

// Runs body(row) for every row, about kFloats numbers in a task.
template <class Body>
inline void each_row(int64_t rows, int64_t width, const Body& body) {
  if (width == 0) return;
  parallel_chunks(rows, width < kFloats ? kFloats / width : 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) body(r);
  });
}
