// The scorer loss: the KL divergence between the attention that the selected branch gave the blocks a token chose, and
// the importance by which they were chosen, both as shares among these blocks. Its gradient reaches the scores of the
// compressed branch; the selected branch's attention is a constant.
#include "../banded.h"
#include "../selection.h"

using namespace attention;

namespace {

// Less importance counts as this much, without a gradient: the logarithm stays finite.
constexpr float kLeast = 1e-20f;

// The slots of a token that hold blocks chosen by score.
struct Chosen {
  int64_t begin = 0, end = 0;

  Chosen(const Sparse& sparse, int64_t t, const int32_t* selected) {
    const int64_t candidates = sparse.candidates(t);
    while (begin < sparse.count && selected[begin] >= 0 && selected[begin] < sparse.init) ++begin;
    end = begin;
    while (end < sparse.count && selected[end] >= 0 && selected[end] < candidates) ++end;
  }
  int64_t count() const { return end - begin; }
};

// Compressed blocks that overlap a selection block and are visible: [first + begin, first + end).
struct Overlap {
  int64_t first, begin, end;

  Overlap(const Sparse& sparse, const Pooling& pooling, int64_t t, int64_t block) {
    first = block * (sparse.block / sparse.d) - pooling.lead;
    begin = std::max<int64_t>(-first, 0);
    end = std::min(pooling.weights, sparse.visible(t) - first);
  }
};

// With fewer heads than this most lanes are empty: the numbers of a key fill them better, one head at a time.
constexpr int64_t kFewHeads = 4;

// Importance of the blocks that one token of one group chose: in all, and by head.
struct Importance {
  const Sparse& sparse;
  const Pooling& pooling;
  int64_t h, dk, key_stride;
  float scale;
  int64_t lanes = pad(h), places = pad(sparse.count * pooling.weights);
  float* query = scratch<float>(kQuery, dk * lanes);  // [dk][lanes], a head in each lane
  float* scores = scratch<float>(kScores, std::max(pooling.weights * lanes, 2 * places));
  float* log_sums = scratch<float>(kRows, lanes + sparse.count * (1 + lanes));
  float *all = log_sums + lanes, *of_head = all + sparse.count;  // [count], [count][lanes]

  Importance(const Sparse& sparse, const Pooling& pooling, const Shape& shape)
      : sparse(sparse),
        pooling(pooling),
        h(shape.per_group()),
        dk(shape.dk),
        key_stride(shape.groups * shape.dk),
        scale(shape.scale() * kLog2E) {
    std::memset(query, 0, sizeof(float) * dk * lanes);
    // A lane without a head has probability 0.
    std::fill(log_sums, log_sums + lanes, std::numeric_limits<float>::infinity());
  }

  // `q` [h][dk] and `lse` [h] of the token; `keys`: those of its sequence and group.
  void compute(const float* q, const float* lse, const float* keys, int64_t t, const int32_t* blocks, Chosen chosen) {
    for (int64_t r = 0; r < h; ++r) log_sums[r] = lse[r] * kLog2E;
    std::fill(all, all + sparse.count, 0.0f);
    if (h < kFewHeads)
      for (int64_t r = 0; r < h; ++r) add_head(q + r * dk, r, keys, t, blocks, chosen);
    else
      add_heads(q, keys, t, blocks, chosen);
  }

 private:
  // The scores of all blocks together, so that one vector holds several.
  void add_head(const float* q, int64_t r, const float* keys, int64_t t, const int32_t* blocks, Chosen chosen) {
    float* weights = scores + places;
    std::fill(scores, scores + 2 * places, 0.0f);
    for (int64_t n = chosen.begin; n < chosen.end; ++n) {
      const Overlap overlap(sparse, pooling, t, blocks[n]);
      for (int64_t i = overlap.begin; i < overlap.end; ++i) {
        scores[n * pooling.weights + i] = dot(q, keys + (overlap.first + i) * key_stride, dk) * scale;
        weights[n * pooling.weights + i] = pooling.weight[i];
      }
    }
    for (int64_t i = 0; i < places; i += kLanes)
      store(scores + i, load(weights + i) * exp2(load(scores + i) - splat(log_sums[r])));
    for (int64_t n = chosen.begin; n < chosen.end; ++n) {
      const Overlap overlap(sparse, pooling, t, blocks[n]);
      float weighted = 0;
      for (int64_t i = overlap.begin; i < overlap.end; ++i) weighted += scores[n * pooling.weights + i];
      of_head[n * lanes + r] = weighted;
      all[n] += weighted;
    }
  }

  void add_heads(const float* q, const float* keys, int64_t t, const int32_t* blocks, Chosen chosen) {
    for (int64_t r = 0; r < h; ++r)
      for (int64_t c = 0; c < dk; ++c) query[c * lanes + r] = q[r * dk + c] * scale;
    for (int64_t n = chosen.begin; n < chosen.end; ++n) {
      const Overlap overlap(sparse, pooling, t, blocks[n]);
      const int64_t count = std::max<int64_t>(overlap.end - overlap.begin, 0);
      const float* first = keys + (overlap.first + overlap.begin) * key_stride;
      multiply<Into::kOverwrite>(count, first, key_stride, 1, query, lanes, scores, lanes, dk, lanes);
      for (int64_t c = 0; c < lanes; c += kLanes) {
        vec weighted = {};
        for (int64_t i = 0; i < count; ++i)
          weighted = multiply_add(splat(pooling.weight[overlap.begin + i]),
                                  exp2(load(scores + i * lanes + c) - load(log_sums + c)), weighted);
        store(of_head + n * lanes + c, weighted);
      }
      for (int64_t c = 0; c < lanes; c += kSumLanes) all[n] += sum_lanes(of_head + n * lanes + c);
    }
  }
};

}  // namespace

extern "C" {

// Writes the mean loss, the gradient of each chosen block's importance [tokens][groups][count] (0 elsewhere), and its
// mean under the probabilities of each row [tokens][heads]: what the softmax subtracts. Both are of the sum over pairs.
// `mass` is that of `selected_forward`.
void scorer_loss_forward(const float* q, const float* k_cmp, const float* lse_cmp, const float* mass,
                         const int32_t* offsets, const int32_t* key_offsets, const int32_t* selected,
                         float* d_importance, float* mean, float* loss, float*, int64_t sequences, int64_t heads,
                         int64_t groups, int64_t dk, double pairs, SPARSE) {
  const Inputs in = {{heads, groups, dk, dk}, q, nullptr, nullptr, offsets, key_offsets, sequences};
  const Shape& shape = in.shape;
  const Sparse sparse = {l, d, block, count, init, local, largest, chunked};
  const Pooling pooling(sparse);
  const int64_t h = shape.per_group(), lanes = pad(h);
  float* losses = scratch<float>(kDelta, in.tokens() * groups);
  for_each_tile(in, tile_tokens(shape), [&](int64_t s, int64_t g, int64_t tile) {
    const int64_t size = tile_tokens(shape), token0 = offsets[s];
    const int64_t t0 = tile * size, t1 = std::min(t0 + size, offsets[s + 1] - token0);
    const float* keys = k_cmp + (key_offsets[s] * groups + g) * dk;
    Importance of(sparse, pooling, shape);
    const float *importance = of.all, *of_head = of.of_head;
    for (int64_t t = t0; t < t1; ++t) {
      const int64_t at = (token0 + t) * groups + g, row = (token0 + t) * heads + g * h;
      const int32_t* blocks = selected + at * count;
      const float* share = mass + at * count;
      const Chosen chosen(sparse, t, blocks);
      std::fill(d_importance + at * count, d_importance + (at + 1) * count, 0.0f);
      std::fill(mean + row, mean + row + h, 0.0f);
      losses[at] = 0.0f;
      float shares = 0;
      for (int64_t n = chosen.begin; n < chosen.end; ++n) shares += share[n];
      // Shares of 0: the forced blocks have all attention, within rounding.
      if (chosen.count() < 2 || !(shares > 0)) continue;
      of.compute(q + row * dk, lse_cmp + row, keys, t, blocks, chosen);
      float all = 0;
      for (int64_t n = chosen.begin; n < chosen.end; ++n) all += std::max(importance[n], kLeast);
      for (int64_t n = chosen.begin; n < chosen.end; ++n) {
        const float target = share[n] / shares;
        const float ratio = target * all / std::max(importance[n], kLeast);
        if (target > 0) losses[at] += target * static_cast<float>(natural_log(ratio));
        if (!(importance[n] > kLeast)) continue;
        const float gradient = 1.0f / all - target / importance[n];
        d_importance[at * count + n] = gradient;
        for (int64_t r = 0; r < h; ++r) mean[row + r] = multiply_add(gradient, of_head[n * lanes + r], mean[row + r]);
      }
    }
  });
  double total = 0;
  for (int64_t i = 0; i < in.tokens() * groups; ++i) total += losses[i];
  *loss = static_cast<float>(pairs > 0 ? total / pairs : 0);
}

namespace {

// The gradient of importance as a gradient of the probabilities of compressed blocks.
struct ImportanceGradient {
  const Sparse& sparse;
  const Pooling& pooling;
  const int32_t *offsets, *selected;
  const float* d_importance;
  float factor;
  int64_t groups;

  const float* rows(int64_t s, int64_t group, int64_t t0, int64_t t1, int64_t k0, int64_t width) const {
    float* extra = scratch<float>(kExtra, (t1 - t0) * width);
    std::memset(extra, 0, sizeof(float) * (t1 - t0) * width);
    for (int64_t t = t0; t < t1; ++t, extra += width) {
      const int64_t at = ((offsets[s] + t) * groups + group) * sparse.count;
      const Chosen chosen(sparse, t, selected + at);
      for (int64_t n = chosen.begin; n < chosen.end; ++n) {
        const float gradient = d_importance[at + n] * factor;
        const Overlap overlap(sparse, pooling, t, selected[at + n]);
        const int64_t begin = std::max(overlap.begin, k0 - overlap.first);
        const int64_t end = std::min(overlap.end, k0 + width - overlap.first);
        for (int64_t i = begin; i < end; ++i)
          extra[overlap.first + i - k0] = multiply_add(pooling.weight[i], gradient, extra[overlap.first + i - k0]);
      }
    }
    return extra - (t1 - t0) * width;
  }
};

}  // namespace

// `compressed_backward` with `factor` times the gradient of the sum over pairs.
void compressed_backward_scored(const AttentionArguments* given, const int32_t* selected, const float* d_importance,
                                const float* mean, float*, int64_t, int64_t, double factor, SPARSE) {
  const Inputs in = Inputs::of(*given);
  const Gradients g = Gradients::of(*given);
  const Sparse sparse = {l, d, block, count, init, local, largest, chunked};
  const Pooling pooling(sparse);
  const float f = static_cast<float>(factor);
  const int64_t rows = in.tokens() * in.shape.heads;
  float* delta = row_deltas(g.out, g.d_out, rows, in.shape.dv);
  parallel_chunks(rows, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) delta[r] = multiply_add(mean[r], f, delta[r]);
  });
  const ImportanceGradient extra = {sparse, pooling, in.offsets, selected, d_importance, f, in.shape.groups};
  const int64_t chunk = chunk_size(in, kKeyBlock * d);
  banded_gradients(in, Finished{l, d}, g, delta, extra, chunk, chunk / d, chunk_count(in, chunk));
}
}
