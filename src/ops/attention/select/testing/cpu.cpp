// `choose` alone, for its test: the blocks that a token at position t selects, given its probabilities.
#include "../../selection.h"

extern "C" void choose_blocks(const float* probability, int32_t* out, int64_t t, SPARSE) {
  const attention::Sparse sparse = {l, d, block, count, init, local, largest, chunked};
  attention::choose(sparse, attention::Pooling(sparse), t, probability, out);
}
