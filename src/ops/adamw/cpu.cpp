// One AdamW step over one parameter, in one pass: 16 bytes read and 12 written for each number.
#include "runtime.h"

#include <cmath>

namespace {

constexpr int64_t kFloats = 1 << 14;  // numbers of one task

struct Step {
  float gradient_scale, beta1, rest1, beta2, rest2, inverse_root_bias, epsilon, step_size, shrink;
};

void update(float* __restrict value, const float* __restrict gradient, float* __restrict m, float* __restrict v,
            int64_t count, const Step s) {
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * s.gradient_scale;
    m[i] = s.beta1 * m[i] + s.rest1 * g;
    v[i] = s.beta2 * v[i] + s.rest2 * g * g;
    const float direction = m[i] / (std::sqrt(v[i]) * s.inverse_root_bias + s.epsilon);
    // Decay is a difference, not a factor: 1 - 1e-6 as a float32 factor would be wrong by a percent of the decay.
    value[i] -= s.step_size * direction + s.shrink * value[i];
  }
}

}  // namespace

extern "C" void adamw_step(float* value, const float* gradient, float* m, float* v, int64_t count,
                           float gradient_scale, float beta1, float rest1, float beta2, float rest2,
                           float inverse_root_bias, float epsilon, float step_size, float shrink) {
  const Step step{gradient_scale, beta1, rest1, beta2, rest2, inverse_root_bias, epsilon, step_size, shrink};
  parallel_chunks(count, kFloats, [&](int64_t begin, int64_t end) {
    update(value + begin, gradient + begin, m + begin, v + begin, end - begin, step);
  });
}
