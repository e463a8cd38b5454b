// A part of every run of `whole` numbers: `part` of them after the first `before`.
#include "rows.h"

extern "C" {

void slice_forward(const float* x, float* y, int64_t outer, int64_t whole, int64_t part, int64_t before) {
  each_row(outer, whole, [&](int64_t o) { std::memcpy(y + o * part, x + o * whole + before, sizeof(float) * part); });
}

// Numbers outside the part have no gradient.
void slice_backward(const float* dy, float* dx, int64_t outer, int64_t whole, int64_t part, int64_t before,
                    int64_t accumulate) {
  each_row(outer, whole, [&](int64_t o) {
    float* run = dx + o * whole;
    const float* slope = dy + o * part;
    if (accumulate) {
      for (int64_t i = 0; i < part; ++i) run[before + i] += slope[i];
      return;
    }
    std::memset(run, 0, sizeof(float) * before);
    std::memcpy(run + before, slope, sizeof(float) * part);
    std::memset(run + before + part, 0, sizeof(float) * (whole - before - part));
  });
}
}
