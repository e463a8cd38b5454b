// Attention over compressed blocks: token t sees the blocks that end at or before it, i*d + l - 1 <= t.
#include "../banded.h"

namespace {
struct Finished {
  int64_t l, d;
  int64_t low(int64_t) const { return 0; }
  int64_t high(int64_t t) const { return t + 1 < l ? 0 : (t + 1 - l) / d + 1; }
};
}  // namespace

extern "C" {

void compressed_forward(const float* q, const float* k, const float* v, const int32_t* offsets,
                        const int32_t* key_offsets, float* out, float* lse, int64_t sequences, int64_t heads,
                        int64_t groups, int64_t dk, int64_t dv, int64_t l, int64_t d) {
  const attention::Inputs in = {{heads, groups, dk, dv}, q, k, v, offsets, key_offsets, sequences};
  attention::banded_forward(in, Finished{l, d}, out, lse);
}

void compressed_backward(const float* q, const float* k, const float* v, const int32_t* offsets,
                         const int32_t* key_offsets, const float* out, const float* lse, const float* d_out, float* dq,
                         float* d_k, float* d_v, int64_t sequences, int64_t heads, int64_t groups, int64_t dk,
                         int64_t dv, int64_t accumulate_q, int64_t accumulate_k, int64_t accumulate_v, int64_t l,
                         int64_t d) {
  const attention::Inputs in = {{heads, groups, dk, dv}, q, k, v, offsets, key_offsets, sequences};
  const attention::Gradients g = {out, lse, d_out, dq, d_k, d_v, accumulate_q != 0, accumulate_k != 0, accumulate_v != 0};
  // Block i starts at token i*d: with chunk = d * key_chunk a block is never seen from an earlier query chunk.
  const int64_t chunk = attention::chunk_size(in, attention::kKeyBlock * d);
  attention::banded_backward(in, Finished{l, d}, g, chunk, chunk / d, attention::chunk_count(in, chunk));
}
}
