// The elementwise parts of Muon; the products between muon_direction and muon_update are batched matrix products.
// One block for each piece of 2^14 elements of a matrix. DTYPE is the type of directions and updates.
#include "elements.cuh"

constexpr int PIECE = 1 << 14, BLOCK = 256, FINAL = 1024;
constexpr float NORM_EPSILON = 1e-7f;

struct Record {
  i64 size, first_piece;
  float* value;
  const float* grad;
  float* momentum;
  bf16* rounded;
  double weight_decay, scale;
};

// The numbers of a step that the host sends: `Muon.nextStep` lists them in the same order.
struct Scalars {
  float grad_scale, max_norm, step_size, inverse_root_bias, learning_rate, matrix_rate;
};

// A block's piece of a matrix, and body(index, Count<N>) over it, in vectors of four if `wide`.
struct Range {
  i64 begin;
  int count;
};
__device__ __forceinline__ Range range_of(const Record& r, int piece) {
  const i64 begin = (i64)piece * PIECE, left = r.size - begin;
  return {begin, (int)(left < PIECE ? left : PIECE)};
}
template <class Body> __device__ __forceinline__ void each_of_piece(int count, bool wide, const Body& body) {
  const int vectors = wide ? count / 4 : 0;
#pragma unroll 2
  for (int i = threadIdx.x * 4; i < vectors * 4; i += BLOCK * 4) body(i, Count<4>{});
  for (int i = vectors * 4 + threadIdx.x; i < count; i += BLOCK) body(i, Count<1>{});
}

// Nesterov: the average as it will be after one more gradient like this one.
__device__ __forceinline__ float look_ahead(float momentum, float average, float grad) {
  return momentum * average + (1.0f - momentum) * grad;
}

// The new average, and the sum of squares of each piece of the direction. Changes nothing where the factor is NaN.
extern "C" __global__ void __launch_bounds__(BLOCK)
muon_momentum(const Record* records, const int2* pieces, const float* factor, double* partials, float momentum) {
  __shared__ double room[BLOCK / 32];
  const float scale = factor[0];
  if (scale != scale) return;
  const int2 piece = pieces[blockIdx.x];
  const Record r = records[piece.x];
  const Range range = range_of(r, piece.y);
  const float* grad = r.grad + range.begin;
  float* average = r.momentum + range.begin;
  double squares = 0;
  each_of_piece(range.count, aligned(grad) && aligned(average), [&](int i, auto n) {
    constexpr int N = decltype(n)::value;
    float g[N], m[N];
    load(g, grad + i);
    load(m, average + i);
#pragma unroll
    for (int k = 0; k < N; k++) {
      g[k] *= scale;
      m[k] = momentum * m[k] + (1.0f - momentum) * g[k];
      const float ahead = look_ahead(momentum, m[k], g[k]);
      squares += (double)ahead * (double)ahead;
    }
    store(average + i, m);
  });
  squares = block_sum(squares, room);
  if (threadIdx.x == 0) partials[blockIdx.x] = squares;
}

// norms[matrix] = 1 / (Frobenius norm of its direction + epsilon), a warp for each.
extern "C" __global__ void __launch_bounds__(FINAL)
muon_norms(const Record* records, const double* partials, float* norms, i64 matrices) {
  const i64 matrix = (i64)blockIdx.x * (FINAL / 32) + threadIdx.x / 32;
  if (matrix >= matrices) return;
  const i64 first = records[matrix].first_piece, count = (records[matrix].size + PIECE - 1) / PIECE;
  double squares = 0;
  for (i64 p = threadIdx.x % 32; p < count; p += 32) squares += partials[first + p];
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) norms[matrix] = 1.0f / ((float)sqrt(squares) + NORM_EPSILON);
}

// x [matrices of the batch][size] = direction / norm
extern "C" __global__ void __launch_bounds__(BLOCK)
muon_direction(const Record* records, const int2* pieces, const float* factor, const float* norms, DTYPE* x,
               i64 first_matrix, i64 first_piece, float momentum) {
  const float scale = factor[0];
  const int2 piece = pieces[first_piece + blockIdx.x];
  const Record r = records[piece.x];
  const Range range = range_of(r, piece.y);
  const float norm = norms[piece.x];
  const float *grad = r.grad + range.begin, *average = r.momentum + range.begin;
  DTYPE* to = x + (piece.x - first_matrix) * r.size + range.begin;
  each_of_piece(range.count, aligned(grad) && aligned(average) && aligned(to), [&](int i, auto n) {
    constexpr int N = decltype(n)::value;
    float g[N], m[N];
    load(g, grad + i);
    load(m, average + i);
#pragma unroll
    for (int k = 0; k < N; k++) m[k] = look_ahead(momentum, m[k], g[k] * scale) * norm;
    store(to + i, m);
  });
}

// value -= rate * (scale * x + weight_decay * value), and its rounded copy. Changes nothing where the factor is NaN.
extern "C" __global__ void __launch_bounds__(BLOCK)
muon_update(const Record* records, const int2* pieces, const Scalars* scalars, const float* factor, const DTYPE* x,
            i64 first_matrix, i64 first_piece) {
  const float usable = factor[0];
  if (usable != usable) return;
  const int2 piece = pieces[first_piece + blockIdx.x];
  const Record r = records[piece.x];
  const Range range = range_of(r, piece.y);
  const float step = (float)(scalars->matrix_rate * r.scale), shrink = (float)(scalars->matrix_rate * r.weight_decay);
  float* value = r.value + range.begin;
  bf16* rounded = r.rounded == nullptr ? r.rounded : r.rounded + range.begin;
  const DTYPE* from = x + (piece.x - first_matrix) * r.size + range.begin;
  each_of_piece(range.count, aligned(value) && aligned(rounded) && aligned(from), [&](int i, auto n) {
    constexpr int N = decltype(n)::value;
    float w[N], u[N];
    load(w, value + i);
    load(u, from + i);
#pragma unroll
    for (int k = 0; k < N; k++) w[k] -= step * u[k] + shrink * w[k];
    store(value + i, w);
    if (rounded != nullptr) store(rounded + i, w);
  });
}
