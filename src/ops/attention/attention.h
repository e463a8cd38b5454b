// Shared by all attention kernels: packed keys and values, the softmax over one block of keys, and its gradient.
//
// Rows are (token, head) pairs of one KV group: the heads of a group share keys, so they are multiplied together.
// Scores live in the base-2 domain: queries are scaled by log2(e)/sqrt(dk), and exp2 is all the kernels need.
//
// If tokens of a tile see different parts of a block, the unseen probabilities are set to zero: zero times a finite
// number adds nothing, so the result is bit for bit that of the seen keys alone. But zero times infinity is NaN and
// would let the future through: a block that holds numbers that are not finite is worked through token by token
// instead, over exactly the keys the token sees.
#pragma once
#include <algorithm>
#include <limits>

#include "gemm.h"
#include "runtime.h"

namespace attention {

constexpr int64_t kKeyBlock = 128;  // 64 is 10 % slower: each block adds one maximum and one rescaling
constexpr float kNone = -std::numeric_limits<float>::infinity();

inline int64_t pad(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

struct Shape {
  int64_t heads, groups, dk, dv;
  int64_t per_group() const { return heads / groups; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(dk)); }
};

// Scratch slots. The first are taken by the calling thread and read by all; the others belong to one task.
enum Slot {
  kKeysT,
  kValuesT,
  kKeysN,
  kValuesN,
  kDelta,
  kTasks,
  kIndex,
  kFinite,
  kQuery,
  kScores,
  kProducts,
  kAccumulator,
  kRows,
  kGradOut,
  kGradScores,
  kGradQuery,
  kGradKeys,
  kGradValues,
  kMembers,
  kRanges,
  kExtra
};

// The rows of a head lie apart from token to token, where processors do not fetch ahead by themselves. So a loop over
// tokens asks for the rows that it needs kTokensAhead tokens later.
constexpr int64_t kTokensAhead = 4;
inline void fetch(const float* p, int64_t count) {
  for (int64_t c = 0; c < count; c += kLineFloats) __builtin_prefetch(p + c);
}

// [block][d][pad(size)]: keys of a block as columns, zero past the end, so that scores come out of one product.
inline float* pack_transposed(int slot, const float* x, const int32_t* offsets, int64_t sequences, int64_t groups,
                              int64_t d, int64_t size, const int64_t* first_block, int64_t blocks) {
  const int64_t width = pad(size);
  float* packed = scratch<float>(slot, blocks * groups * d * width);
  parallel(sequences * groups, [&](int64_t index) {
    const int64_t s = index / groups, g = index % groups;
    const int64_t length = offsets[s + 1] - offsets[s];
    for (int64_t start = 0, j = first_block[s]; start < length; start += size, ++j) {
      float* out = packed + (j * groups + g) * d * width;
      const int64_t count = std::min(size, length - start);
      const float* rows = x + ((offsets[s] + start) * groups + g) * d;
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) {
        const float* from = rows + i * groups * d;
        int64_t c = 0;
        for (; c + kLanes <= d; c += kLanes) transpose_square(from + c, groups * d, out + c * width + i, width);
        for (; c < d; ++c) store(out + c * width + i, load_column(from + c, groups * d));
      }
      for (; i < count; ++i)
        for (int64_t c = 0; c < d; ++c) out[c * width + i] = rows[i * groups * d + c];
      if (count < width)
        for (int64_t c = 0; c < d; ++c) std::fill(out + c * width + count, out + (c + 1) * width, 0.0f);
    }
  });
  return packed;
}

// [block][size][pad(d)]: rows of a block one after the other, padded to whole vectors with zeros.
inline float* pack_rows(int slot, const float* x, const int32_t* offsets, int64_t sequences, int64_t groups, int64_t d,
                        int64_t size, const int64_t* first_block, int64_t blocks) {
  const int64_t width = pad(d);
  float* packed = scratch<float>(slot, blocks * groups * size * width);
  parallel(sequences * groups, [&](int64_t index) {
    const int64_t s = index / groups, g = index % groups;
    const int64_t length = offsets[s + 1] - offsets[s];
    for (int64_t start = 0, j = first_block[s]; start < length; start += size, ++j) {
      float* out = packed + (j * groups + g) * size * width;
      const int64_t count = std::min(size, length - start);
      for (int64_t i = 0; i < count; ++i, out += width) {
        std::memcpy(out, x + ((offsets[s] + start + i) * groups + g) * d, sizeof(float) * d);
        std::fill(out + d, out + width, 0.0f);
      }
    }
  });
  return packed;
}

// Numbers the key blocks of all sequences; first[s] is the first of sequence s, first[sequences] their number.
inline int64_t number_blocks(const int32_t* offsets, int64_t sequences, int64_t size, int64_t* first) {
  first[0] = 0;
  for (int64_t s = 0; s < sequences; ++s) first[s + 1] = first[s] + (offsets[s + 1] - offsets[s] + size - 1) / size;
  return first[sequences];
}

// For every block and group: 1 if all its keys and values are finite.
inline const uint8_t* finite_blocks(const float* keys, const float* values, const int32_t* offsets, int64_t sequences,
                                    int64_t groups, int64_t dk, int64_t dv, int64_t size, const int64_t* first_block,
                                    int64_t blocks) {
  uint8_t* finite = scratch<uint8_t>(kFinite, blocks * groups);
  parallel(sequences * groups, [&](int64_t index) {
    const int64_t s = index / groups, g = index % groups;
    const int64_t length = offsets[s + 1] - offsets[s];
    for (int64_t start = 0, j = first_block[s]; start < length; start += size, ++j) {
      vec zeros = {};  // x * 0 is NaN for an x that is not finite
      float rest = 0;
      const auto probe = [&](const float* row, int64_t d) {
        int64_t c = 0;
        for (; c + kLanes <= d; c += kLanes) zeros = multiply_add(load(row + c), splat(0.0f), zeros);
        for (; c < d; ++c) rest += row[c] * 0.0f;
      };
      for (int64_t i = start; i < std::min(start + size, length); ++i) {
        const int64_t at = (offsets[s] + i) * groups + g;
        probe(keys + at * dk, dk);
        probe(values + at * dv, dv);
      }
      finite[j * groups + g] = sum(zeros) + rest == 0.0f;
    }
  });
  return finite;
}

// Copies the group's rows of one token, scaled and padded to whole vectors.
inline void gather_rows(const float* from, int64_t count, int64_t d, float factor, float* to) {
  const int64_t width = pad(d);
  for (int64_t i = 0; i < count; ++i, from += d, to += width) {
    for (int64_t c = 0; c < d; ++c) to[c] = from[c] * factor;
    std::fill(to + d, to + width, 0.0f);
  }
}

// The state of a softmax that sees its keys block by block.
struct Softmax {
  float* maximum;      // [rows]
  float* sum;          // [rows][kSumLanes], added up at the end: once per row and block would cost as much as exp2
  float* accumulator;  // [rows][pad(dv)]

  Softmax from(int64_t row, int64_t dv_width) const {
    return {maximum + row, sum + row * kSumLanes, accumulator + row * dv_width};
  }
};

struct Buffers {
  float* scores;          // [rows][pad(size)]
  float* products;        // [rows][pad(dv)]
  float* kept = nullptr;  // receives the scores of the block's first key before they become probabilities; or null
  int64_t kept_stride = 0;  // from row to row there
  // [state row]: what the block adds to the softmax sum, as a multiple of 2 to the power of `block_top`; or null.
  float *block_sum = nullptr, *block_top = nullptr;

  // For a state that starts at a later row.
  Buffers from(int64_t row) const {
    Buffers part = *this;
    if (block_sum) part.block_sum += row, part.block_top += row;
    return part;
  }
};

// The keys of a block that a row sees: [low, high).
struct Range {
  int32_t low, high;
};

// Rows of a tile that see different keys are multiplied kRangeRows at a time, with the keys that one of them sees. More
// rows would compute more scores only to throw them away, fewer would read the keys more often.
constexpr int64_t kRangeRows = 2 * kTileRows;

// The keys that at least one of the rows sees, and what lies between; low >= high if there are none.
inline Range seen_by(const Range* ranges, int64_t rows) {
  Range all = {std::numeric_limits<int32_t>::max(), 0};
  for (int64_t r = 0; r < rows; ++r)
    if (ranges[r].low < ranges[r].high) all = {std::min(all.low, ranges[r].low), std::max(all.high, ranges[r].high)};
  return all;
}

// Scores of keys outside the range get `value`; the row of scores starts at key `start`.
inline void mask_row(float* scores, int64_t start, int64_t columns, Range range, float value) {
  for (int64_t i = start; i < range.low; ++i) scores[i - start] = value;
  for (int64_t i = range.high; i < start + columns; ++i) scores[i - start] = value;
}

// One block of keys, of which the rows see parts of [low, high): `ranges` gives each row's part, null for all. `map`
// names each row's place in the state, null for the identity. With ranges the block must be finite.
inline void forward_block(const Shape& shape, int64_t rows, const float* query, const float* keys_t, int64_t key_width,
                          const float* values, int64_t low, int64_t high, const Range* ranges, const int32_t* map,
                          Softmax& state, const Buffers& buffers) {
  constexpr int64_t kMostRows = kTileRows * 64;
  const int64_t dk_width = pad(shape.dk), dv_width = pad(shape.dv);
  const Range whole = {static_cast<int32_t>(low), static_cast<int32_t>(high)};
  float* scores = buffers.scores;
  float shrink_of[kMostRows];
  for (int64_t first = 0, count = 0; first < rows; first += count) {
    count = std::min(rows - first, ranges ? kRangeRows : kMostRows);
    const Range seen = ranges ? seen_by(ranges + first, count) : whole;
    if (seen.low >= seen.high) continue;
    const int64_t start = seen.low / kPad * kPad, columns = pad(seen.high) - start;
    multiply<Into::kOverwrite>(count, query + first * dk_width, dk_width, 1, keys_t + start, key_width, scores, columns,
                               shape.dk, columns);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = first + i, at = map ? map[r] : r;
      float* row = scores + i * columns;
      if (buffers.kept) std::memcpy(buffers.kept + r * buffers.kept_stride + start, row, sizeof(float) * columns);
      mask_row(row, start, columns, ranges ? ranges[r] : whole, kNone);
      vec most = load(row);
      for (int64_t c = kLanes; c < columns; c += kLanes) most = max(most, load(row + c));
      const float previous = state.maximum[at];
      const float top = max_lane(most);
      const float now = top > previous ? top : previous;
      // All scores -inf: shift by 0, so that exp2 gives 0 and not NaN.
      const vec shift = splat(now == kNone ? 0.0f : now);
      LaneSums total;
      for (int64_t c = 0; c < columns; c += kLanes) {
        const vec p = exp2(load(row + c) - shift);
        store(row + c, p);
        total.add(p);
      }
      const float shrink = previous == now ? 1.0f : previous == kNone ? 0.0f : power_of_2(previous - now);
      state.maximum[at] = now;
      total.merge_into(state.sum + at * kSumLanes, shrink);
      shrink_of[i] = shrink;
      if (buffers.block_sum) buffers.block_sum[at] = total.total(), buffers.block_top[at] = now;
    }
    multiply<Into::kOverwrite>(count, scores + (seen.low - start), columns, 1, values + seen.low * dv_width, dv_width,
                               buffers.products, dv_width, seen.high - seen.low, dv_width);
    for (int64_t i = 0; i < count; ++i) {
      float* into = state.accumulator + (map ? map[first + i] : first + i) * dv_width;
      const float* add = buffers.products + i * dv_width;
      const vec shrink = splat(shrink_of[i]);
      for (int64_t c = 0; c < dv_width; c += kLanes)
        store(into + c, multiply_add(load(into + c), shrink, load(add + c)));
    }
  }
}

inline void reset(Softmax& state, int64_t rows, int64_t dv_width) {
  std::fill(state.maximum, state.maximum + rows, kNone);
  std::fill(state.sum, state.sum + rows * kSumLanes, 0.0f);
  std::memset(state.accumulator, 0, sizeof(float) * rows * dv_width);
}

// Writes the finished rows of a token: output and the logarithm of the softmax sum. No key seen: 0 and -inf.
inline void finish_rows(const Shape& shape, const Softmax& state, int64_t row, int64_t count, float* out, float* lse) {
  const int64_t dv_width = pad(shape.dv);
  for (int64_t i = 0; i < count; ++i, ++row, out += shape.dv) {
    const float total = sum_lanes(state.sum + row * kSumLanes);
    const bool none = state.maximum[row] == kNone && total == 0.0f;
    const float inverse = none ? 0.0f : 1.0f / total;
    for (int64_t c = 0; c < shape.dv; ++c) out[c] = state.accumulator[row * dv_width + c] * inverse;
    lse[i] = none ? kNone : (state.maximum[row] + binary_log(total)) * kLn2;
  }
}

// One block of keys and values for the backward pass, packed four ways.
struct KeyBlock {
  const float* keys_t;    // [dk][width]
  const float* values_t;  // [dv][width]
  const float* keys;      // [size][pad(dk)]
  int64_t width;          // pad(size)
  bool finite;            // all keys and values are
  float* d_keys;          // [size][pad(dk)], in units of 1/(scale*log2 e); `add_key_gradients` applies the factor
  float* d_values;        // [size][pad(dv)]
};

struct GradientRows {
  const float* query;  // [rows][pad(dk)], scaled to base 2
  const float* d_out;  // [rows][pad(dv)]
  const float* lse;    // [rows], base 2
  const float* delta;  // [rows], sum of d_out * out
  float* d_query;      // [rows][pad(dk)], overwritten, still without the factor 1/sqrt(dk)
  float* scores;       // [rows][width]
  float* d_scores;     // [rows][width]
  // [tokens][width], added to the gradient of every probability of the token's rows; null for none.
  const float* extra = nullptr;
  int64_t width = 0;

  // The same from a later row on; results of the call go to the start of the buffers.
  GradientRows from(const Shape& shape, int64_t row) const {
    return {query + row * pad(shape.dk),
            d_out + row * pad(shape.dv),
            lse + row,
            delta + row,
            d_query,
            scores,
            d_scores,
            extra ? extra + row / shape.per_group() * width : nullptr,
            width};
  }
};

// Gradient of one block of keys, of which the rows see parts of [low, high), as in forward_block: five products.
inline void backward_block(const Shape& shape, int64_t rows, const GradientRows& g, const KeyBlock& block, int64_t low,
                           int64_t high, const Range* ranges) {
  const int64_t dk_width = pad(shape.dk), dv_width = pad(shape.dv);
  const int64_t start = low / kPad * kPad, columns = pad(high) - start;
  const Range whole = {static_cast<int32_t>(low), static_cast<int32_t>(high)};
  for (int64_t first = 0, count = 0; first < rows; first += count) {
    count = std::min(rows - first, ranges ? kRangeRows : rows);
    Range seen = ranges ? seen_by(ranges + first, count) : whole;
    if (seen.low >= seen.high) seen = {static_cast<int32_t>(start), static_cast<int32_t>(start)};
    // Columns of p and ds that are computed. The others are zero.
    const int64_t begin = seen.low / kPad * kPad - start, end = pad(seen.high) - start;
    float* p = g.scores + first * columns;
    float* ds = g.d_scores + first * columns;
    multiply<Into::kOverwrite>(count, g.query + first * dk_width, dk_width, 1, block.keys_t + start + begin,
                               block.width, p + begin, columns, shape.dk, end - begin);
    multiply<Into::kOverwrite>(count, g.d_out + first * dv_width, dv_width, 1, block.values_t + start + begin,
                               block.width, ds + begin, columns, shape.dv, end - begin);
    for (int64_t r = first; r < first + count; ++r, p += columns, ds += columns) {
      const vec lse = splat(g.lse[r]), delta = splat(g.delta[r]);
      if (ranges) mask_row(p + begin, start + begin, end - begin, ranges[r], kNone);
      if (g.extra) {
        const float* extra = g.extra + r / shape.per_group() * g.width + start;
        for (int64_t c = begin; c < end; c += kLanes) store(ds + c, load(ds + c) + load(extra + c));
      }
      for (int64_t c = begin; c < end; c += kLanes) {
        const vec probability = exp2(load(p + c) - lse);
        store(p + c, probability);
        store(ds + c, probability * (load(ds + c) - delta));
      }
      for (int64_t c = 0; c < begin; c += kLanes) store(p + c, vec{}), store(ds + c, vec{});
      for (int64_t c = end; c < columns; c += kLanes) store(p + c, vec{}), store(ds + c, vec{});
    }
    multiply<Into::kOverwrite>(count, g.d_scores + first * columns + (seen.low - start), columns, 1,
                               block.keys + seen.low * dk_width, dk_width, g.d_query + first * dk_width, dk_width,
                               seen.high - seen.low, dk_width);
  }
  for (int64_t key = low, count = 0; key < high; key += count) {
    count = std::min(high - key, ranges ? kRangeRows : high - low);
    int64_t begin = 0, end = rows;  // the rows that see one of these keys
    const auto sees = [&](int64_t r) { return ranges[r].low < key + count && ranges[r].high > key; };
    if (ranges) {
      while (begin < end && !sees(begin)) ++begin;
      while (begin < end && !sees(end - 1)) --end;
    }
    const int64_t at = begin * columns + key - start;
    multiply<Into::kAdd>(count, g.scores + at, 1, columns, g.d_out + begin * dv_width, dv_width,
                         block.d_values + key * dv_width, dv_width, end - begin, dv_width);
    multiply<Into::kAdd>(count, g.d_scores + at, 1, columns, g.query + begin * dk_width, dk_width,
                         block.d_keys + key * dk_width, dk_width, end - begin, dk_width);
  }
}

// Adds d_query rows of one token to the output, with the factor the scaled keys left out.
inline void add_query_gradient(const Shape& shape, const float* from, int64_t count, float* dq) {
  const int64_t width = pad(shape.dk);
  const vec scale = splat(shape.scale());
  fetch(dq + kTokensAhead * shape.heads * shape.dk, count * shape.dk);
  for (int64_t i = 0; i < count; ++i, from += width, dq += shape.dk)
    each_vector(0, shape.dk, [&](int64_t c, auto get, auto put) {
      put(dq + c, multiply_add(get(from + c), scale, get(dq + c)));
    });
}

// Adds a block's key and value gradients to the outputs [tokens, groups, d]. Queries carried scale*log2(e); the
// gradient needs the scale alone, so ln 2 is removed here.
inline void add_key_gradients(const Shape& shape, const KeyBlock& block, int64_t count, int64_t group, float* dk,
                              float* dv) {
  const int64_t dk_width = pad(shape.dk), dv_width = pad(shape.dv);
  for (int64_t i = 0; i < count; ++i) {
    float* k = dk + (i * shape.groups + group) * shape.dk;
    float* v = dv + (i * shape.groups + group) * shape.dv;
    fetch(k + kTokensAhead * shape.groups * shape.dk, shape.dk);
    fetch(v + kTokensAhead * shape.groups * shape.dv, shape.dv);
    const float* d_key = block.d_keys + i * dk_width;
    each_vector(0, shape.dk, [&](int64_t c, auto get, auto put) {
      put(k + c, multiply_add(get(d_key + c), splat(kLn2), get(k + c)));
    });
    for (int64_t c = 0; c < shape.dv; ++c) v[c] += block.d_values[i * dv_width + c];
  }
}

// delta[t][head] = sum over dv of d_out * out.
inline float* row_deltas(const float* out, const float* d_out, int64_t rows, int64_t dv) {
  float* delta = scratch<float>(kDelta, rows);
  parallel_chunks(rows, 512, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) delta[r] = dot(out + r * dv, d_out + r * dv, dv);
  });
  return delta;
}

}  // namespace attention
