// Dense causal attention: token t sees the keys 0 ... t. The baseline that sparse attention is measured against.
#include "../banded.h"

extern "C" {

void dense_forward(const attention::AttentionArguments* given) {
  attention::banded_forward(attention::Inputs::of(*given), attention::Causal{}, given->out, given->lse);
}

void dense_backward(const attention::AttentionArguments* given) {
  const attention::Inputs in = attention::Inputs::of(*given);
  const int64_t chunk = attention::chunk_size(in, attention::kKeyBlock);
  const attention::Gradients g = attention::Gradients::of(*given);
  attention::banded_backward(in, attention::Causal{}, g, chunk, chunk, attention::chunk_count(in, chunk));
}
}
