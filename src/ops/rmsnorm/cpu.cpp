// RMSNorm, forward and backward. The forward keeps 1/rms of every row for the backward.
#include "runtime.h"
#include "simd.h"

namespace {
constexpr int64_t kRows = 16;          // rows of one task
constexpr int64_t kPartialRows = 256;  // rows summed into one partial weight gradient, whatever the thread count
}

extern "C" {

void rmsnorm_forward(const float* x, const float* weight, float* y, float* inverse_rms, int64_t rows, int64_t dim,
                     float epsilon) {
  parallel_chunks(rows, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* xr = x + r * dim;
      float* yr = y + r * dim;
      vec squares = {};
      int64_t i = 0;
      for (; i + kLanes <= dim; i += kLanes) squares = multiply_add(load(xr + i), load(xr + i), squares);
      float total = sum(squares);
      for (; i < dim; ++i) total = multiply_add(xr[i], xr[i], total);
      const float scale = 1.0f / std::sqrt(total / static_cast<float>(dim) + epsilon);
      inverse_rms[r] = scale;
      for (i = 0; i < dim; ++i) yr[i] = xr[i] * scale * weight[i];
    }
  });
}

// dx (+)= ..., and d_weight (+)= sum over rows of dy * x / rms, through partial sums [ceil(rows/256)][dim].
void rmsnorm_backward(const float* x, const float* weight, const float* inverse_rms, const float* dy, float* dx,
                      float* d_weight, float* partial, int64_t rows, int64_t dim, int64_t accumulate_dx,
                      int64_t accumulate_weight) {
  parallel_chunks(rows, kPartialRows, [&](int64_t begin, int64_t end) {
    float* sums = partial + begin / kPartialRows * dim;
    std::memset(sums, 0, sizeof(float) * dim);
    for (int64_t r = begin; r < end; ++r) {
      const float* xr = x + r * dim;
      const float* dyr = dy + r * dim;
      const float scale = inverse_rms[r];
      vec products = {};
      int64_t i = 0;
      for (; i + kLanes <= dim; i += kLanes) products = multiply_add(load(dyr + i) * load(weight + i), load(xr + i), products);
      float inner = sum(products);
      for (; i < dim; ++i) inner = multiply_add(dyr[i] * weight[i], xr[i], inner);
      const float shrink = inner * scale * scale * scale / static_cast<float>(dim);
      for (i = 0; i < dim; ++i) sums[i] = multiply_add(dyr[i] * xr[i], scale, sums[i]);
      if (dx == nullptr) continue;
      float* dxr = dx + r * dim;
      if (accumulate_dx)
        for (i = 0; i < dim; ++i) dxr[i] += multiply_add(dyr[i] * weight[i], scale, -(xr[i] * shrink));
      else
        for (i = 0; i < dim; ++i) dxr[i] = multiply_add(dyr[i] * weight[i], scale, -(xr[i] * shrink));
    }
  });
  if (d_weight == nullptr) return;
  const int64_t partials = (rows + kPartialRows - 1) / kPartialRows;
  for (int64_t i = 0; i < dim; ++i) {
    float total = accumulate_weight ? d_weight[i] : 0.0f;
    for (int64_t p = 0; p < partials; ++p) total += partial[p * dim + i];
    d_weight[i] = total;
  }
}
}
