// AdamW in one pass: 16 bytes read and 12 written for each number, and 2 more for its rounded copy.
#include "elements.cuh"

constexpr int PIECE = 1 << 14, BLOCK = 256;

struct Step {
  float grad_scale, beta1, rest1, beta2, rest2, inverse_root_bias, epsilon, step_size, shrink;
};

template <int N>
__device__ __forceinline__ void update(float* value, const float* grad, float* m, float* v, bf16* rounded,
                                       const Step& s) {
  float x[N], g[N], first[N], second[N];
  load(x, value);
  load(g, grad);
  load(first, m);
  load(second, v);
#pragma unroll
  for (int k = 0; k < N; k++) {
    const float scaled = g[k] * s.grad_scale;
    first[k] = s.beta1 * first[k] + s.rest1 * scaled;
    second[k] = s.beta2 * second[k] + s.rest2 * scaled * scaled;
    const float direction = first[k] / (sqrtf(second[k]) * s.inverse_root_bias + s.epsilon);
    // Decay is a difference, not a factor: 1 - 1e-6 as a float32 factor would be wrong by a percent of the decay.
    x[k] -= s.step_size * direction + s.shrink * x[k];
  }
  store(value, x);
  store(m, first);
  store(v, second);
  if (rounded != nullptr) store(rounded, x);
}

// One block's piece of a tensor.
__device__ __forceinline__ void update_piece(float* value, const float* grad, float* m, float* v, bf16* rounded,
                                             int count, const Step& s) {
  const bool wide = aligned(value) && aligned(grad) && aligned(m) && aligned(v) && aligned(rounded);
  const int vectors = wide ? count / 4 : 0;
#pragma unroll 2
  for (int i = threadIdx.x * 4; i < vectors * 4; i += BLOCK * 4)
    update<4>(value + i, grad + i, m + i, v + i, rounded == nullptr ? rounded : rounded + i, s);
  for (int i = vectors * 4 + threadIdx.x; i < count; i += BLOCK)
    update<1>(value + i, grad + i, m + i, v + i, rounded == nullptr ? rounded : rounded + i, s);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
adamw_step(float* value, const float* grad, float* m, float* v, bf16* rounded, i64 count, float grad_scale,
           float beta1, float rest1, float beta2, float rest2, float inverse_root_bias, float epsilon, float step_size,
           float shrink) {
  const Step step = {grad_scale, beta1, rest1, beta2, rest2, inverse_root_bias, epsilon, step_size, shrink};
  const i64 offset = (i64)blockIdx.x * PIECE, left = count - offset;
  update_piece(value + offset, grad + offset, m + offset, v + offset, rounded == nullptr ? rounded : rounded + offset,
               (int)(left < PIECE ? left : PIECE), step);
}

// The numbers of a step that the host sends: op.ts lists them in the same order.
struct Scalars {
  float grad_scale, max_norm, step_size, inverse_root_bias, learning_rate;
};

// factor[0] = the factor that limits the norm of the gradients to max_norm; NaN if the norm is not finite.
// sums = {sum of squares, count of NaN and inf} or null.
extern "C" __global__ void adamw_factor(const double* sums, const Scalars* scalars, float* factor) {
  const float scale = scalars->grad_scale, max_norm = scalars->max_norm;
  if (sums == nullptr) {
    factor[0] = scale;
    return;
  }
  const double norm = sqrt(sums[0]) * fabs((double)scale);
  const bool finite = sums[1] == 0 && norm < (double)positive_infinity();
  factor[0] = finite ? (float)(norm > max_norm ? scale * (max_norm / norm) : scale) : not_a_number();
}

struct Record {
  i64 size, first_piece;
  float* value;
  const float* grad;
  float *m, *v;
  bf16* rounded;
  double weight_decay;
};

// All parameters, one block for each piece. Does nothing where the factor is not a number.
extern "C" __global__ void __launch_bounds__(BLOCK)
adamw_step_all(const Record* records, const int2* pieces, const Scalars* scalars, const float* factor, float beta1,
               float rest1, float beta2, float rest2, float epsilon) {
  const float scale = factor[0];
  if (scale != scale) return;
  const int2 piece = pieces[blockIdx.x];
  const Record r = records[piece.x];
  const float shrink = (float)(scalars->learning_rate * r.weight_decay);
  const Step step = {scale, beta1, rest1, beta2, rest2, scalars->inverse_root_bias, epsilon, scalars->step_size, shrink};
  const i64 offset = (i64)piece.y * PIECE, left = r.size - offset;
  update_piece(r.value + offset, r.grad + offset, r.m + offset, r.v + offset,
               r.rounded == nullptr ? r.rounded : r.rounded + offset, (int)(left < PIECE ? left : PIECE), step);
}
