// Embedding: rows copied out of the table, and gradients of rows summed back into it in the order of the tokens.
#include "runtime.h"
#include "simd.h"

namespace {
constexpr int64_t kFloats = 1 << 14;   // floats of one task where order does not matter
constexpr int64_t kColumns = 64;       // columns of one task of the backward: a whole number of cache lines
}

extern "C" {

// first_bad[0] = the first token whose id is not in the table, or -1; nothing is copied when there is one.
void embedding_forward(const float* table, const int32_t* ids, float* y, int32_t* first_bad, int64_t tokens,
                       int64_t vocab, int64_t dim) {
  first_bad[0] = -1;
  for (int64_t t = 0; t < tokens; ++t)
    if (ids[t] < 0 || ids[t] >= vocab) {
      first_bad[0] = static_cast<int32_t>(t);
      return;
    }
  const int64_t rows = dim < kFloats ? kFloats / (dim > 0 ? dim : 1) : 1;
  parallel_chunks(tokens, rows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) std::memcpy(y + t * dim, table + ids[t] * dim, sizeof(float) * dim);
  });
}

// d_table[ids[t]] += dy[t]. Each task owns columns and sees all tokens in order: no two tasks write one number.
void embedding_backward(const int32_t* ids, const float* dy, float* d_table, int64_t tokens, int64_t vocab,
                        int64_t dim, int64_t accumulate) {
  if (!accumulate)
    parallel_chunks(vocab * dim, kFloats, [&](int64_t begin, int64_t end) {
      std::memset(d_table + begin, 0, sizeof(float) * (end - begin));
    });
  parallel_chunks(dim, kColumns, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < tokens; ++t) {
      const float* from = dy + t * dim;
      float* into = d_table + ids[t] * dim;
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes) store(into + i, load(into + i) + load(from + i));
      for (; i < end; ++i) into[i] += from[i];
    }
  });
}
}
