// Which blocks each token attends to: importance of the selection blocks from the compressed attention's
// probabilities, and the top n with the forced blocks.
//
// Probabilities are recomputed from q, k_cmp and the LSE for a tile of tokens; only the tile's sums over the heads of
// the group are ever held, [tile][compressed blocks], so memory stays linear in the length.
#include "../banded.h"
#include "../selection.h"

using namespace attention;

extern "C" {

void select_forward(const float* q, const float* k, const float* lse, const int32_t* offsets,
                    const int32_t* key_offsets, int32_t* selected, int64_t sequences, int64_t heads, int64_t groups,
                    int64_t dk, SPARSE) {
  const Inputs in = {{heads, groups, dk, dk}, q, k, nullptr, offsets, key_offsets, sequences};
  const Shape& shape = in.shape;
  const Sparse sparse = {l, d, block, count, init, local, largest, chunked};
  const Pooling pooling(sparse);
  const int64_t h = shape.per_group(), dk_width = pad(dk), width = pad(kKeyBlock);
  int64_t* first = scratch<int64_t>(kIndex, sequences + 1);
  const int64_t blocks = number_blocks(key_offsets, sequences, kKeyBlock, first);
  const float* keys_t = pack_transposed(kKeysT, k, key_offsets, sequences, groups, dk, kKeyBlock, first, blocks);
  const int64_t size = tile_tokens(shape);
  for_each_tile(in, size, [&](int64_t s, int64_t g, int64_t tile) {
    const int64_t length = offsets[s + 1] - offsets[s], token0 = offsets[s];
    const int64_t t0 = tile * size, t1 = std::min(t0 + size, length);
    const int64_t key_count = key_offsets[s + 1] - key_offsets[s],
                  key_width = (key_count + kKeyBlock) / kKeyBlock * kKeyBlock;
    float* probability = scratch<float>(kAccumulator, (t1 - t0) * key_width);
    // A tile whose tokens all select every block needs no scores.
    const bool needed = (t1 - 1) / block + 1 > count;
    if (needed) {
      float* query = scratch<float>(kQuery, (t1 - t0) * h * dk_width);
      float* scores = scratch<float>(kScores, (t1 - t0) * h * width);
      for (int64_t t = t0; t < t1; ++t)
        gather_rows(q + ((token0 + t) * heads + g * h) * dk, h, dk, shape.scale() * kLog2E,
                    query + (t - t0) * h * dk_width);
      // Only blocks before the local ones can be chosen. `choose` reads what a token sees of their compressed blocks.
      const int64_t last = sparse.candidates(t1 - 1) * (block / d);
      for (int64_t k0 = 0; k0 < std::min(last, key_count); k0 += kKeyBlock) {
        const float* block_keys = keys_t + ((first[s] + k0 / kKeyBlock) * groups + g) * dk * width;
        multiply<Into::kOverwrite>((t1 - t0) * h, query, dk_width, 1, block_keys, width, scores, width, dk, width);
        for (int64_t t = t0; t < t1; ++t) {
          float* into = probability + (t - t0) * key_width + k0;
          const float* row_lse = lse + (token0 + t) * heads + g * h;
          for (int64_t c = 0; c < width; c += kLanes) {
            vec total = {};
            for (int64_t r = 0; r < h; ++r)
              total += exp2(load(scores + ((t - t0) * h + r) * width + c) - splat(row_lse[r] * kLog2E));
            store(into + c, total);
          }
        }
      }
    }
    for (int64_t t = t0; t < t1; ++t)
      choose(sparse, pooling, t, probability + (t - t0) * key_width, selected + ((token0 + t) * groups + g) * count);
  });
}
}
