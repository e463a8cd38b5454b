// The gated sum of three branches. Rows are (token, head): three gates and `size` floats of each branch.
#include "runtime.h"
#include "simd.h"

namespace {
constexpr int64_t kRows = 128;  // rows of one task
}  // namespace

extern "C" {

void combine_forward(const float* gates, const float* cmp, const float* sel, const float* win, float* __restrict out,
                     int64_t rows, int64_t size) {
  parallel_chunks(rows, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const vec a = splat(gates[3 * r]), b = splat(gates[3 * r + 1]), c = splat(gates[3 * r + 2]);
      each_vector(r * size, (r + 1) * size, [&](int64_t i, auto get, auto put) {
        put(out + i, multiply_add(c, get(win + i), multiply_add(a, get(cmp + i), b * get(sel + i))));
      });
    }
  });
}

// d_gates[row][b] (+)= d_out[row] . branch_b[row]
void combine_backward_gates(const float* d_out, const float* cmp, const float* sel, const float* win, float* d_gates,
                            int64_t rows, int64_t size, int64_t accumulate) {
  parallel_chunks(rows, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* branch[3] = {cmp + r * size, sel + r * size, win + r * size};
      for (int b = 0; b < 3; ++b) {
        const float value = dot(d_out + r * size, branch[b], size);
        d_gates[3 * r + b] = accumulate ? d_gates[3 * r + b] + value : value;
      }
    }
  });
}

// d_branch[row] (+)= gates[row][b] * d_out[row]
void combine_backward_branch(const float* d_out, const float* gates, float* __restrict d_branch, int64_t b,
                             int64_t rows, int64_t size, int64_t accumulate) {
  parallel_chunks(rows, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const vec gate = splat(gates[3 * r + b]);
      each_vector(r * size, (r + 1) * size, [&](int64_t i, auto get, auto put) {
        const vec slope = get(d_out + i);
        put(d_branch + i, accumulate ? multiply_add(gate, slope, get(d_branch + i)) : gate * slope);
      });
    }
  });
}
}
