// The choice of blocks from the compressed attention's probabilities: what prefill and decode must do alike.
#pragma once
#include "attention.h"

namespace attention {

// The blocks [0, init) and the last `local` ones, the current one included, are selected whatever their importance is.
struct Sparse {
  int64_t l, d, block, count, init, local;
  int64_t largest;  // 1: a selection block is as important as its most important compressed block
  int64_t chunked;  // 1: half of the slots are for the token's own chunk of `count` blocks; init is 0 and local is 1

  // Blocks [init, candidates(t)) compete for the other slots, with `chunked` those before chunk(t) apart.
  int64_t candidates(int64_t t) const { return t / block - local + 1; }
  int64_t chunk(int64_t t) const { return t / block / count * count; }
  // Compressed blocks that the token at position t sees.
  int64_t visible(int64_t t) const { return t + 1 < l ? 0 : (t + 1 - l) / d + 1; }
};

#define SPARSE \
  int64_t l, int64_t d, int64_t block, int64_t count, int64_t init, int64_t local, int64_t largest, int64_t chunked

// Selection block j overlaps compressed blocks j * block / d - lead and the following weights - 1. The weight of each,
// tokens shared / d, is the same for every j because d divides the block.
struct Pooling {
  int64_t lead, weights;
  float weight[1024];  // op.ts refuses more

  explicit Pooling(const Sparse& sparse) {
    lead = sparse.l / sparse.d - 1;
    weights = lead + sparse.block / sparse.d;
    for (int64_t i = 0; i < weights; ++i) {
      const int64_t begin = (i - lead) * sparse.d, end = begin + sparse.l;
      const int64_t shared = std::min(end, sparse.block) - std::max<int64_t>(begin, 0);
      weight[i] = static_cast<float>(shared) / static_cast<float>(sparse.d);
    }
  }
};

// A candidate block. A higher score is better; among equal scores the lower index.
struct Candidate {
  float score;
  int32_t index;
  bool operator<(const Candidate& other) const {  // better: std heaps then have the worst entry on top
    return score > other.score || (score == other.score && index < other.index);
  }
};

// Keeps the best `room` of the candidates in a heap, so that an offer takes at most log(room) steps.
struct Best {
  int64_t room, count = 0;
  Candidate* entries;  // [room]

  // Indices must rise from offer to offer: among equals the earlier one stays.
  void offer(int32_t index, float score) {
    if (count < room) {
      entries[count++] = {score, index};
      std::push_heap(entries, entries + count);
    } else if (score > entries[0].score) {
      std::pop_heap(entries, entries + count);
      entries[count - 1] = {score, index};
      std::push_heap(entries, entries + count);
    }
  }
};

inline void choose(const Sparse& sparse, const Pooling& pooling, int64_t t, const float* probability, int32_t* out) {
  const int64_t current = t / sparse.block;
  int64_t n = 0;
  if (current + 1 <= sparse.count) {  // fewer blocks than slots: all
    for (; n <= current; ++n) out[n] = static_cast<int32_t>(n);
  } else {
    // Here current >= count >= init + local, so no forced block is both initial and local.
    const int64_t visible = sparse.visible(t), candidates = sparse.candidates(t);
    // Appends the best `room` of the blocks [from, to), ascending.
    const auto take = [&](int64_t from, int64_t to, int64_t room) {
      Best best;
      best.room = room;
      best.entries = scratch<Candidate>(kMembers, sparse.count);
      if (room > 0)
        for (int64_t j = from; j < to; ++j) {
          // A block next to the current one may overlap compressed blocks that the token does not see.
          const int64_t first = j * (sparse.block / sparse.d) - pooling.lead;
          const int64_t begin = std::max<int64_t>(-first, 0), end = std::min(pooling.weights, visible - first);
          float importance = 0;
          for (int64_t i = begin; i < end; ++i) {
            const float p = probability[first + i];
            if (!sparse.largest) importance = multiply_add(pooling.weight[i], p, importance);
            else if (!(p <= importance)) importance = p;  // NaN wins, as in a sum
          }
          best.offer(static_cast<int32_t>(j), importance == importance ? importance : -1.0f);  // NaN ranks last
        }
      const int64_t begin = n;
      for (int64_t i = 0; i < best.count; ++i) out[n++] = best.entries[i].index;
      // A comparison of its own: libc++ calls a library for the usual one, which the kernels in WebAssembly do without.
      std::sort(out + begin, out + n, [](int32_t a, int32_t b) { return a < b; });
    };
    for (; n < sparse.init; ++n) out[n] = static_cast<int32_t>(n);
    if (sparse.chunked) {
      take(0, sparse.chunk(t), sparse.count / 2);
      take(sparse.chunk(t), candidates, sparse.count / 2 - 1);
    } else {
      take(sparse.init, candidates, sparse.count - sparse.init - sparse.local);
    }
    for (int64_t j = candidates; j <= current; ++j) out[n++] = static_cast<int32_t>(j);
  }
  for (; n < sparse.count; ++n) out[n] = -1;
}

}  // namespace attention
