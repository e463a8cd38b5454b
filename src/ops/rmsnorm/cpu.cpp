// RMSNorm, forward and backward. The forward keeps 1/rms of every row for the backward.
#include "rows.h"

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
      const float scale = 1.0f / std::sqrt(dot(xr, xr, dim) / static_cast<float>(dim) + epsilon);
      inverse_rms[r] = scale;
      for (int64_t i = 0; i < dim; ++i) yr[i] = xr[i] * scale * weight[i];
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
      LaneSums products;
      each_vector(0, dim, [&](int64_t i, auto get, auto) { products.add_products(get(dyr + i) * get(weight + i), get(xr + i)); });
      const float shrink = products.total() * scale * scale * scale / static_cast<float>(dim);
      float* dxr = dx == nullptr ? nullptr : dx + r * dim;
      each_vector(0, dim, [&](int64_t i, auto get, auto put) {
        const vec slope = get(dyr + i), value = get(xr + i);
        put(sums + i, multiply_add(slope * value, splat(scale), get(sums + i)));
        if (dxr == nullptr) return;
        const vec back = multiply_add(slope * get(weight + i), splat(scale), -(value * splat(shrink)));
        put(dxr + i, accumulate_dx ? get(dxr + i) + back : back);
      });
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
