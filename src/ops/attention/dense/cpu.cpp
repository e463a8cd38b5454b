// Dense causal attention: token t sees the keys 0 ... t. The baseline that sparse attention is measured against.
#include "../banded.h"

namespace {
struct Causal {
  int64_t low(int64_t) const { return 0; }
  int64_t high(int64_t t) const { return t + 1; }
};
}  // namespace

extern "C" {

void dense_forward(const float* q, const float* k, const float* v, const int32_t* offsets, float* out, float* lse,
                   int64_t sequences, int64_t heads, int64_t groups, int64_t dk, int64_t dv) {
  const attention::Inputs in = {{heads, groups, dk, dv}, q, k, v, offsets, offsets, sequences};
  attention::banded_forward(in, Causal{}, out, lse);
}

void dense_backward(const float* q, const float* k, const float* v, const int32_t* offsets, const float* out,
                    const float* lse, const float* d_out, float* dq, float* d_k, float* d_v, int64_t sequences,
                    int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t accumulate_q, int64_t accumulate_k,
                    int64_t accumulate_v) {
  const attention::Inputs in = {{heads, groups, dk, dv}, q, k, v, offsets, offsets, sequences};
  const attention::Gradients g = {out, lse, d_out, dq, d_k, d_v, accumulate_q != 0, accumulate_k != 0, accumulate_v != 0};
  const int64_t chunk = attention::chunk_size(in, attention::kKeyBlock);
  attention::banded_backward(in, Causal{}, g, chunk, chunk, attention::chunk_count(in, chunk));
}
}
