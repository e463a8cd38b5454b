// Attention over compressed blocks: token t sees the blocks that end at or before it, i*d + l - 1 <= t.
#include "../banded.h"

extern "C" {

void compressed_forward(const attention::AttentionArguments* given, int64_t l, int64_t d) {
  attention::banded_forward(attention::Inputs::of(*given), attention::Finished{l, d}, given->out, given->lse);
}

void compressed_backward(const attention::AttentionArguments* given, int64_t l, int64_t d) {
  const attention::Inputs in = attention::Inputs::of(*given);
  const attention::Gradients g = attention::Gradients::of(*given);
  // Block i starts at token i*d: with chunk = d * key_chunk a block is never seen from an earlier query chunk.
  const int64_t chunk = attention::chunk_size(in, attention::kKeyBlock * d);
  attention::banded_backward(in, attention::Finished{l, d}, g, chunk, chunk / d, attention::chunk_count(in, chunk));
}
}
