// Products, scaling, exponential and logarithm, number by number.
#include "rows.h"

namespace {

// y (+)= what `value` gives for every vector.
template <class Value>
inline void map(float* y, int64_t count, int64_t accumulate, const Value& value) {
  parallel_chunks(count, kFloats, [&](int64_t begin, int64_t end) {
    each_vector(begin, end, [&](int64_t i, auto get, auto put) {
      const vec v = value(i, get);
      put(y + i, accumulate ? get(y + i) + v : v);
    });
  });
}

}  // namespace

extern "C" {

// y (+)= a * b; b has one number for every `inner` numbers of a.
void mul(const float* a, const float* b, float* y, int64_t count, int64_t inner, int64_t accumulate) {
  if (inner == 1) {
    map(y, count, accumulate, [=](int64_t i, auto get) { return get(a + i) * get(b + i); });
    return;
  }
  parallel_chunks(count, kFloats, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end;) {
      const int64_t row = first / inner, last = (row + 1) * inner < end ? (row + 1) * inner : end;
      const vec factor = splat(b[row]);
      each_vector(first, last, [&](int64_t i, auto get, auto put) {
        const vec v = get(a + i) * factor;
        put(y + i, accumulate ? get(y + i) + v : v);
      });
      first = last;
    }
  });
}

// y[r] (+)= sum over a row of a * b.
void row_dot(const float* a, const float* b, float* y, int64_t rows, int64_t inner, int64_t accumulate) {
  each_row(rows, inner, [&](int64_t r) {
    y[r] = dot(a + r * inner, b + r * inner, inner) + (accumulate ? y[r] : 0.0f);
  });
}

void scale(const float* x, float* y, int64_t count, float factor, int64_t accumulate) {
  map(y, count, accumulate, [=](int64_t i, auto get) { return get(x + i) * splat(factor); });
}

void exp_forward(const float* x, float* y, int64_t count) {
  map(y, count, 0, [=](int64_t i, auto get) { return exp(get(x + i)); });
}

void log_forward(const float* x, float* y, int64_t count) {
  parallel_chunks(count, kFloats, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) y[i] = static_cast<float>(natural_log(x[i]));
  });
}

void log_backward(const float* x, const float* dy, float* dx, int64_t count, int64_t accumulate) {
  map(dx, count, accumulate, [=](int64_t i, auto get) { return get(dy + i) / get(x + i); });
}
}
