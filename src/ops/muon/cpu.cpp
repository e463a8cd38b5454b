// The elementwise parts of Muon; the products between muon_direction and muon_update are those of linear/cpu.cpp.
#include "runtime.h"
#include "simd.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int64_t kFloats = 1 << 14;  // elements of a piece
constexpr float kNormEpsilon = 1e-7f;

struct Record {
  int64_t size, first_piece;
  float* value;
  const float* grad;
  float* momentum;
  void* rounded;  // the bf16 copy that a GPU computes with; here nothing reads one
  double weight_decay, scale;
};

struct Piece {
  int32_t record, index;
};

// The numbers of a step: `Muon.nextStep` lists them in the same order.
struct Scalars {
  float grad_scale, max_norm, step_size, inverse_root_bias, learning_rate, matrix_rate;
};

// Nesterov: the average as it will be after one more gradient like this one.
inline float look_ahead(float momentum, float rest, float average, float grad) {
  return multiply_add(momentum, average, rest * grad);
}

int64_t count_of(const Record& r, int64_t begin) { return std::min(kFloats, r.size - begin); }

}  // namespace

extern "C" {

// The new average, and norms[matrix] = 1 / (Frobenius norm of the direction + epsilon). Changes nothing where the factor
// is NaN.
void muon_momentum(const Record* records, const Piece* pieces, const float* factor, double* partials, float* norms,
                   int64_t matrices, int64_t piece_count, float momentum) {
  const float scale = factor[0], rest = 1.0f - momentum;
  if (std::isnan(scale)) return;
  parallel(piece_count, [&](int64_t p) {
    const Record& r = records[pieces[p].record];
    const int64_t begin = pieces[p].index * kFloats, count = count_of(r, begin);
    const float* __restrict grad = r.grad + begin;
    float* __restrict average = r.momentum + begin;
    double squares = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float g = grad[i] * scale;
      average[i] = multiply_add(momentum, average[i], rest * g);
      const double ahead = look_ahead(momentum, rest, average[i], g);
      squares += ahead * ahead;
    }
    partials[p] = squares;
  });
  for (int64_t m = 0; m < matrices; ++m) {
    const int64_t first = records[m].first_piece, count = (records[m].size + kFloats - 1) / kFloats;
    double squares = 0;
    for (int64_t p = first; p < first + count; ++p) squares += partials[p];
    norms[m] = 1.0f / (static_cast<float>(std::sqrt(squares)) + kNormEpsilon);
  }
}

// x [matrices of the batch][size] = direction / norm
void muon_direction(const Record* records, const Piece* pieces, const float* factor, const float* norms, float* x,
                    int64_t first_matrix, int64_t first_piece, int64_t piece_count, float momentum) {
  const float scale = factor[0], rest = 1.0f - momentum;
  parallel(piece_count, [&](int64_t p) {
    const Piece& piece = pieces[first_piece + p];
    const Record& r = records[piece.record];
    const int64_t begin = piece.index * kFloats, count = count_of(r, begin);
    const float* __restrict grad = r.grad + begin;
    const float* __restrict average = r.momentum + begin;
    float* __restrict to = x + (piece.record - first_matrix) * r.size + begin;
    for (int64_t i = 0; i < count; ++i)
      to[i] = look_ahead(momentum, rest, average[i], grad[i] * scale) * norms[piece.record];
  });
}

// value -= rate * (scale * x + weight_decay * value). Changes nothing where the factor is NaN.
void muon_update(const Record* records, const Piece* pieces, const Scalars* scalars, const float* factor,
                 const float* x, int64_t first_matrix, int64_t first_piece, int64_t piece_count) {
  if (std::isnan(factor[0])) return;
  parallel(piece_count, [&](int64_t p) {
    const Piece& piece = pieces[first_piece + p];
    const Record& r = records[piece.record];
    const int64_t begin = piece.index * kFloats, count = count_of(r, begin);
    const float step = static_cast<float>(scalars->matrix_rate * r.scale);
    const float shrink = static_cast<float>(scalars->matrix_rate * r.weight_decay);
    const float* __restrict from = x + (piece.record - first_matrix) * r.size + begin;
    float* __restrict value = r.value + begin;
    for (int64_t i = 0; i < count; ++i) value[i] -= multiply_add(step, from[i], shrink * value[i]);
  });
}
}
