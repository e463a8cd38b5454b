// SiLU and SwiGLU, forward and backward; the backward computes the sigmoid again from the saved input.
#include "rows.h"

namespace {

inline vec sigmoid(vec x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

}  // namespace

extern "C" {

void silu_forward(const float* x, float* y, int64_t count) {
  parallel_chunks(count, kFloats, [&](int64_t begin, int64_t end) {
    each_vector(begin, end, [&](int64_t i, auto get, auto put) {
      const vec v = get(x + i);
      put(y + i, v * sigmoid(v));
    });
  });
}

void silu_backward(const float* x, const float* dy, float* dx, int64_t count, int64_t accumulate) {
  parallel_chunks(count, kFloats, [&](int64_t begin, int64_t end) {
    each_vector(begin, end, [&](int64_t i, auto get, auto put) {
      const vec v = get(x + i), s = sigmoid(v);
      const vec slope = get(dy + i) * s * multiply_add(v, splat(1.0f) - s, splat(1.0f));
      put(dx + i, accumulate ? get(dx + i) + slope : slope);
    });
  });
}

void swiglu_forward(const float* x, float* y, int64_t rows, int64_t hidden) {
  each_row(rows, hidden, [&](int64_t r) {
    const float* gate = x + r * 2 * hidden;
    const float* up = gate + hidden;
    float* out = y + r * hidden;
    each_vector(0, hidden, [&](int64_t i, auto get, auto put) {
      const vec g = get(gate + i);
      put(out + i, g * sigmoid(g) * get(up + i));
    });
  });
}

void swiglu_backward(const float* x, const float* dy, float* dx, int64_t rows, int64_t hidden, int64_t accumulate) {
  each_row(rows, hidden, [&](int64_t r) {
    const float* gate = x + r * 2 * hidden;
    const float* up = gate + hidden;
    const float* slope = dy + r * hidden;
    float* d_gate = dx + r * 2 * hidden;
    float* d_up = d_gate + hidden;
    each_vector(0, hidden, [&](int64_t i, auto get, auto put) {
      const vec g = get(gate + i), s = sigmoid(g), d = get(slope + i);
      const vec for_gate = d * get(up + i) * s * multiply_add(g, splat(1.0f) - s, splat(1.0f));
      const vec for_up = d * g * s;
      put(d_gate + i, accumulate ? get(d_gate + i) + for_gate : for_gate);
      put(d_up + i, accumulate ? get(d_up + i) + for_up : for_up);
    });
  });
}
}
