// Loops of elementwise and row-wise kernels.
#pragma once
#include "runtime.h"
#include "simd.h"

constexpr int64_t kFloats = 1 << 13;  // numbers of one task

// Runs body(offset, get, put) over [begin, end): whole vectors, then one that reads and writes only what is left.
template <class Body>
inline void each_vector(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes)
    body(i, [](const float* p) { return load(p); }, [](float* p, vec v) { store(p, v); });
  const int rest = static_cast<int>(end - i);
  if (rest > 0)
    body(i, [=](const float* p) { return load_part(p, rest); }, [=](float* p, vec v) { store_part(p, v, rest); });
}

// Runs body(row) for every row, about kFloats numbers in a task.
template <class Body>
inline void each_row(int64_t rows, int64_t width, const Body& body) {
  if (width == 0) return;
  parallel_chunks(rows, width < kFloats ? kFloats / width : 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) body(r);
  });
}
