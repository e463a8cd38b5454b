// Sliding-window attention: token t sees the keys t-w+1 ... t, exactly w of them.
#include "../banded.h"

namespace {
struct Window {
  int64_t w;
  int64_t low(int64_t t) const { return t - w + 1 > 0 ? t - w + 1 : 0; }
  int64_t high(int64_t t) const { return t + 1; }
};
}  // namespace

extern "C" {

void window_forward(const float* q, const float* k, const float* v, const int32_t* offsets, float* out, float* lse,
                    int64_t sequences, int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t w) {
  const attention::Inputs in = {{heads, groups, dk, dv}, q, k, v, offsets, offsets, sequences};
  attention::banded_forward(in, Window{w}, out, lse);
}

void window_backward(const float* q, const float* k, const float* v, const int32_t* offsets, const float* out,
                     const float* lse, const float* d_out, float* dq, float* d_k, float* d_v, int64_t sequences,
                     int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t accumulate_q, int64_t accumulate_k,
                     int64_t accumulate_v, int64_t w) {
  const attention::Inputs in = {{heads, groups, dk, dv}, q, k, v, offsets, offsets, sequences};
  const attention::Gradients g = {out, lse, d_out, dq, d_k, d_v, accumulate_q != 0, accumulate_k != 0, accumulate_v != 0};
  // Chunks at least as long as the window: a query reaches its own chunk and the one before, no further.
  const int64_t reach = std::min(w, std::max<int64_t>(attention::longest(in), 1));
  const int64_t unit = attention::kKeyBlock;
  const int64_t chunk = std::max(attention::chunk_size(in, unit), (reach + unit - 1) / unit * unit);
  attention::banded_backward(in, Window{w}, g, chunk, chunk, std::min<int64_t>(2, attention::chunk_count(in, chunk)));
}
}
