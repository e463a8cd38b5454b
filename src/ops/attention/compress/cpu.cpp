// Compression of blocks of tokens, and the unfolding of blocks for the mlp. Rows are [groups * size] = width floats.
//
// Blocks overlap, so a token's gradient has several terms: it is gathered token by token, from the lowest block up.
// Sums over blocks (weights, position embedding) go through partial sums of 64 blocks, added in order.
#include <algorithm>

#include "runtime.h"
#include "simd.h"

namespace {
constexpr int64_t kBlocks = 16;         // output rows of one task
constexpr int64_t kTokens = 32;         // tokens of one task
constexpr int64_t kPartialBlocks = 64;  // blocks summed into one partial gradient, whatever the thread count

struct Layout {
  const int32_t *offsets, *block_offsets;
  int64_t sequences, tokens, blocks, l, d, width;

  // Calls body(block, first token of the block) for the blocks [begin, end).
  template <class Body> void each_block(int64_t begin, int64_t end, const Body& body) const {
    int64_t s = std::upper_bound(block_offsets, block_offsets + sequences + 1, begin) - block_offsets - 1;
    for (int64_t i = begin; i < end; ++i) {
      while (block_offsets[s + 1] <= i) ++s;
      body(i, offsets[s] + (i - block_offsets[s]) * d);
    }
  }

  // Calls body(token, lowest block, block after the highest, place of the token in the lowest block).
  template <class Body> void each_token(int64_t begin, int64_t end, const Body& body) const {
    int64_t s = std::upper_bound(offsets, offsets + sequences + 1, begin) - offsets - 1;
    for (int64_t t = begin; t < end; ++t) {
      while (offsets[s + 1] <= t) ++s;
      const int64_t position = t - offsets[s], count = block_offsets[s + 1] - block_offsets[s];
      const int64_t low = position < l ? 0 : (position - l) / d + 1;
      const int64_t high = std::min(count, position / d + 1);
      body(t, block_offsets[s] + low, block_offsets[s] + std::max(low, high), position - low * d);
    }
  }
};

template <class Body> inline void each_vector(int64_t width, const Body& body) {
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) body(c, kLanes);
  if (c < width) body(c, static_cast<int>(width - c));
}
inline vec load_up_to(const float* p, int n) { return n == kLanes ? load(p) : load_part(p, n); }
inline void store_up_to(float* p, vec v, int n) { n == kLanes ? store(p, v) : store_part(p, v, n); }

// total[i] (+)= partial[0][i] + partial[1][i] + ... in order, for count numbers.
void add_partials(const float* partial, int64_t partials, float* total, int64_t count, int64_t accumulate) {
  parallel_chunks(count, 1024, [&](int64_t begin, int64_t end) {
    if (!accumulate) std::memset(total + begin, 0, sizeof(float) * (end - begin));
    for (int64_t p = 0; p < partials; ++p)
      for (int64_t i = begin; i < end; ++i) total[i] += partial[p * count + i];
  });
}
}  // namespace

#define LAYOUT_PARAMETERS                                                                                             \
  const int32_t *offsets, const int32_t *block_offsets, int64_t sequences, int64_t tokens, int64_t blocks, int64_t l, \
      int64_t d, int64_t width
#define LAYOUT const Layout layout = {offsets, block_offsets, sequences, tokens, blocks, l, d, width}

extern "C" {

// y[block] = sum over p of weight[p] * x[first + p]; without weights the mean.
void compress_forward(const float* x, const float* weight, float* y, LAYOUT_PARAMETERS) {
  LAYOUT;
  const vec mean = splat(1.0f / static_cast<float>(l));
  parallel_chunks(blocks, kBlocks, [&](int64_t begin, int64_t end) {
    layout.each_block(begin, end, [&](int64_t i, int64_t first) {
      const float* rows = x + first * width;
      each_vector(width, [&](int64_t c, int n) {
        vec total = {};
        if (weight != nullptr)
          for (int64_t p = 0; p < l; ++p)
            total = multiply_add(load_up_to(weight + p * width + c, n), load_up_to(rows + p * width + c, n), total);
        else
          for (int64_t p = 0; p < l; ++p) total += load_up_to(rows + p * width + c, n);
        store_up_to(y + i * width + c, weight != nullptr ? total : total * mean, n);
      });
    });
  });
}

// dx[token] (+)= sum over its blocks of weight[place] * dy[block].
void compress_backward_input(const float* dy, const float* weight, float* dx, LAYOUT_PARAMETERS, int64_t accumulate) {
  LAYOUT;
  const vec mean = splat(1.0f / static_cast<float>(l));
  parallel_chunks(tokens, kTokens, [&](int64_t begin, int64_t end) {
    layout.each_token(begin, end, [&](int64_t t, int64_t low, int64_t high, int64_t place) {
      each_vector(width, [&](int64_t c, int n) {
        vec total = {};
        for (int64_t i = low, p = place; i < high; ++i, p -= d) {
          const vec w = weight != nullptr ? load_up_to(weight + p * width + c, n) : mean;
          total = multiply_add(w, load_up_to(dy + i * width + c, n), total);
        }
        float* to = dx + t * width + c;
        store_up_to(to, accumulate ? load_up_to(to, n) + total : total, n);
      });
    });
  });
}

// d_weight[p] (+)= sum over blocks of dy[block] * x[first + p].
void compress_backward_weight(const float* dy, const float* x, float* d_weight, float* partial, LAYOUT_PARAMETERS,
                              int64_t accumulate) {
  LAYOUT;
  parallel_chunks(blocks, kPartialBlocks, [&](int64_t begin, int64_t end) {
    int64_t first_token[kPartialBlocks];
    layout.each_block(begin, end, [&](int64_t i, int64_t first) { first_token[i - begin] = first; });
    float* sums = partial + begin / kPartialBlocks * l * width;
    for (int64_t p = 0; p < l; ++p)
      each_vector(width, [&](int64_t c, int n) {
        vec total = {};
        for (int64_t i = begin; i < end; ++i)
          total = multiply_add(load_up_to(dy + i * width + c, n),
                               load_up_to(x + (first_token[i - begin] + p) * width + c, n), total);
        store_up_to(sums + p * width + c, total, n);
      });
  });
  add_partials(partial, (blocks + kPartialBlocks - 1) / kPartialBlocks, d_weight, l * width, accumulate);
}

// out[block][group][p][size] = x[first + p][group][size] + position[p][group][size].
void unfold_forward(const float* x, const float* position, float* out, LAYOUT_PARAMETERS, int64_t groups) {
  LAYOUT;
  const int64_t size = width / groups;
  parallel_chunks(blocks, kBlocks, [&](int64_t begin, int64_t end) {
    layout.each_block(begin, end, [&](int64_t i, int64_t first) {
      for (int64_t g = 0; g < groups; ++g)
        for (int64_t p = 0; p < l; ++p) {
          const float* from = x + (first + p) * width + g * size;
          const float* add = position + p * width + g * size;
          float* to = out + ((i * groups + g) * l + p) * size;
          for (int64_t c = 0; c < size; ++c) to[c] = from[c] + add[c];
        }
    });
  });
}

// dx[token] (+)= sum over its blocks of d_out at its place in the block.
void unfold_backward_input(const float* d_out, float* dx, LAYOUT_PARAMETERS, int64_t groups, int64_t accumulate) {
  LAYOUT;
  const int64_t size = width / groups;
  parallel_chunks(tokens, kTokens, [&](int64_t begin, int64_t end) {
    layout.each_token(begin, end, [&](int64_t t, int64_t low, int64_t high, int64_t place) {
      for (int64_t g = 0; g < groups; ++g) {
        float* to = dx + t * width + g * size;
        if (!accumulate) std::memset(to, 0, sizeof(float) * size);
        for (int64_t i = low, p = place; i < high; ++i, p -= d) {
          const float* from = d_out + ((i * groups + g) * l + p) * size;
          for (int64_t c = 0; c < size; ++c) to[c] += from[c];
        }
      }
    });
  });
}

// d_position[p] (+)= sum over blocks of d_out.
void unfold_backward_position(const float* d_out, float* d_position, float* partial, LAYOUT_PARAMETERS, int64_t groups,
                              int64_t accumulate) {
  const int64_t size = width / groups;
  (void)offsets, (void)block_offsets, (void)sequences, (void)tokens, (void)d;
  parallel_chunks(blocks, kPartialBlocks, [&](int64_t begin, int64_t end) {
    float* sums = partial + begin / kPartialBlocks * l * width;
    std::memset(sums, 0, sizeof(float) * l * width);
    for (int64_t i = begin; i < end; ++i)
      for (int64_t g = 0; g < groups; ++g)
        for (int64_t p = 0; p < l; ++p) {
          const float* from = d_out + ((i * groups + g) * l + p) * size;
          float* to = sums + p * width + g * size;
          for (int64_t c = 0; c < size; ++c) to[c] += from[c];
        }
  });
  add_partials(partial, (blocks + kPartialBlocks - 1) / kPartialBlocks, d_position, l * width, accumulate);
}
}
