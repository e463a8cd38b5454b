// Sliding-window attention: token t sees the keys t-w+1 ... t, exactly w of them.
#include "../banded.h"

extern "C" {

void window_forward(const attention::AttentionArguments* given, int64_t w) {
  attention::banded_forward(attention::Inputs::of(*given), attention::Window{w}, given->out, given->lse);
}

void window_backward(const attention::AttentionArguments* given, int64_t w) {
  const attention::Inputs in = attention::Inputs::of(*given);
  const attention::Gradients g = attention::Gradients::of(*given);
  // Chunks at least as long as the window: a query reaches its own chunk and the one before, no further.
  const int64_t reach = std::min(w, std::max<int64_t>(attention::longest(in), 1));
  const int64_t unit = attention::kKeyBlock;
  const int64_t chunk = std::max(attention::chunk_size(in, unit), (reach + unit - 1) / unit * unit);
  const int64_t reached = std::min<int64_t>(2, attention::chunk_count(in, chunk));
  attention::banded_backward(in, attention::Window{w}, g, chunk, chunk, reached);
}
}
