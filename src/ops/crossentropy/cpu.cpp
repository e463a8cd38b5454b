// Cross entropy over rows of logits. A row is read for its maximum and for the sum of its exponentials; the softmax
// exists only as the gradient that is being written.
#include "runtime.h"
#include "simd.h"

namespace {

constexpr int32_t kIgnored = -100;
constexpr int64_t kFloats = 1 << 14;  // logits of one task, or one row if that is longer

// The last n < kLanes numbers of a row; the missing lanes are -inf, which no maximum and no sum of exponentials sees.
inline vec load_tail(const float* p, int64_t n) {
  vec v = splat(-INFINITY);
  std::memcpy(&v, p, static_cast<size_t>(n) * sizeof(float));
  return v;
}

struct RowSum {
  float top;  // largest logit
  float sum;  // of exp(logit - top); NaN if the row holds one
};

inline float row_max(const float* row, int64_t n) {
  vec top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int u = 0; u < 4; ++u) top[u] = max(top[u], load(row + i + u * kLanes));
  for (; i + kLanes <= n; i += kLanes) top[0] = max(top[0], load(row + i));
  if (i < n) top[0] = max(top[0], load_tail(row + i, n - i));
  return max_lane(max(max(top[0], top[1]), max(top[2], top[3])));
}

// With `keep`, exp(logit - top) takes the place of every logit.
template <bool keep, class Row>
inline RowSum row_sum(Row row, int64_t n) {
  const float top = row_max(row, n);
  LaneSums sums;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const vec e = exp(load(row + i) - splat(top));
    if constexpr (keep) store(row + i, e);
    sums.add(e);
  }
  if (i < n) {
    const vec e = exp(load_tail(row + i, n - i) - splat(top));
    if constexpr (keep) store_part(row + i, e, static_cast<int>(n - i));
    sums.add(e);
  }
  return {top, sums.total()};
}

// In float64: the difference of two large numbers is a small loss.
inline float loss_of(RowSum s, float target_logit) {
  return static_cast<float>(natural_log(s.sum) - (static_cast<double>(target_logit) - s.top));
}

template <class Body>
inline void each_row(int64_t rows, int64_t width, const Body& body) {
  parallel_chunks(rows, width < kFloats ? kFloats / (width > 0 ? width : 1) : 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) body(r);
  });
}

}  // namespace

extern "C" {

// inverse_count[0] = 1 / (targets not ignored), 0 if there are none; first_bad[0] = the first target outside the
// vocabulary, or -1.
void crossentropy_count(const int32_t* targets, float* inverse_count, int32_t* first_bad, int64_t tokens,
                        int64_t vocab) {
  int64_t count = 0;
  first_bad[0] = -1;
  for (int64_t t = 0; t < tokens; ++t) {
    if (targets[t] == kIgnored) continue;
    if ((targets[t] < 0 || targets[t] >= vocab) && first_bad[0] < 0) first_bad[0] = static_cast<int32_t>(t);
    ++count;
  }
  inverse_count[0] = count == 0 ? 0.0f : static_cast<float>(1.0 / static_cast<double>(count));
}

// Losses of rows and, unless null, their log-sum-exp; ignored rows are not read and have loss 0.
void crossentropy_forward(const float* logits, const int32_t* targets, float* losses, float* lse, int64_t tokens,
                          int64_t vocab) {
  each_row(tokens, vocab, [&](int64_t t) {
    const bool ignored = targets[t] == kIgnored;
    const float* row = logits + t * vocab;
    const RowSum s = ignored ? RowSum{0.0f, 1.0f} : row_sum<false>(row, vocab);
    losses[t] = ignored ? 0.0f : loss_of(s, row[targets[t]]);
    if (lse != nullptr) lse[t] = static_cast<float>(s.top + natural_log(s.sum));
  });
}

void crossentropy_mean(const float* losses, const float* inverse_count, float* loss, int64_t tokens) {
  double total = 0;
  for (int64_t t = 0; t < tokens; ++t) total += losses[t];
  loss[0] = static_cast<float>(total * inverse_count[0]);
}

// d_logits (+)= (softmax - onehot) * inverse_count * d_loss
void crossentropy_backward(const float* logits, const int32_t* targets, const float* lse, const float* inverse_count,
                           const float* d_loss, float* d_logits, int64_t tokens, int64_t vocab, int64_t accumulate) {
  const float scale = inverse_count[0] * d_loss[0];
  each_row(tokens, vocab, [&](int64_t t) {
    float* out = d_logits + t * vocab;
    if (targets[t] == kIgnored) {
      if (!accumulate) std::memset(out, 0, sizeof(float) * vocab);
      return;
    }
    const float* row = logits + t * vocab;
    int64_t i = 0;
    for (; i + kLanes <= vocab; i += kLanes) {
      const vec slope = exp(load(row + i) - splat(lse[t])) * splat(scale);
      store(out + i, accumulate ? load(out + i) + slope : slope);
    }
    const int rest = static_cast<int>(vocab - i);
    if (rest > 0) {
      const vec slope = exp(load_part(row + i, rest) - splat(lse[t])) * splat(scale);
      store_part(out + i, accumulate ? load_part(out + i, rest) + slope : slope, rest);
    }
    out[targets[t]] -= scale;
  });
}

// Losses of rows, and the gradient for a slope of 1 in place of the logits.
void crossentropy_in_place(float* logits, const int32_t* targets, const float* inverse_count, float* losses,
                           int64_t tokens, int64_t vocab) {
  const float scale = inverse_count[0];
  each_row(tokens, vocab, [&](int64_t t) {
    float* row = logits + t * vocab;
    if (targets[t] == kIgnored) {
      std::memset(row, 0, sizeof(float) * vocab);
      losses[t] = 0;
      return;
    }
    const float target_logit = row[targets[t]];
    const RowSum s = row_sum<true>(row, vocab);
    losses[t] = loss_of(s, target_logit);
    const float share = scale / s.sum;
    int64_t i = 0;
    for (; i + kLanes <= vocab; i += kLanes) store(row + i, load(row + i) * splat(share));
    for (; i < vocab; ++i) row[i] *= share;
    row[targets[t]] -= scale;
  });
}

// into (+)= value * factor[0]
void crossentropy_scale(const float* value, const float* factor, float* into, int64_t count, int64_t accumulate) {
  const vec scale = splat(factor[0]);
  parallel_chunks(count, kFloats, [&](int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const vec scaled = load(value + i) * scale;
      store(into + i, accumulate ? load(into + i) + scaled : scaled);
    }
    for (; i < end; ++i) into[i] = accumulate ? into[i] + value[i] * factor[0] : value[i] * factor[0];
  });
}
}
