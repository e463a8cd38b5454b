// Sums of rows times a factor, and the gradient that every number of a row gets.
#include "rows.h"

extern "C" {

// y[r] = factor * sum of row r; the last row may be shorter.
void sum_rows(const float* x, float* y, int64_t count, int64_t width, float factor) {
  each_row((count + width - 1) / width, width, [&](int64_t r) {
    const int64_t last = (r + 1) * width < count ? (r + 1) * width : count;
    LaneSums sums;
    each_vector(r * width, last, [&](int64_t i, auto get, auto) { sums.add(get(x + i)); });
    y[r] = factor * sums.total();
  });
}

// dx[i] (+)= factor * dy[row of i].
void sum_spread(const float* dy, float* dx, int64_t count, int64_t width, float factor, int64_t accumulate) {
  parallel_chunks(count, kFloats, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float slope = factor * dy[i / width];
      dx[i] = accumulate ? dx[i] + slope : slope;
    }
  });
}
}
