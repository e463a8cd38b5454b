// Attention where token t sees the keys [low(t), high(t)), both never falling with t: dense causal attention, a sliding
// window, and compressed blocks are all of this kind and differ only in `Visible`.
#pragma once
#include "attention.h"

namespace attention {

// `Visible` for each kind of attention: token t sees the keys [low(t), high(t)).
struct Causal {
  int64_t low(int64_t) const { return 0; }
  int64_t high(int64_t t) const { return t + 1; }
};
struct Window {  // the last w tokens
  int64_t w;
  int64_t low(int64_t t) const { return t - w + 1 > 0 ? t - w + 1 : 0; }
  int64_t high(int64_t t) const { return t + 1; }
};
struct Finished {  // compressed blocks of l tokens, one every d tokens, that end at or before t
  int64_t l, d;
  int64_t low(int64_t) const { return 0; }
  int64_t high(int64_t t) const { return t + 1 < l ? 0 : (t + 1 - l) / d + 1; }
};

constexpr int64_t kRowTarget = 96;   // rows (token, head) of one tile: queries, scores and results stay in L2
constexpr int64_t kMostTokens = 48;  // more would compute more scores above the diagonal only to throw them away

inline int64_t tile_tokens(const Shape& shape) {
  return std::min(kMostTokens, std::max<int64_t>(1, kRowTarget / shape.per_group()));
}

// Arguments of every branch kernel, filled by attendBranch in branch.ts: 8 bytes a field, in this order.
struct AttentionArguments {
  Address<const float> q, k, v;          // [tokens, heads, dk], [keys, groups, dk], [keys, groups, dv]
  Address<const int32_t> offsets, key_offsets;  // [sequences + 1], where each sequence begins, in tokens and in keys
  Address<float> out, lse;               // [tokens, heads, dv], [tokens, heads]; the backward pass reads them
  Address<const float> d_out;            // this and the gradients: null in the forward pass
  Address<float> d_query, d_keys, d_values;
  int64_t sequences, heads, groups, dk, dv;
  int64_t accumulate_query, accumulate_keys, accumulate_values;
};

struct Inputs {
  Shape shape;
  const float *query, *keys, *values;
  const int32_t *offsets, *key_offsets;  // start of each sequence, in tokens and in keys
  int64_t sequences;

  static Inputs of(const AttentionArguments& a) {
    return {{a.heads, a.groups, a.dk, a.dv}, a.q, a.k, a.v, a.offsets, a.key_offsets, a.sequences};
  }
  int64_t tokens() const { return offsets[sequences]; }
};

// Calls body(sequence, group, tile) for every tile of `size` tokens, the longest work first.
template <class Body> inline void for_each_tile(const Inputs& in, int64_t size, const Body& body) {
  int64_t* first = scratch<int64_t>(kTasks, in.sequences + 1);
  const int64_t tiles = number_blocks(in.offsets, in.sequences, size, first);
  const int64_t groups = in.shape.groups;
  parallel(tiles * groups, [&](int64_t index) {
    const int64_t tile = tiles - 1 - index / groups;
    const int64_t s = std::upper_bound(first, first + in.sequences, tile) - first - 1;
    body(s, index % groups, tile - first[s]);
  });
}

// Keys of one block that the rows of a tile see: the range that covers all rows, and each row's own if they differ.
struct TileRanges {
  int64_t low, high;
  const Range* rows;  // null when every token sees all of [low, high)

  template <class Visible>
  TileRanges(const Visible& visible, int64_t t0, int64_t t1, int64_t h, int64_t k0, int64_t valid) {
    const auto clip = [&](int64_t k) { return std::min(std::max<int64_t>(k - k0, 0), valid); };
    low = clip(visible.low(t0));
    high = clip(visible.high(t1 - 1));
    if (clip(visible.low(t1 - 1)) == low && clip(visible.high(t0)) == high) {
      rows = nullptr;
      return;
    }
    Range* out = scratch<Range>(kRanges, (t1 - t0) * h);
    for (int64_t t = t0; t < t1; ++t) {
      const Range range = {static_cast<int32_t>(clip(visible.low(t))), static_cast<int32_t>(clip(visible.high(t)))};
      std::fill(out + (t - t0) * h, out + (t - t0 + 1) * h, range);
    }
    rows = out;
  }
};

template <class Visible> void banded_forward(const Inputs& in, const Visible& visible, float* out, float* lse) {
  const Shape& shape = in.shape;
  const int64_t h = shape.per_group(), dk_width = pad(shape.dk), dv_width = pad(shape.dv), width = pad(kKeyBlock);
  int64_t* first = scratch<int64_t>(kIndex, in.sequences + 1);
  const int64_t blocks = number_blocks(in.key_offsets, in.sequences, kKeyBlock, first);
  const float* keys_t =
      pack_transposed(kKeysT, in.keys, in.key_offsets, in.sequences, shape.groups, shape.dk, kKeyBlock, first, blocks);
  const float* values =
      pack_rows(kValuesN, in.values, in.key_offsets, in.sequences, shape.groups, shape.dv, kKeyBlock, first, blocks);
  const uint8_t* finite = finite_blocks(in.keys, in.values, in.key_offsets, in.sequences, shape.groups, shape.dk,
                                        shape.dv, kKeyBlock, first, blocks);
  const int64_t size = tile_tokens(shape);
  for_each_tile(in, size, [&](int64_t s, int64_t g, int64_t tile) {
    const int64_t length = in.offsets[s + 1] - in.offsets[s], key_count = in.key_offsets[s + 1] - in.key_offsets[s];
    const int64_t t0 = tile * size, t1 = std::min(t0 + size, length), rows = (t1 - t0) * h;
    const int64_t token0 = in.offsets[s];
    float* query = scratch<float>(kQuery, rows * dk_width);
    for (int64_t t = t0; t < t1; ++t) {
      const float* from = in.query + ((token0 + t) * shape.heads + g * h) * shape.dk;
      fetch(from + kTokensAhead * shape.heads * shape.dk, h * shape.dk);
      gather_rows(from, h, shape.dk, shape.scale() * kLog2E, query + (t - t0) * h * dk_width);
    }
    float* row_state = scratch<float>(kRows, rows * (1 + kSumLanes));
    Softmax state = {row_state, row_state + rows, scratch<float>(kAccumulator, rows * dv_width)};
    const Buffers buffers = {scratch<float>(kScores, rows * width), scratch<float>(kProducts, rows * dv_width)};
    reset(state, rows, dv_width);
    const int64_t most = visible.high(t1 - 1), least = visible.low(t0);
    for (int64_t j = least / kKeyBlock; j * kKeyBlock < most; ++j) {
      const int64_t k0 = j * kKeyBlock, valid = std::min(kKeyBlock, key_count - k0);
      const int64_t packed = (first[s] + j) * shape.groups + g;
      const float* block_keys = keys_t + packed * shape.dk * width;
      const float* block_values = values + packed * kKeyBlock * dv_width;
      const TileRanges ranges(visible, t0, t1, h, k0, valid);
      if (!ranges.rows || finite[packed]) {
        forward_block(shape, rows, query, block_keys, width, block_values, ranges.low, ranges.high, ranges.rows,
                      nullptr, state, buffers);
        continue;
      }
      for (int64_t row = 0; row < rows; row += h) {
        const Range range = ranges.rows[row];
        if (range.low >= range.high) continue;
        Softmax part = state.from(row, dv_width);
        forward_block(shape, h, query + row * dk_width, block_keys, width, block_values, range.low, range.high, nullptr,
                      nullptr, part, buffers);
      }
    }
    for (int64_t t = t0; t < t1; ++t) {
      const int64_t at = (token0 + t) * shape.heads + g * h;
      finish_rows(shape, state, (t - t0) * h, h, out + at * shape.dv, lse + at);
    }
  });
}

// Gathers what the backward needs of tokens `tokens[0..count)` of one group into compact rows.
inline GradientRows gather_gradient_rows(const Shape& shape, const float* query, const float* lse, const float* d_out,
                                         const float* delta, int64_t token0, const int32_t* tokens, int64_t first,
                                         int64_t count, int64_t group, int64_t width) {
  const int64_t h = shape.per_group(), rows = count * h, dk_width = pad(shape.dk), dv_width = pad(shape.dv);
  float* q = scratch<float>(kQuery, rows * dk_width);
  float* g = scratch<float>(kGradOut, rows * dv_width);
  float* numbers = scratch<float>(kRows, rows * 2);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = (token0 + (tokens ? tokens[i] : first + i)) * shape.heads + group * h;
    if (!tokens) {
      fetch(query + (at + kTokensAhead * shape.heads) * shape.dk, h * shape.dk);
      fetch(d_out + (at + kTokensAhead * shape.heads) * shape.dv, h * shape.dv);
    }
    gather_rows(query + at * shape.dk, h, shape.dk, shape.scale() * kLog2E, q + i * h * dk_width);
    gather_rows(d_out + at * shape.dv, h, shape.dv, 1.0f, g + i * h * dv_width);
    for (int64_t r = 0; r < h; ++r) {
      // A row that sees nothing (-inf) has all its scores masked to -inf: minus 0 they give probability 0, not NaN.
      numbers[i * h + r] = lse[at + r] == kNone ? 0.0f : lse[at + r] * kLog2E;
      numbers[rows + i * h + r] = delta[at + r];
    }
  }
  return {q,
          g,
          numbers,
          numbers + rows,
          scratch<float>(kGradQuery, rows * dk_width),
          scratch<float>(kScores, rows * width),
          scratch<float>(kGradScores, rows * width)};
}

// The backward is cut into cells (chunk of keys, chunk of queries). All cells of one phase touch different keys and
// different queries, so they may run at once without atomics, and every gradient is summed in the order of the phases:
// the same for any number of threads. Phase p pairs key chunk a with query chunk a + p; causality makes p >= 0.
constexpr int64_t kChunks = 16;

template <class Cell> inline void for_each_cell(const Inputs& in, int64_t chunk, int64_t phases, const Cell& cell) {
  const int64_t groups = in.shape.groups;
  int64_t* first = scratch<int64_t>(kTasks, in.sequences + 1);
  for (int64_t phase = 0; phase < phases; ++phase) {
    first[0] = 0;
    for (int64_t s = 0; s < in.sequences; ++s) {
      const int64_t chunks = (in.offsets[s + 1] - in.offsets[s] + chunk - 1) / chunk;
      first[s + 1] = first[s] + std::max<int64_t>(chunks - phase, 0);
    }
    parallel(first[in.sequences] * groups, [&](int64_t index) {
      const int64_t number = index / groups;
      const int64_t s = std::upper_bound(first, first + in.sequences, number) - first - 1;
      const int64_t a = number - first[s];
      cell(s, index % groups, a, a + phase);
    });
  }
}

// Number of phases of the longest sequence.
inline int64_t chunk_count(const Inputs& in, int64_t chunk) {
  int64_t most = 0;
  for (int64_t s = 0; s < in.sequences; ++s)
    most = std::max<int64_t>(most, (in.offsets[s + 1] - in.offsets[s] + chunk - 1) / chunk);
  return most;
}

inline int64_t longest(const Inputs& in) { return chunk_count(in, 1); }

struct Packed {
  const float *keys_t, *values_t, *keys;
  const uint8_t* finite;
  const int64_t* first;
  int64_t size;  // keys of a block

  KeyBlock block(const Shape& shape, int64_t sequence, int64_t group, int64_t j) const {
    const int64_t at = (first[sequence] + j) * shape.groups + group, width = pad(size);
    float* d_keys = scratch<float>(kGradKeys, size * pad(shape.dk));
    float* d_values = scratch<float>(kGradValues, size * pad(shape.dv));
    std::memset(d_keys, 0, sizeof(float) * size * pad(shape.dk));
    std::memset(d_values, 0, sizeof(float) * size * pad(shape.dv));
    return {keys_t + at * shape.dk * width,
            values_t + at * shape.dv * width,
            keys + at * size * pad(shape.dk),
            width,
            finite[at] != 0,
            d_keys,
            d_values};
  }
};

inline Packed pack_for_backward(const Inputs& in, int64_t size) {
  const Shape& shape = in.shape;
  int64_t* first = scratch<int64_t>(kIndex, in.sequences + 1);
  const int64_t blocks = number_blocks(in.key_offsets, in.sequences, size, first);
  return {
      pack_transposed(kKeysT, in.keys, in.key_offsets, in.sequences, shape.groups, shape.dk, size, first, blocks),
      pack_transposed(kValuesT, in.values, in.key_offsets, in.sequences, shape.groups, shape.dv, size, first, blocks),
      pack_rows(kKeysN, in.keys, in.key_offsets, in.sequences, shape.groups, shape.dk, size, first, blocks),
      finite_blocks(in.keys, in.values, in.key_offsets, in.sequences, shape.groups, shape.dk, shape.dv, size, first,
                    blocks),
      first,
      size};
}

struct Gradients {
  const float *out, *lse, *d_out;
  float *d_query, *d_keys, *d_values;
  bool accumulate_query, accumulate_keys, accumulate_values;

  static Gradients of(const AttentionArguments& a) {
    return {a.out,
            a.lse,
            a.d_out,
            a.d_query,
            a.d_keys,
            a.d_values,
            a.accumulate_query != 0,
            a.accumulate_keys != 0,
            a.accumulate_values != 0};
  }
};

inline void clear_unless(bool accumulate, float* x, int64_t count) {
  if (accumulate) return;
  parallel_chunks(count, 1 << 16,
                  [&](int64_t begin, int64_t end) { std::memset(x + begin, 0, sizeof(float) * (end - begin)); });
}

inline void clear_gradients(const Inputs& in, const Gradients& g) {
  const Shape& shape = in.shape;
  const int64_t keys = in.key_offsets[in.sequences];
  clear_unless(g.accumulate_query, g.d_query, in.tokens() * shape.heads * shape.dk);
  clear_unless(g.accumulate_keys, g.d_keys, keys * shape.groups * shape.dk);
  clear_unless(g.accumulate_values, g.d_values, keys * shape.groups * shape.dv);
}

// Adds nothing to the gradients of probabilities (`banded_gradients`).
struct NoExtra {
  const float* rows(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) const { return nullptr; }
};

// `chunk` tokens and chunk/keys_per_token keys make a cell; Visible must not let phase p reach past `phases`.
// `delta` is subtracted from the gradient of every probability of a row. `extra.rows(s, group, t0, t1, k0, width)`
// returns what is added to those of keys [k0, k0 + width) for the rows of each token, [t1 - t0][width], or null.
template <class Visible, class Extra>
void banded_gradients(const Inputs& in, const Visible& visible, const Gradients& g, const float* delta,
                      const Extra& extra, int64_t chunk, int64_t key_chunk, int64_t phases) {
  const Shape& shape = in.shape;
  const int64_t h = shape.per_group(), dk_width = pad(shape.dk);
  clear_gradients(in, g);
  const Packed packed = pack_for_backward(in, kKeyBlock);
  const int64_t size = tile_tokens(shape);
  for_each_cell(in, chunk, phases, [&](int64_t s, int64_t group, int64_t a, int64_t b) {
    const int64_t length = in.offsets[s + 1] - in.offsets[s], key_count = in.key_offsets[s + 1] - in.key_offsets[s];
    const int64_t token0 = in.offsets[s], key0 = in.key_offsets[s];
    const int64_t t_begin = b * chunk, t_end = std::min(t_begin + chunk, length);
    const int64_t k_end = std::min((a + 1) * key_chunk, key_count);
    for (int64_t k0 = a * key_chunk; k0 < k_end; k0 += kKeyBlock) {
      const int64_t valid = std::min(kKeyBlock, key_count - k0);
      if (visible.high(t_end - 1) <= k0 || visible.low(t_begin) >= k0 + valid) continue;
      const KeyBlock block = packed.block(shape, s, group, k0 / kKeyBlock);
      for (int64_t t0 = t_begin; t0 < t_end; t0 += size) {
        const int64_t t1 = std::min(t0 + size, t_end);
        if (visible.high(t1 - 1) <= k0 || visible.low(t0) >= k0 + valid) continue;
        GradientRows rows = gather_gradient_rows(shape, in.query, g.lse, g.d_out, delta, token0, nullptr, t0, t1 - t0,
                                                 group, block.width);
        rows.extra = extra.rows(s, group, t0, t1, k0, block.width);
        rows.width = block.width;
        const auto add = [&](int64_t first_row, int64_t t) {
          add_query_gradient(shape, rows.d_query + first_row * dk_width, h,
                             g.d_query + ((token0 + t) * shape.heads + group * h) * shape.dk);
        };
        const TileRanges ranges(visible, t0, t1, h, k0, valid);
        if (!ranges.rows || block.finite) {
          backward_block(shape, (t1 - t0) * h, rows, block, ranges.low, ranges.high, ranges.rows);
          for (int64_t t = t0; t < t1; ++t) add((t - t0) * h, t);
          continue;
        }
        for (int64_t t = t0; t < t1; ++t) {
          const Range range = ranges.rows[(t - t0) * h];
          if (range.low >= range.high) continue;
          backward_block(shape, h, rows.from(shape, (t - t0) * h), block, range.low, range.high, nullptr);
          add(0, t);
        }
      }
      add_key_gradients(shape, block, valid, group, g.d_keys + (key0 + k0) * shape.groups * shape.dk,
                        g.d_values + (key0 + k0) * shape.groups * shape.dv);
    }
  });
}

template <class Visible> void banded_backward(const Inputs& in, const Visible& visible, const Gradients& g,
                                              int64_t chunk, int64_t key_chunk, int64_t phases) {
  const float* delta = row_deltas(g.out, g.d_out, in.tokens() * in.shape.heads, in.shape.dv);
  banded_gradients(in, visible, g, delta, NoExtra{}, chunk, key_chunk, phases);
}

// A chunk size that is a multiple of `unit` and cuts the longest sequence into at most kChunks pieces.
inline int64_t chunk_size(const Inputs& in, int64_t unit) {
  const int64_t wanted = (longest(in) + kChunks - 1) / kChunks;
  return std::max<int64_t>(1, (wanted + unit - 1) / unit) * unit;
}

}  // namespace attention
