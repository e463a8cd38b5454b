// `choose` alone, for its test: the blocks that a token at position t selects, given its probabilities.
#include "../../selection.h"

extern "C" void choose_blocks(const float* probability, int32_t* out, int64_t t, int64_t l, int64_t d, int64_t block,
                              int64_t count) {
  const attention::Sparse sparse = {l, d, block, count};
  attention::choose(sparse, attention::Pooling(sparse), t, probability, out);
}
