// Attention over selected blocks: token t sees the tokens s <= t of the blocks its group selected.
//
// Forward: a tile of neighbouring tokens walks the union of their blocks once; for each block the rows of the tokens
// that selected it are brought together, so keys and values are loaded once per tile and no product is wasted on
// others. A tile of one token is the plain query-by-query kernel (v1), a tile of many shares loads (v2): the same
// arithmetic in the same order, bit for bit. Backward: block by block over the tokens that selected it, found through
// an inverted index.
#include "../banded.h"

namespace {

using namespace attention;

struct Selection {
  const int32_t* blocks;  // [tokens][groups][count], ascending, -1 = none
  int64_t count, size;    // slots per token, tokens of a block
  const int32_t* of(int64_t token, int64_t groups, int64_t group) const {
    return blocks + (token * groups + group) * count;
  }
};

// The members of a tile sorted by block: block b is selected by members[start[b]] ... members[start[b+1]-1].
struct Members {
  int32_t *blocks, *start, *members;
  int64_t block_count = 0;

  void collect(const Selection& selection, int64_t groups, int64_t group, int64_t token0, int64_t count,
               int64_t all_blocks) {
    const int64_t slots = count * selection.count;
    int32_t* memory = scratch<int32_t>(kMembers, all_blocks + 3 * slots + 2);
    int32_t* counter = memory;
    blocks = memory + all_blocks;
    start = blocks + slots;
    members = start + slots + 1;
    std::memset(counter, 0, sizeof(int32_t) * all_blocks);
    for (int64_t i = 0; i < count; ++i) {
      const int32_t* chosen = selection.of(token0 + i, groups, group);
      for (int64_t n = 0; n < selection.count; ++n)
        if (chosen[n] >= 0 && chosen[n] < all_blocks) ++counter[chosen[n]];  // never an address from outside
    }
    block_count = 0;
    int32_t total = 0;
    for (int64_t j = 0; j < all_blocks; ++j) {
      if (counter[j] == 0) continue;
      blocks[block_count] = static_cast<int32_t>(j);
      start[block_count++] = total;
      total += counter[j];
      counter[j] = start[block_count - 1];
    }
    start[block_count] = total;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t* chosen = selection.of(token0 + i, groups, group);
      for (int64_t n = 0; n < selection.count; ++n)
        if (chosen[n] >= 0 && chosen[n] < all_blocks) members[counter[chosen[n]]++] = static_cast<int32_t>(i);
    }
  }
};

// Keys of the block at k0 that token t sees: none if the block starts after the token.
Range seen(int64_t t, int64_t k0, int64_t valid) {
  return {0, static_cast<int32_t>(std::max<int64_t>(std::min(t + 1 - k0, valid), 0))};
}

// The share of each selected block in the attention of a token, summed over the heads of the group.
struct Masses {
  float* out;  // [tokens][groups][count], or null
  int64_t heads, width, count;
  float *sums, *tops, *block_sum, *block_top;  // [rows][width], [rows][width], [rows], [rows]
  int32_t* next;                               // [tokens], the slot of the token's next block: blocks come ascending

  Masses(float* out, int64_t heads, int64_t tokens, int64_t count) : out(out), heads(heads), count(count) {
    if (!out) return;
    const int64_t rows = tokens * heads;
    width = pad(count);
    sums = scratch<float>(kExtra, rows * (2 * width + 2) + tokens);
    tops = sums + rows * width;
    block_sum = tops + rows * width;
    block_top = block_sum + rows;
    next = reinterpret_cast<int32_t*>(block_top + rows);
    std::memset(sums, 0, sizeof(float) * 2 * rows * width);
    std::memset(next, 0, sizeof(int32_t) * tokens);
  }
  Buffers with(Buffers buffers) const {
    if (out) buffers.block_sum = block_sum, buffers.block_top = block_top;
    return buffers;
  }
  // Before the block of these tokens is attended to.
  void begin(const int32_t* tokens, int64_t count_of) const {
    if (!out) return;
    for (int64_t i = 0; i < count_of; ++i)
      std::fill(block_sum + tokens[i] * heads, block_sum + (tokens[i] + 1) * heads, 0.0f);
  }
  void end(const int32_t* tokens, int64_t count_of) const {
    if (!out) return;
    for (int64_t i = 0; i < count_of; ++i) {
      const int32_t slot = next[tokens[i]]++;
      for (int64_t row = tokens[i] * heads; row < (tokens[i] + 1) * heads; ++row)
        sums[row * width + slot] = block_sum[row], tops[row * width + slot] = block_top[row];
    }
  }
  // For one token, whose logarithms of the softmax sums are known.
  void finish(int64_t token, const float* lse, float* to) const {
    for (int64_t c = 0; c < count; c += kLanes) {
      vec total = {};
      for (int64_t r = 0; r < heads; ++r) {
        if (lse[r] == kNone) continue;
        const int64_t at = (token * heads + r) * width + c;
        total = multiply_add(load(sums + at), exp2(load(tops + at) - splat(lse[r] * kLog2E)), total);
      }
      store_part(to + c, total, static_cast<int>(std::min<int64_t>(kLanes, count - c)));
    }
  }
};

void forward(const Inputs& in, const Selection& selection, int64_t size, float* out, float* lse, float* mass) {
  const Shape& shape = in.shape;
  const int64_t h = shape.per_group(), dk_width = pad(shape.dk), dv_width = pad(shape.dv);
  const int64_t block_size = selection.size, width = pad(block_size);
  int64_t* first = scratch<int64_t>(kIndex, in.sequences + 1);
  const int64_t blocks = number_blocks(in.offsets, in.sequences, block_size, first);
  const float* keys_t =
      pack_transposed(kKeysT, in.keys, in.offsets, in.sequences, shape.groups, shape.dk, block_size, first, blocks);
  const float* values =
      pack_rows(kValuesN, in.values, in.offsets, in.sequences, shape.groups, shape.dv, block_size, first, blocks);
  const uint8_t* finite = finite_blocks(in.keys, in.values, in.offsets, in.sequences, shape.groups, shape.dk, shape.dv,
                                        block_size, first, blocks);
  for_each_tile(in, size, [&](int64_t s, int64_t g, int64_t tile) {
    const int64_t length = in.offsets[s + 1] - in.offsets[s], token0 = in.offsets[s];
    const int64_t t0 = tile * size, t1 = std::min(t0 + size, length), rows = (t1 - t0) * h;
    float* query = scratch<float>(kQuery, 2 * rows * dk_width);
    float* gathered = query + rows * dk_width;
    for (int64_t t = t0; t < t1; ++t)
      gather_rows(in.query + ((token0 + t) * shape.heads + g * h) * shape.dk, h, shape.dk, shape.scale() * kLog2E,
                  query + (t - t0) * h * dk_width);
    float* row_state = scratch<float>(kRows, rows * (2 + kSumLanes));
    int32_t* map = reinterpret_cast<int32_t*>(row_state + rows * (1 + kSumLanes));
    Softmax state = {row_state, row_state + rows, scratch<float>(kAccumulator, rows * dv_width)};
    const Masses masses(mass, h, t1 - t0, selection.count);
    const Buffers buffers =
        masses.with({scratch<float>(kScores, rows * width), scratch<float>(kProducts, rows * dv_width)});
    reset(state, rows, dv_width);
    Members members;
    members.collect(selection, shape.groups, g, token0 + t0, t1 - t0, (t1 - 1) / block_size + 1);
    for (int64_t b = 0; b < members.block_count; ++b) {
      const int64_t j = members.blocks[b], k0 = j * block_size;
      const int64_t valid = std::min(block_size, length - k0), packed = (first[s] + j) * shape.groups + g;
      const float* block_keys = keys_t + packed * shape.dk * width;
      const float* block_values = values + packed * block_size * dv_width;
      const int32_t* member = members.members + members.start[b];
      const int64_t count = members.start[b + 1] - members.start[b];
      masses.begin(member, count);
      // Only the block a token stands in reaches past it.
      const bool whole = k0 + valid <= t0 + 1;
      if (whole || finite[packed]) {
        const bool gather = count < t1 - t0;
        Range* ranges = whole ? nullptr : scratch<Range>(kRanges, rows);
        for (int64_t i = 0; i < count && (gather || ranges); ++i) {
          if (gather)
            std::memcpy(gathered + i * h * dk_width, query + member[i] * h * dk_width, sizeof(float) * h * dk_width);
          for (int64_t r = 0; r < h; ++r) {
            map[i * h + r] = static_cast<int32_t>(member[i] * h + r);
            if (ranges) ranges[i * h + r] = seen(t0 + member[i], k0, valid);
          }
        }
        const int64_t high = seen(t0 + member[count - 1], k0, valid).high;
        if (high > 0)
          forward_block(shape, count * h, gather ? gathered : query, block_keys, width, block_values, 0, high, ranges,
                        gather ? map : nullptr, state, buffers);
      } else {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = member[i] * h, high = seen(t0 + member[i], k0, valid).high;
          if (high == 0) continue;
          Softmax part = state.from(row, dv_width);
          forward_block(shape, h, query + row * dk_width, block_keys, width, block_values, 0, high, nullptr, nullptr,
                        part, buffers.from(row));
        }
      }
      masses.end(member, count);
    }
    for (int64_t t = t0; t < t1; ++t) {
      const int64_t at = (token0 + t) * shape.heads + g * h;
      finish_rows(shape, state, (t - t0) * h, h, out + at * shape.dv, lse + at);
      if (mass) masses.finish(t - t0, lse + at, mass + ((token0 + t) * shape.groups + g) * selection.count);
    }
  });
}

// The inverted index: tokens of sequence s, group g that selected block j, ascending.
struct Inverted {
  const int64_t* start;  // [(block of all sequences) * groups + group]
  const int32_t* tokens;
};

Inverted invert(const Inputs& in, const Selection& selection, const int64_t* first, int64_t blocks) {
  const int64_t groups = in.shape.groups, cells = blocks * groups;
  // Every (sequence, group) writes a part of its own: its tokens have at most `count` blocks each.
  int64_t* start = scratch<int64_t>(kMembers, cells + 1);
  int32_t* tokens = scratch<int32_t>(kProducts, in.tokens() * groups * selection.count);
  std::memset(start, 0, sizeof(int64_t) * (cells + 1));
  const auto each = [&](int64_t s, const auto& body) {
    for (int64_t t = in.offsets[s]; t < in.offsets[s + 1]; ++t)
      for (int64_t g = 0; g < groups; ++g) {
        const int32_t* chosen = selection.of(t, groups, g);
        for (int64_t n = 0; n < selection.count; ++n)
          if (chosen[n] >= 0 && chosen[n] < first[s + 1] - first[s])
            body((first[s] + chosen[n]) * groups + g, static_cast<int32_t>(t - in.offsets[s]));
      }
  };
  parallel(in.sequences, [&](int64_t s) { each(s, [&](int64_t cell, int32_t) { ++start[cell + 1]; }); });
  for (int64_t c = 0; c < cells; ++c) start[c + 1] += start[c];
  // Fill by moving starts forward, then shift them back.
  parallel(in.sequences,
           [&](int64_t s) { each(s, [&](int64_t cell, int32_t token) { tokens[start[cell]++] = token; }); });
  for (int64_t c = cells; c > 0; --c) start[c] = start[c - 1];
  start[0] = 0;
  return {start, tokens};
}

}  // namespace

extern "C" {

void selected_forward(const AttentionArguments* given, const int32_t* selected, int64_t block, int64_t count,
                      int64_t tile, float* mass) {
  forward(Inputs::of(*given), {selected, count, block}, tile, given->out, given->lse, mass);
}

void selected_backward(const AttentionArguments* given, const int32_t* selected, int64_t block_size, int64_t count) {
  const Inputs in = Inputs::of(*given);
  const Gradients g = Gradients::of(*given);
  const Selection selection = {selected, count, block_size};
  const Shape& shape = in.shape;
  const int64_t h = shape.per_group(), dk_width = pad(shape.dk);
  clear_gradients(in, g);
  const float* delta = row_deltas(g.out, g.d_out, in.tokens() * shape.heads, shape.dv);
  const Packed packed = pack_for_backward(in, block_size);
  const Inverted inverted = invert(in, selection, packed.first, packed.first[in.sequences]);
  const int64_t chunk = chunk_size(in, block_size), size = tile_tokens(shape);
  for_each_cell(in, chunk, chunk_count(in, chunk), [&](int64_t s, int64_t group, int64_t a, int64_t b) {
    const int64_t length = in.offsets[s + 1] - in.offsets[s], token0 = in.offsets[s];
    const int64_t t_begin = b * chunk, t_end = std::min(t_begin + chunk, length);
    for (int64_t k0 = a * chunk; k0 < std::min((a + 1) * chunk, length); k0 += block_size) {
      const int64_t j = k0 / block_size, cell = (packed.first[s] + j) * shape.groups + group;
      const int32_t* all = inverted.tokens + inverted.start[cell];
      const int32_t* all_end = inverted.tokens + inverted.start[cell + 1];
      const int32_t* from = std::lower_bound(all, all_end, static_cast<int32_t>(t_begin));
      const int32_t* to = std::lower_bound(from, all_end, static_cast<int32_t>(t_end));
      if (from == to) continue;
      const int64_t valid = std::min(block_size, length - k0);
      const KeyBlock block = packed.block(shape, s, group, j);
      while (from < to) {
        const int64_t n = std::min<int64_t>(size, to - from);
        const GradientRows rows =
            gather_gradient_rows(shape, in.query, g.lse, g.d_out, delta, token0, from, 0, n, group, block.width);
        const bool whole = from[0] + 1 >= k0 + valid;  // ascending: the first token sees least
        const auto add = [&](int64_t row, int64_t i) {
          add_query_gradient(shape, rows.d_query + row * dk_width, h,
                             g.d_query + ((token0 + from[i]) * shape.heads + group * h) * shape.dk);
        };
        if (whole || block.finite) {
          Range* ranges = whole ? nullptr : scratch<Range>(kRanges, n * h);
          if (ranges)
            for (int64_t i = 0; i < n; ++i) std::fill(ranges + i * h, ranges + (i + 1) * h, seen(from[i], k0, valid));
          const int64_t high = seen(from[n - 1], k0, valid).high;
          if (high > 0) {
            backward_block(shape, n * h, rows, block, 0, high, ranges);
            for (int64_t i = 0; i < n; ++i) add(i * h, i);
          }
        } else {
          for (int64_t i = 0; i < n; ++i) {
            const int64_t high = seen(from[i], k0, valid).high;
            if (high == 0) continue;
            backward_block(shape, h, rows.from(shape, i * h), block, 0, high, nullptr);
            add(0, i);
          }
        }
        from += n;
      }
      add_key_gradients(shape, block, valid, group, g.d_keys + (token0 + k0) * shape.groups * shape.dk,
                        g.d_values + (token0 + k0) * shape.groups * shape.dv);
    }
  });
}
}
