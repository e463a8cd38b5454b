// SiLU and SwiGLU, forward and backward; the backward computes the sigmoid again from the saved input.
#include "runtime.h"
#include "simd.h"

namespace {

constexpr int64_t kFloats = 1 << 13;  // outputs of one task

inline vec sigmoid(vec x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

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

// Runs body(row) for every row, about kFloats of output in a task.
template <class Body>
inline void each_row(int64_t rows, int64_t width, const Body& body) {
  if (width == 0) return;
  parallel_chunks(rows, width < kFloats ? kFloats / width : 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) body(r);
  });
}

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
