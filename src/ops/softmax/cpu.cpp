// Softmax of rows, forward and backward; the backward reads the result of the forward.
#include "rows.h"

extern "C" {

void softmax_forward(const float* x, float* y, int64_t rows, int64_t width) {
  each_row(rows, width, [&](int64_t r) {
    const float* from = x + r * width;
    float* to = y + r * width;
    float top = from[0];
    for (int64_t i = 1; i < width; ++i) top = top > from[i] ? top : from[i];
    LaneSums sums;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const vec power = exp(load(from + i) - splat(top));
      store(to + i, power);
      sums.add(power);
    }
    const int rest = static_cast<int>(width - i);
    if (rest > 0) {
      store_part(to + i, exp(load_part(from + i, rest) - splat(top)), rest);
      sums.add(load_part(to + i, rest));
    }
    const float inverse = 1.0f / sums.total();
    for (i = 0; i < width; ++i) to[i] *= inverse;
  });
}

void softmax_backward(const float* y, const float* dy, float* dx, int64_t rows, int64_t width, int64_t accumulate) {
  each_row(rows, width, [&](int64_t r) {
    const int64_t at = r * width;
    const float inner = dot(y + at, dy + at, width);
    for (int64_t i = at; i < at + width; ++i) {
      const float slope = y[i] * (dy[i] - inner);
      dx[i] = accumulate ? dx[i] + slope : slope;
    }
  });
}
}
