// Attention of new tokens over cached keys and values in pages.
//
// A page holds one block of keys of every layer: per group the keys as columns [dk][pad(size)], as scores need them,
// then per group the values as rows [size][pad(dv)]. Keys are worked through in the blocks and the order of the kernels
// that take whole sequences, by the same code: a token's output is bit for bit what a prefill would have given it.
#include "../../banded.h"
#include "../../selection.h"

namespace {

using namespace attention;

// Keys and values of one layer. tables[s] is the address of sequence s's table of pages; 0 in it is no page.
struct Pages {
  const Address<const Address<float>>* tables;
  int64_t place;  // of the layer in a page, in floats
  int64_t size;   // keys of a page

  float* page(int64_t sequence, int64_t index) const {
    float* base = tables[sequence][index];
    return base == nullptr ? nullptr : base + place;
  }
  float* keys(float* page, const Shape& shape, int64_t group) const { return page + group * shape.dk * pad(size); }
  float* values(float* page, const Shape& shape, int64_t group) const {
    return page + shape.groups * shape.dk * pad(size) + group * size * pad(shape.dv);
  }
};

// New tokens [offsets[s], offsets[s+1]) of sequence s stand at positions starts[s] and on.
struct Tokens {
  const int32_t *offsets, *starts;
  int64_t sequences;
  int64_t count() const { return offsets[sequences]; }
  int64_t sequence(int64_t t) const { return std::upper_bound(offsets, offsets + sequences + 1, t) - offsets - 1; }
  int64_t position(int64_t t, int64_t s) const { return starts[s] + t - offsets[s]; }
};

// One token's rows of one group while they see keys block by block.
struct Rows {
  const Shape& shape;
  int64_t h;
  float* query;
  Softmax state;
  Buffers buffers;
  int64_t seen = 0;

  Rows(const Shape& of, const float* q, int64_t t, int64_t g, int64_t size) : shape(of), h(of.per_group()) {
    const int64_t dk_width = pad(shape.dk), dv_width = pad(shape.dv);
    query = scratch<float>(kQuery, h * dk_width);
    gather_rows(q + (t * shape.heads + g * h) * shape.dk, h, shape.dk, shape.scale() * kLog2E, query);
    float* row_state = scratch<float>(kRows, h * (1 + kSumLanes));
    state = {row_state, row_state + h, scratch<float>(kAccumulator, h * dv_width)};
    buffers = {scratch<float>(kScores, h * pad(size)), scratch<float>(kProducts, h * dv_width)};
    reset(state, h, dv_width);
  }

  void see(const Pages& pages, int64_t s, int64_t g, int64_t index, int64_t low, int64_t high) {
    float* page = pages.page(s, index);
    forward_block(shape, h, query, pages.keys(page, shape, g), pad(pages.size), pages.values(page, shape, g), low, high,
                  nullptr, nullptr, state, buffers);
    seen += high - low;
  }

  // Keys [k0 + low, k0 + high) out of pages that are not the blocks of a prefill: copied into such a block first.
  void see_copied(const Pages& pages, int64_t s, int64_t g, int64_t k0, int64_t low, int64_t high) {
    const int64_t width = pad(kKeyBlock), page_width = pad(pages.size), dv_width = pad(shape.dv);
    float* keys = scratch<float>(kGradKeys, shape.dk * width);
    float* values = scratch<float>(kGradValues, kKeyBlock * dv_width);
    for (int64_t at = low; at < high;) {
      float* page = pages.page(s, (k0 + at) / pages.size);
      const int64_t from = (k0 + at) % pages.size, count = std::min(pages.size - from, high - at);
      for (int64_t c = 0; c < shape.dk; ++c)
        std::memcpy(keys + c * width + at, pages.keys(page, shape, g) + c * page_width + from, sizeof(float) * count);
      std::memcpy(values + at * dv_width, pages.values(page, shape, g) + from * dv_width,
                  sizeof(float) * count * dv_width);
      at += count;
    }
    forward_block(shape, h, query, keys, width, values, low, high, nullptr, nullptr, state, buffers);
    seen += high - low;
  }

  void finish(int64_t t, int64_t g, float* out, float* lse, int32_t* reads) const {
    const int64_t at = t * shape.heads + g * h;
    finish_rows(shape, state, 0, h, out + at * shape.dv, lse + at);
    if (reads != nullptr) reads[t * shape.groups + g] = static_cast<int32_t>(seen);
  }
};

template <class Body> void for_each_row(const Tokens& tokens, int64_t groups, const Body& body) {
  const int64_t count = tokens.count();
  // The last tokens see most: they come first, so that threads end together.
  parallel(count * groups, [&](int64_t index) {
    const int64_t t = count - 1 - index / groups, s = tokens.sequence(t);
    body(t, index % groups, s, tokens.position(t, s));
  });
}

template <class Visible> void banded(const float* q, const Pages& pages, const Tokens& tokens, const Shape& shape,
                                     const Visible& visible, float* out, float* lse, int32_t* reads) {
  for_each_row(tokens, shape.groups, [&](int64_t t, int64_t g, int64_t s, int64_t position) {
    Rows rows(shape, q, t, g, kKeyBlock);
    const int64_t low = visible.low(position), high = visible.high(position);
    for (int64_t j = low / kKeyBlock; j * kKeyBlock < high; ++j) {
      const int64_t k0 = j * kKeyBlock, first = std::max<int64_t>(low - k0, 0), end = std::min(high - k0, kKeyBlock);
      // If the branches share keys, the pages are selection blocks.
      if (pages.size == kKeyBlock) rows.see(pages, s, g, j, first, end);
      else rows.see_copied(pages, s, g, k0, first, end);
    }
    rows.finish(t, g, out, lse, reads);
  });
}

}  // namespace

#define TOKENS const int32_t *offsets, const int32_t *starts, int64_t sequences
#define PAGES const Address<const Address<float>> *tables, int64_t place, int64_t size
#define HEADS int64_t heads, int64_t groups, int64_t dk, int64_t dv

extern "C" {

// Sizes that the layout of a page depends on and that differ between machines: keys of a block, padding of rows.
void paged_sizes(int32_t* sizes) {
  sizes[0] = static_cast<int32_t>(kKeyBlock);
  sizes[1] = kPad;
}

// Writes k [T][groups][dk] and v [T][groups][dv] to where they belong; tokens without a page are passed over.
void paged_store(const float* k, const float* v, PAGES, TOKENS, HEADS) {
  const Shape shape = {heads, groups, dk, dv};
  const Pages pages = {tables, place, size};
  const Tokens tokens = {offsets, starts, sequences};
  const int64_t width = pad(size), dv_width = pad(dv);
  parallel_chunks(tokens.count(), 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t s = tokens.sequence(t), position = tokens.position(t, s), i = position % size;
      float* page = pages.page(s, position / size);
      if (page == nullptr) continue;
      for (int64_t g = 0; g < groups; ++g) {
        const float* key = k + (t * groups + g) * dk;
        float* column = pages.keys(page, shape, g) + i;
        for (int64_t c = 0; c < dk; ++c) column[c * width] = key[c];
        std::memcpy(pages.values(page, shape, g) + i * dv_width, v + (t * groups + g) * dv, sizeof(float) * dv);
      }
    }
  });
}

// k [T][groups][dk] and v [T][groups][dv] out of the pages; zeros for tokens without a page.
void paged_load(float* k, float* v, PAGES, TOKENS, HEADS) {
  const Shape shape = {heads, groups, dk, dv};
  const Pages pages = {tables, place, size};
  const Tokens tokens = {offsets, starts, sequences};
  const int64_t width = pad(size), dv_width = pad(dv);
  parallel_chunks(tokens.count(), 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t s = tokens.sequence(t), position = tokens.position(t, s), i = position % size;
      float* page = pages.page(s, position / size);
      for (int64_t g = 0; g < groups; ++g) {
        float* key = k + (t * groups + g) * dk;
        float* value = v + (t * groups + g) * dv;
        if (page == nullptr) {
          std::fill(key, key + dk, 0.0f);
          std::fill(value, value + dv, 0.0f);
          continue;
        }
        const float* column = pages.keys(page, shape, g) + i;
        for (int64_t c = 0; c < dk; ++c) key[c] = column[c * width];
        std::memcpy(value, pages.values(page, shape, g) + i * dv_width, sizeof(float) * dv);
      }
    }
  });
}

// joined = the raw rows kept of a sequence, then its new rows x [T][width].
void paged_join(const float* x, float* joined, const int32_t* joined_offsets, PAGES, TOKENS, int64_t width) {
  const Pages tails = {tables, place, size};
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t fresh = offsets[s + 1] - offsets[s], kept = joined_offsets[s + 1] - joined_offsets[s] - fresh;
    float* to = joined + joined_offsets[s] * width;
    if (kept > 0) std::memcpy(to, tails.page(s, 0), sizeof(float) * kept * width);
    std::memcpy(to + kept * width, x + offsets[s] * width, sizeof(float) * fresh * width);
  }
  (void)starts;
}

// Keeps the rows of `joined` from done[s] on: those that blocks to come still need.
void paged_keep(const float* joined, const int32_t* joined_offsets, const int32_t* done, PAGES, TOKENS, int64_t width) {
  const Pages tails = {tables, place, size};
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t first = joined_offsets[s] + done[s];
    std::memcpy(tails.page(s, 0), joined + first * width, sizeof(float) * (joined_offsets[s + 1] - first) * width);
  }
  (void)offsets, (void)starts;
}

void paged_window(const float* q, float* out, float* lse, int32_t* reads, PAGES, TOKENS, HEADS, int64_t w) {
  const attention::Window window{w};
  banded(q, {tables, place, size}, {offsets, starts, sequences}, {heads, groups, dk, dv}, window, out, lse, reads);
}

// Attention over the compressed keys, and the blocks that it selects: the scores that attention computed are kept for
// it.
void paged_compressed(const float* q, float* out, float* lse, int32_t* reads, int32_t* selected, PAGES, TOKENS, HEADS,
                      SPARSE) {
  const Shape shape = {heads, groups, dk, dv};
  const Pages pages = {tables, place, size};
  const Sparse sparse = {l, d, block, count, init, local, largest, chunked};
  const Pooling pooling(sparse);
  const int64_t h = shape.per_group(), width = pad(size);
  for_each_row({offsets, starts, sequences}, groups, [&](int64_t t, int64_t g, int64_t s, int64_t position) {
    Rows rows(shape, q, t, g, size);
    const int64_t high = attention::Finished{l, d}.high(position);
    // Only blocks before the local ones can be chosen; where all are taken nothing needs a score.
    const bool needed = position / block + 1 > count;
    const int64_t last = needed ? std::min(sparse.candidates(position) * (block / d), high) : 0;
    const int64_t stride = (last + size - 1) / size * size + width;
    float* kept = needed ? scratch<float>(kGradScores, h * stride) : nullptr;
    rows.buffers.kept_stride = stride;
    for (int64_t k0 = 0; k0 < high; k0 += size) {
      rows.buffers.kept = k0 < last ? kept + k0 : nullptr;
      rows.see(pages, s, g, k0 / size, 0, std::min(high - k0, size));
    }
    rows.finish(t, g, out, lse, reads);
    float* probability = scratch<float>(kAccumulator, last + width);
    const float* row_lse = lse + t * heads + g * h;
    for (int64_t c = 0; c < last; c += kLanes) {
      vec total = {};
      for (int64_t r = 0; r < h; ++r) total += exp2(load(kept + r * stride + c) - splat(row_lse[r] * kLog2E));
      store(probability + c, total);
    }
    choose(sparse, pooling, position, probability, selected + (t * groups + g) * count);
  });
}

void paged_selected(const float* q, const int32_t* selected, float* out, float* lse, int32_t* reads, PAGES, TOKENS,
                    HEADS, int64_t count) {
  const Shape shape = {heads, groups, dk, dv};
  const Pages pages = {tables, place, size};
  for_each_row({offsets, starts, sequences}, groups, [&](int64_t t, int64_t g, int64_t s, int64_t position) {
    Rows rows(shape, q, t, g, size);
    const int32_t* chosen = selected + (t * groups + g) * count;
    for (int64_t n = 0; n < count && chosen[n] >= 0; ++n)
      rows.see(pages, s, g, chosen[n], 0, std::min(position + 1 - chosen[n] * size, size));
    rows.finish(t, g, out, lse, reads);
  });
}
}
