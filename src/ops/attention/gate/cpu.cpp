// The gate over three branches, and the sums behind its statistics. Rows are (token, head), three values each.
#include <algorithm>
#include <limits>

#include "runtime.h"
#include "simd.h"

namespace {
constexpr int64_t kRows = 1024;         // rows of one task
constexpr int64_t kPartialRows = 4096;  // rows summed into one partial result, whatever the thread count
constexpr int kSums = 9;

// Three values of kLanes rows at a time, transposed so that arithmetic runs across rows. Rows past n read as zero.
struct Triple {
  vec v[3];
};

inline Triple load_rows(const float* p, int64_t n) {
  float lanes[3][kLanes] = {};
  const int count = n < kLanes ? static_cast<int>(n) : kLanes;
  for (int i = 0; i < count; ++i)
    for (int b = 0; b < 3; ++b) lanes[b][i] = p[3 * i + b];
  return {{load(lanes[0]), load(lanes[1]), load(lanes[2])}};
}

template <bool add> inline void store_rows(float* p, const Triple& t, int64_t n) {
  float lanes[3][kLanes];
  for (int b = 0; b < 3; ++b) store(lanes[b], t.v[b]);
  const int count = n < kLanes ? static_cast<int>(n) : kLanes;
  for (int i = 0; i < count; ++i)
    for (int b = 0; b < 3; ++b) p[3 * i + b] = add ? p[3 * i + b] + lanes[b][i] : lanes[b][i];
}

template <bool softmax> inline Triple gate_of(Triple x, vec inverse) {
  for (vec& v : x.v) v *= inverse;
  if (softmax) {
    // Taking the largest away: exp cannot overflow, and the sum is at least 1. A NaN reaches the sum and with it the
    // row.
    const vec most = max(x.v[0], max(x.v[1], x.v[2]));
    for (vec& v : x.v) v = exp(v - most);
    const vec total = splat(1.0f) / (x.v[0] + x.v[1] + x.v[2]);
    for (vec& v : x.v) v *= total;
  } else {
    for (vec& v : x.v) v = splat(1.0f) / (splat(1.0f) + exp(-v));
  }
  return x;
}

template <bool softmax> inline Triple gradient_of(const Triple& g, const Triple& dg, vec inverse) {
  Triple out;
  const vec mean = multiply_add(g.v[2], dg.v[2], multiply_add(g.v[0], dg.v[0], g.v[1] * dg.v[1]));
  for (int b = 0; b < 3; ++b)
    out.v[b] = softmax ? g.v[b] * (dg.v[b] - mean) * inverse : g.v[b] * (splat(1.0f) - g.v[b]) * dg.v[b] * inverse;
  return out;
}

// rows, sum and least of the entropy, sum and greatest of the largest share, collapsed rows, sums of the shares.
struct Sums {
  double value[kSums] = {
      0, 0, std::numeric_limits<double>::infinity(), 0, -std::numeric_limits<double>::infinity(), 0, 0, 0, 0};
  void least(double x) {
    if (x < value[2] || x != x) value[2] = x;  // once NaN, always NaN
  }
  void greatest(double x) {
    if (x > value[4] || x != x) value[4] = x;
  }
};

// The shares of a row's gates, and share log share.
inline void add_row(Sums& sums, const double* share, const double* term) {
  double entropy = 0;
  for (int b = 0; b < 3; ++b)
    if (share[b] != 0) entropy -= term[b];
  double most = share[0];
  for (int b = 1; b < 3; ++b)
    if (share[b] > most) most = share[b];  // one NaN makes all three NaN
  sums.value[0] += 1;
  sums.value[1] += entropy;
  sums.least(entropy);
  sums.value[3] += most;
  sums.greatest(most);
  sums.value[5] += entropy < 0.1 && most > 0.95;
  for (int b = 0; b < 3; ++b) sums.value[6 + b] += share[b];
}

// Shares and logarithms of several rows first, in loops that become vectors.
inline void add_rows(Sums& sums, const float* gates, int64_t rows) {
  constexpr int64_t kSome = 32;
  double share[3 * kSome], term[3 * kSome];
  for (int64_t r0 = 0; r0 < rows; r0 += kSome, gates += 3 * kSome) {
    const int64_t count = std::min(kSome, rows - r0);
    for (int64_t r = 0; r < 3 * count; r += 3) {
      const double total = static_cast<double>(gates[r]) + gates[r + 1] + gates[r + 2];
      for (int64_t i = r; i < r + 3; ++i) share[i] = total == 0 ? 1.0 / 3 : gates[i] / total;
    }
    for (int64_t i = 0; i < 3 * count; ++i) term[i] = share[i] * natural_log(static_cast<float>(share[i]));
    for (int64_t r = 0; r < 3 * count; r += 3) add_row(sums, share + r, term + r);
  }
}
}  // namespace

extern "C" {

void gate_forward(const float* logits, float* gates, int64_t rows, int64_t softmax, float temperature) {
  const vec inverse = splat(1.0f / temperature);
  parallel_chunks(rows, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r += kLanes) {
      const Triple x = load_rows(logits + 3 * r, end - r);
      store_rows<false>(gates + 3 * r, softmax ? gate_of<true>(x, inverse) : gate_of<false>(x, inverse), end - r);
    }
  });
}

void gate_backward(const float* gates, const float* d_gates, float* d_logits, int64_t rows, int64_t softmax,
                   float temperature, int64_t accumulate) {
  const vec inverse = splat(1.0f / temperature);
  parallel_chunks(rows, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r += kLanes) {
      const Triple g = load_rows(gates + 3 * r, end - r), dg = load_rows(d_gates + 3 * r, end - r);
      const Triple dx = softmax ? gradient_of<true>(g, dg, inverse) : gradient_of<false>(g, dg, inverse);
      accumulate ? store_rows<true>(d_logits + 3 * r, dx, end - r) : store_rows<false>(d_logits + 3 * r, dx, end - r);
    }
  });
}

// Logits as columns of a wider matrix: those of token t begin at fused + t * width + column; the bias [3 * heads] is
// added.
void gate_columns_forward(const float* fused, const float* bias, float* gates, int64_t tokens, int64_t heads,
                          int64_t width, int64_t column, int64_t softmax, float temperature) {
  const vec inverse = splat(1.0f / temperature);
  parallel_chunks(tokens, kRows / 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; h += kLanes) {
        Triple x = load_rows(fused + t * width + column + 3 * h, heads - h);
        const Triple more = load_rows(bias + 3 * h, heads - h);
        for (int b = 0; b < 3; ++b) x.v[b] += more.v[b];
        store_rows<false>(gates + 3 * (t * heads + h), softmax ? gate_of<true>(x, inverse) : gate_of<false>(x, inverse),
                          heads - h);
      }
  });
}

// The same columns of d_fused, zeros in the columns behind them, and the bias's gradient (or null). Without d_gates the
// gradient is zero.
void gate_columns_backward(const float* gates, const float* d_gates, float* d_fused, float* d_bias, int64_t tokens,
                           int64_t heads, int64_t width, int64_t column, int64_t softmax, float temperature,
                           int64_t accumulate, int64_t accumulate_bias, float* /* largest: for FP8 */) {
  const vec inverse = splat(1.0f / temperature);
  const int64_t behind = width - column - 3 * heads;
  const auto gradient = [&](int64_t t, int64_t h) -> Triple {
    if (d_gates == nullptr) return {};
    const int64_t at = 3 * (t * heads + h);
    const Triple g = load_rows(gates + at, heads - h), dg = load_rows(d_gates + at, heads - h);
    return softmax ? gradient_of<true>(g, dg, inverse) : gradient_of<false>(g, dg, inverse);
  };
  parallel_chunks(tokens, kRows / 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* to = d_fused + t * width + column;
      for (int64_t h = 0; h < heads; h += kLanes)
        accumulate ? store_rows<true>(to + 3 * h, gradient(t, h), heads - h)
                   : store_rows<false>(to + 3 * h, gradient(t, h), heads - h);
      if (!accumulate) std::memset(to + 3 * heads, 0, sizeof(float) * behind);
    }
  });
  if (d_bias == nullptr) return;
  // Tokens in order, a task for the heads of a vector: the sum does not depend on the threads.
  parallel_chunks((heads + kLanes - 1) / kLanes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin * kLanes; h < end * kLanes && h < heads; h += kLanes) {
      Triple sum = {};
      for (int64_t t = 0; t < tokens; ++t) {
        const Triple one = gradient(t, h);
        for (int b = 0; b < 3; ++b) sum.v[b] += one.v[b];
      }
      accumulate_bias ? store_rows<true>(d_bias + 3 * h, sum, heads - h)
                      : store_rows<false>(d_bias + 3 * h, sum, heads - h);
    }
  });
}

void gate_constant(float* gates, int64_t rows, float cmp, float sel, float win) {
  for (int64_t r = 0; r < rows; ++r) {
    gates[3 * r] = cmp;
    gates[3 * r + 1] = sel;
    gates[3 * r + 2] = win;
  }
}

// sums[9] of all rows through partial [ceil(rows/4096)][9], added in order.
void gate_sums(const float* gates, double* partial, double* sums, int64_t rows) {
  parallel_chunks(rows, kPartialRows, [&](int64_t begin, int64_t end) {
    Sums own;
    add_rows(own, gates + 3 * begin, end - begin);
    std::memcpy(partial + begin / kPartialRows * kSums, own.value, sizeof(own.value));
  });
  Sums all;
  for (int64_t p = 0; p < (rows + kPartialRows - 1) / kPartialRows; ++p) {
    const double* own = partial + p * kSums;
    for (int i = 0; i < kSums; ++i)
      if (i != 2 && i != 4) all.value[i] += own[i];
    all.least(own[2]);
    all.greatest(own[4]);
  }
  std::memcpy(sums, all.value, sizeof(all.value));
}
}
