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
  Address<float> value;
  Address<const float> grad;
  Address<float> momentum;
  Address<void> rounded;  // the bf16 copy that a GPU computes with; here nothing reads one
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
inline vec look_ahead(vec momentum, vec rest, vec average, vec grad) {
  return multiply_add(momentum, average, rest * grad);
}

int64_t count_of(const Record& r, int64_t begin) { return std::min(kFloats, r.size - begin); }

}  // namespace

extern "C" {

// The new average, and norms[matrix] = 1 / (Frobenius norm of the direction + epsilon). Changes nothing where the factor
// is NaN.
void muon_momentum(const Record* records, const Piece* pieces, const float* factor, double* partials, float* norms,
                   int64_t matrices, int64_t piece_count, float momentum) {
  const float scale = factor[0];
  const vec kept = splat(momentum), fresh = splat(1.0f - momentum);
  if (std::isnan(scale)) return;
  parallel(piece_count, [&](int64_t p) {
    const Record& r = records[pieces[p].record];
    const int64_t begin = pieces[p].index * kFloats, count = count_of(r, begin);
    const float* __restrict grad = r.grad + begin;
    float* __restrict average = r.momentum + begin;
    SquareSums squares;
    for (int64_t i = 0; i < count; i += kSquareLanes) {
      float ahead[kSquareLanes] = {};
      each_vector(i, std::min(i + kSquareLanes, count), [&](int64_t j, auto get, auto put) {
        const vec g = get(grad + j) * splat(scale), mean = multiply_add(kept, get(average + j), fresh * g);
        put(average + j, mean);
        put(ahead + (j - i), look_ahead(kept, fresh, mean, g));
      });
      squares.add(ahead);
    }
    partials[p] = squares.total();
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
  const vec scale = splat(factor[0]), kept = splat(momentum), fresh = splat(1.0f - momentum);
  parallel(piece_count, [&](int64_t p) {
    const Piece& piece = pieces[first_piece + p];
    const Record& r = records[piece.record];
    const int64_t begin = piece.index * kFloats, count = count_of(r, begin);
    const float* __restrict grad = r.grad + begin;
    const float* __restrict average = r.momentum + begin;
    float* __restrict to = x + (piece.record - first_matrix) * r.size + begin;
    const vec norm = splat(norms[piece.record]);
    each_vector(0, count, [&](int64_t i, auto get, auto put) {
      put(to + i, look_ahead(kept, fresh, get(average + i), get(grad + i) * scale) * norm);
    });
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
    each_vector(0, count, [&](int64_t i, auto get, auto put) {
      const vec x = get(value + i);
      put(value + i, x - multiply_add(splat(step), get(from + i), splat(shrink) * x));
    });
  });
}
}
