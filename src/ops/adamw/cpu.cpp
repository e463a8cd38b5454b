// AdamW in one pass over each parameter: 16 bytes read and 12 written for each number.
#include "runtime.h"
#include "simd.h"

#include <cmath>

namespace {

constexpr int64_t kFloats = 1 << 14;  // numbers of one task

struct Step {
  float grad_scale, beta1, rest1, beta2, rest2, inverse_root_bias, epsilon, step_size, shrink;
};

void update(float* __restrict value, const float* __restrict grad, float* __restrict m, float* __restrict v,
            int64_t count, const Step s) {
  const vec beta1 = splat(s.beta1), rest1 = splat(s.rest1), beta2 = splat(s.beta2), rest2 = splat(s.rest2);
  each_vector(0, count, [&](int64_t i, auto get, auto put) {
    const vec g = get(grad + i) * splat(s.grad_scale), x = get(value + i);
    const vec mean = multiply_add(beta1, get(m + i), rest1 * g);
    const vec square = multiply_add(beta2, get(v + i), rest2 * g * g);
    put(m + i, mean);
    put(v + i, square);
    const vec direction = mean / multiply_add(sqrt(square), splat(s.inverse_root_bias), splat(s.epsilon));
    // Decay is a difference, not a factor: 1 - 1e-6 as a float32 factor would be wrong by a percent of the decay.
    put(value + i, x - multiply_add(splat(s.step_size), direction, splat(s.shrink) * x));
  });
}

struct Scalars {
  float grad_scale, max_norm, step_size, inverse_root_bias, learning_rate;
};

struct Record {
  int64_t size, first_piece;
  Address<float> value;
  Address<const float> grad;
  Address<float> m, v;
  Address<void> rounded;
  double weight_decay;
};

struct Piece {
  int32_t record, index;
};

}  // namespace

extern "C" {

// `rounded` is the bf16 copy that a GPU computes with; here nothing reads one.
void adamw_step(float* value, const float* grad, float* m, float* v, void* rounded, int64_t count, float grad_scale,
                float beta1, float rest1, float beta2, float rest2, float inverse_root_bias, float epsilon,
                float step_size, float shrink) {
  (void)rounded;
  const Step step{grad_scale, beta1, rest1, beta2, rest2, inverse_root_bias, epsilon, step_size, shrink};
  parallel_chunks(count, kFloats, [&](int64_t begin, int64_t end) {
    update(value + begin, grad + begin, m + begin, v + begin, end - begin, step);
  });
}

// factor[0] = the factor that limits the norm of the gradients to max_norm; NaN if the norm is not finite.
// sums = {sum of squares, count of NaN and inf} or null.
void adamw_factor(const double* sums, const Scalars* scalars, float* factor) {
  const float scale = scalars->grad_scale, max_norm = scalars->max_norm;
  if (sums == nullptr) {
    factor[0] = scale;
    return;
  }
  const double norm = std::sqrt(sums[0]) * std::fabs(static_cast<double>(scale));
  const bool finite = sums[1] == 0 && norm < INFINITY;
  factor[0] = finite ? static_cast<float>(norm > max_norm ? scale * (max_norm / norm) : scale) : NAN;
}

// All parameters, in pieces of kFloats. Does nothing where the factor is not a number.
void adamw_step_all(const Record* records, const Piece* pieces, const Scalars* scalars, const float* factor,
                    int64_t piece_count, float beta1, float rest1, float beta2, float rest2, float epsilon) {
  const Scalars numbers = *scalars;
  const float scale = factor[0];
  if (std::isnan(scale)) return;
  parallel_chunks(piece_count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const Record& r = records[pieces[p].record];
      const float shrink = static_cast<float>(numbers.learning_rate * r.weight_decay);
      const Step step{scale, beta1, rest1, beta2, rest2, numbers.inverse_root_bias, epsilon, numbers.step_size, shrink};
      const int64_t offset = pieces[p].index * kFloats, left = r.size - offset;
      update(r.value + offset, r.grad + offset, r.m + offset, r.v + offset, left < kFloats ? left : kFloats, step);
    }
  });
}
}
