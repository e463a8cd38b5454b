// The forward pass of every branch that streams keys past a tile of queries: FlashAttention with the
// heads of a group packed as rows, so that they share each key and value.
//
// A tile is 64 rows per warpgroup. Keys and values, packed beforehand (pack_tile), come in steps of
// WIDE * 64 through a ring of shared-memory stages. The first warp requests them on the side (a producer warp
// would cost a warpgroup's registers); `full` and `empty` barriers let the warpgroups drift by a step or
// two. P*V of one step and Q*K of the next are in flight together; the exponentials of a warpgroup run beside the
// products of the others. Time follows the number of instructions: no unit is full.
#pragma once
#include "matrix.cuh"

constexpr int STAGES = 4;  // of the ring, unless said otherwise
#ifndef RAISE
#define RAISE 10  // a thread's share of a row's sum of weights stays below 2^RAISE in every step
#endif
constexpr float HIGHEST = (float)(1 << RAISE);

// bytes of shared memory of a tile with `OWN` panels of rows per warpgroup
template <int WARPGROUPS, int WIDE, int OWN> constexpr int STREAM_SHARED =
    (WARPGROUPS * OWN + STAGES * WIDE * (PK + PV)) * PANEL + 1024 + 128;  // and the barriers
template <int WARPGROUPS> constexpr int STREAM_THREADS = WARPGROUPS * 128;

// Blocks that fit on a multiprocessor by registers
#define FORWARD_BLOCKS(warpgroups, wide) ((warpgroups) >= 3 || (wide) > 1 || PK + PV > 2 ? 1 : 2)

// A branch defines what the tile sees, in key tiles of 64:
//   tiles            how many it streams
//   packed, tile(i)  key tile i is packed tile tile(i); past the end any tile that exists
//   whole(i)         true when every row of the tile sees all 64 keys of tile i
//   even(i)          true when every token sees all 64 keys of tile i or none
//   Rows             per thread: sees(i, in0, in1) says, from tile to tile, whether its two tokens see anything of it
//   range(i, t, lo, hi)  token t sees rows lo <= r < hi of tile i, if it sees anything; nothing for i >= tiles
//   has_low(i)       false when lo is never above 0
//   token(row), index(row)   of a packed row; -1 past the end
//   Ahead            what finish needs from memory; load(ahead, row, column) requests it before the last product ends
//   finish(row, column, x, lse, ahead)   takes eight output columns (bf16) of a row that exists, and its lse (base 2)

template <class Branch> __device__ __forceinline__ const unsigned char* packed_tile(const Branch& branch, int i) {
  return branch.packed + ((i64)branch.tile(i) * GROUPS + branch.group) * PACKED;
}

// Two branches of the same rows, one after the other through one ring: the second one's first tiles arrive while the
// first one's last are worked on.
template <class First, class Second> struct Both {
  const First& first;
  const Second& second;
  __device__ __forceinline__ bool whole(int i) const {
    return i < first.tiles ? first.whole(i) : second.whole(i - first.tiles);
  }
  __device__ __forceinline__ void range(int i, int t, int& low, int& high) const {
    if (i < first.tiles) first.range(i, t, low, high);
    else second.range(i - first.tiles, t, low, high);
  }
};
template <class First, class Second>
__device__ __forceinline__ const unsigned char* packed_tile(const Both<First, Second>& both, int i) {
  return i < both.first.tiles ? packed_tile(both.first, i) : packed_tile(both.second, i - both.first.tiles);
}

// Runs of consecutive packed tiles, streamed one after the other: lane i of the first warp knows run i.
constexpr i64 PACKED_STRIDE = (i64)GROUPS * PACKED;  // from one packed tile of a group to the next
struct Runs {
  const unsigned char* from = nullptr;  // of this lane's run: where step 0 would be
  int end = 0;                          // step after its last one
  int count = 0, steps = 0;             // runs so far, and their steps
  mutable const unsigned char* current = nullptr;  // of the run that requests have reached
  mutable int until = 0;
  __device__ __forceinline__ void add(const unsigned char* first, int tiles) {
    if ((int)(threadIdx.x & 31) >= count++) {
      from = first - steps * PACKED_STRIDE;
      end = steps + tiles;
    }
    steps += tiles;
  }
};
__device__ __forceinline__ const unsigned char* packed_tile(const Runs& runs, int k) {
  if (k >= runs.until) {
    const int run = __ffs(__ballot_sync(~0u, k < runs.end)) - 1;
    runs.current = (const unsigned char*)__shfl_sync(~0u, (u64)runs.from, run);
    runs.until = __shfl_sync(~0u, runs.end, run);
  }
  return runs.current + k * PACKED_STRIDE;
}

// The ring: addresses, barriers and requests, the same for the forward pass and for dQ.
template <int WARPGROUPS, int WIDE, int STAGES = ::STAGES> struct Ring {
  static constexpr int STAGE = WIDE * PACKED;
  u32 base, barriers;
  int steps;
  // Steps are counted without a sign: a remainder of four is then one instruction.
  __device__ __forceinline__ u32 stage(u32 k) const { return base + k % STAGES * STAGE; }
  __device__ __forceinline__ u32 full(u32 k) const { return barriers + k % STAGES * 16; }
  __device__ __forceinline__ u32 empty(u32 k) const { return barriers + k % STAGES * 16 + 8; }
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; i++) {
        barrier_init(barriers + i * 16, FULL_ARRIVALS);
        barrier_init(barriers + i * 16 + 8, WARPGROUPS * 4);
      }
      matrix_publish();
    }
    __syncthreads();
  }
  template <class Branch> __device__ __forceinline__ void request(const Branch& branch, int k) const {
    const int lane = threadIdx.x & 31;
    bulk_expect(full(k), STAGE, lane);
#pragma unroll
    for (int j = 0; j < WIDE; j++)
      bulk_copy(stage(k) + j * PACKED, packed_tile(branch, k * WIDE + j), PACKED, full(k), lane);
    bulk_end(full(k), lane);
  }
  // Requests the first steps, from `from` to `to`.
  template <class Branch> __device__ __forceinline__ void start(const Branch& branch, int from, int to) const {
    if (threadIdx.x < 32)
      for (int k = from; k < STAGES && k < to; k++) request(branch, k);
  }
  template <class Branch> __device__ __forceinline__ void start(const Branch& branch) const { start(branch, 0, steps); }
  // During step k the stage of step k - 2 is filled again, once every warp has left it.
  template <class Branch> __device__ __forceinline__ void refill(const Branch& branch, int k) const {
    if (threadIdx.x < 32 && k >= 2 && k - 2 + STAGES < steps) {
      barrier_wait(empty(k - 2), (u32)(k - 2) / STAGES & 1);
      request(branch, k - 2 + STAGES);
    }
  }
  __device__ __forceinline__ void wait(u32 k) const { barrier_wait(full(k), k / STAGES & 1); }
  __device__ __forceinline__ void leave(u32 k) const {  // this warp has read all it needs of step k
    if ((threadIdx.x & 31) == 0) barrier_arrive(empty(k));
  }
};

// The tiles of one branch: steps `begin` and following of the ring, which gets its tiles from `source`.
template <int WARPGROUPS, int WIDE, class Branch, class Stages, class Source>
__device__ __forceinline__ void attend_tiles(const Branch& branch, const Stages& ring, const Source& source, int begin,
                                             u32 query_address) {
  // ---- State of this thread: of a warpgroup's 64 rows it has two, a quad of lanes shares them
  const int thread = threadIdx.x, group = thread / 128, lane = thread & 31;
  const int steps = uniform((branch.tiles + WIDE - 1) / WIDE);
  const int row = group * 64 + ((thread & 127) / 32) * 16 + lane / 4;  // this thread's rows: row and row + 8
  const int token0 = branch.token(row), token1 = branch.token(row + 8);
  const u32 queries = handle(query_address), stages = handle(ring.base);
  const auto stage = [&](int k) { return advance(stages, (u32)(begin + k) % STAGES * (WIDE * PACKED)); };
  const float c = scale_log2();
  float out[PV][32], score[WIDE][32], top0 = -positive_infinity(), top1 = -positive_infinity(), sum0 = 0.0f,
                                      sum1 = 0.0f;
  float shift0 = 0.0f, shift1 = 0.0f;
  u32 weights[WIDE][4][4];
  typename Branch::Rows rows(branch, token0, token1);
  bool in0 = true, in1 = true;  // a row sees at least one key of the step
#pragma unroll
  for (int p = 0; p < PV; p++)
#pragma unroll
    for (int i = 0; i < 32; i++) out[p][i] = 0.0f;

  // ---- The parts of a step
  // score [64, WIDE * 64] = Q [64, DK] * K^T of step k
  const auto multiply = [&](int k) {
#pragma unroll
    for (int j = 0; j < WIDE; j++) product_rows<DK>(score[j], queries, advance(stage(k), j * PACKED));
    matrix_commit();
  };
  // out [64, DV] += P [64, WIDE * 64] * V of step k
  const auto accumulate = [&](int k, u32(&weights)[WIDE][4][4]) {
    const u32 values = advance(stage(k), PK * PANEL);
#pragma unroll
    for (int j = 0; j < WIDE; j++)
#pragma unroll
      for (int p = 0; p < PV; p++)
#pragma unroll
        for (int s = 0; s < 4; s++)
          product<ACROSS>(out[p], weights[j][s], advance(values, j * PACKED + p * PANEL), s, true);
    matrix_commit();
  };
  const auto rescale = [&](float keep0, float keep1) {
#pragma unroll
    for (int p = 0; p < PV; p++)
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        out[p][i] *= keep0;
        out[p][i + 1] *= keep0;
        out[p][i + 2] *= keep1;
        out[p][i + 3] *= keep1;
      }
  };
  // Scores of step k that a row does not see become -inf, unless it sees nothing of it.
  const auto mask = [&](int k) {
#pragma unroll
    for (int j = 0; j < WIDE; j++) {
      hold(score[j]);
      if (!(WIDE == 1 && branch.even(k)) && !branch.whole(k * WIDE + j)) {
        int low0, high0, low1, high1;
        branch.range(k * WIDE + j, token0, low0, high0);
        branch.range(k * WIDE + j, token1, low1, high1);
        // Key (i / 4) * 8 + (lane & 3) * 2 + (i & 1): what depends on the lane goes to the other side. Most masks have
        // one border.
        const int own = (lane & 3) * 2;
        high0 -= own;
        high1 -= own;
#pragma unroll
        for (int i = 0; i < 32; i++)
          if (!((i / 4) * 8 + (i & 1) < ((i & 2) ? high1 : high0))) score[j][i] = -positive_infinity();
        if (branch.has_low(k * WIDE + j)) {
          low0 -= own;
          low1 -= own;
#pragma unroll
          for (int i = 0; i < 32; i++)
            if ((i / 4) * 8 + (i & 1) < ((i & 2) ? low1 : low0)) score[j][i] = -positive_infinity();
        }
      }
    }
  };
  // Weights of the scores relative to the rows' references, and this thread's share of their sums.
  const auto weigh = [&](float& add0, float& add1) {
    const float minus0 = in0 ? -shift0 : -positive_infinity(), minus1 = in1 ? -shift1 : -positive_infinity();
#pragma unroll
    for (int j = 0; j < WIDE; j++)
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        const float a = exp2_approximate(fmaf(score[j][i], c, minus0)),
                    b = exp2_approximate(fmaf(score[j][i + 1], c, minus0)),
                    d = exp2_approximate(fmaf(score[j][i + 2], c, minus1)),
                    e = exp2_approximate(fmaf(score[j][i + 3], c, minus1));
        add0 = j + i == 0 ? a + b : add0 + (a + b);
        add1 = j + i == 0 ? d + e : add1 + (d + e);
        weights[j][i / 8][i / 2 % 4] = pack_bf16(a, b);
        weights[j][i / 8][i / 2 % 4 + 1] = pack_bf16(d, e);
      }
  };
  // Scores become weights. A row's reference is the largest score of the first step in which it sees anything. It moves
  // only when a thread's share of the row's sum exceeds 2^RAISE: the sum is needed anyway, a maximum is not. Then the
  // weights are computed again. A shift that is NaN, no reference yet, has the same effect. The last P*V must be done.
  const auto soften = [&](bool first) {
    float add0, add1;
    u32 over0 = ~0u, over1 = ~0u;
    if (!first) {
      weigh(add0, add1);
      over0 = __ballot_sync(~0u, !(add0 <= HIGHEST));
      over1 = __ballot_sync(~0u, !(add1 <= HIGHEST));
    }
    if ((over0 | over1) != 0) {
      float max0 = score[0][0], max1 = score[0][2];
#pragma unroll
      for (int j = 0; j < WIDE; j++)
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
          max0 = fmaxf(max0, fmaxf(score[j][i], score[j][i + 1]));
          max1 = fmaxf(max1, fmaxf(score[j][i + 2], score[j][i + 3]));
        }
      max0 = quad_max(in0 ? max0 : -positive_infinity());
      max1 = quad_max(in1 ? max1 : -positive_infinity());
      // A row's bits must not depend on its neighbours, which may be later tokens: its own quad decides.
      if (!(over0 >> (lane & 28) & 15)) max0 = top0;
      if (!(over1 >> (lane & 28) & 15)) max1 = top1;
      shift0 = max0 == -positive_infinity() ? 0.0f : max0 * c;  // nothing seen yet: every exponent stays -inf
      shift1 = max1 == -positive_infinity() ? 0.0f : max1 * c;
      // Exactly 1 where nothing moves: a product and a difference in one instruction would leave the product's
      // rounding.
      const float keep0 = max0 == top0 ? 1.0f : exp2_approximate(top0 * c - shift0),
                  keep1 = max1 == top1 ? 1.0f : exp2_approximate(top1 * c - shift1);
      top0 = max0;
      top1 = max1;
      sum0 *= keep0;
      sum1 *= keep1;
      if (!first) rescale(keep0, keep1);
      weigh(add0, add1);
      if (top0 == -positive_infinity() && token0 >= 0) shift0 = not_a_number();
      if (top1 == -positive_infinity() && token1 >= 0) shift1 = not_a_number();
    }
    sum0 += add0;
    sum1 += add1;
  };

  // ---- The pipeline: P*V of step k - 1 runs beside Q*K of step k and its exponentials
  if (steps > 0) {
    rows.sees(0, in0, in1);
    ring.wait(begin);
    matrix_begin();
    multiply(0);
    ring.refill(source, begin);
    matrix_wait<0>();
    mask(0);
    soften(true);
    for (int k = 1; k < steps; k++) {
      rows.sees(k, in0, in1);
      ring.wait(begin + k);
      matrix_begin();
      multiply(k);
      accumulate(k - 1, weights);
      ring.refill(source, begin + k);
      matrix_wait<1>();
      mask(k);
      matrix_wait<0>();
      ring.leave(begin + k - 1);
#pragma unroll
      for (int p = 0; p < PV; p++) hold(out[p]);
      soften(false);
    }
  }
  // A thread writes columns 8 * (lane % 4) and 32 + 8 * (lane % 4) of its two rows.
  typename Branch::Ahead ahead[4];
  const auto load_ahead = [&](int p) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      branch.load(ahead[i], min(row + (i & 1) * 8, branch.rows - 1),
                  min(p * 64 + (i / 2) * 32 + (lane & 3) * 8, DV - 8));
  };
  load_ahead(0);
  if (steps > 0) {
    matrix_begin();
    accumulate(steps - 1, weights);
    matrix_wait<0>();
    ring.leave(begin + steps - 1);
#pragma unroll
    for (int p = 0; p < PV; p++) hold(out[p]);
  }

  // ---- Output [rows, DV] and log-sum-exp [rows]
  sum0 = quad_sum(sum0);
  sum1 = quad_sum(sum1);
  const float scale0 = sum0 > 0.0f ? reciprocal_approximate(sum0) : 0.0f,
              scale1 = sum1 > 0.0f ? reciprocal_approximate(sum1) : 0.0f;
  const float lse0 = sum0 > 0.0f ? top0 * c + Branch::log2_of(sum0) : -positive_infinity(),
              lse1 = sum1 > 0.0f ? top1 * c + Branch::log2_of(sum1) : -positive_infinity();
#pragma unroll
  for (int p = 0; p < PV; p++) {
    uint4 x[4];
    quad_rows(x, out[p], scale0, scale1);
    if (p > 0) load_ahead(p);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = row + (i & 1) * 8, column = p * 64 + (i / 2) * 32 + (lane & 3) * 8;
      if (r < branch.rows && column < DV) branch.finish(r, column, x[i], i & 1 ? lse1 : lse0, ahead[i]);
    }
  }
}

// Starts the copy of the queries of this warpgroup's rows, one panel after the other for each warpgroup.
template <class Branch> __device__ __forceinline__ void load_queries(const Branch& branch, u32 own) {
  const int thread = threadIdx.x, group = thread / 128;
  load_panel<DK, 128>(own, thread & 127, branch.q, [&](int r) { return branch.index(group * 64 + r); });
  copies_commit();
}
__device__ __forceinline__ void await_queries() {
  copies_wait<0>();
  matrix_publish();
  barrier(1 + threadIdx.x / 128, 128);
}

template <int WARPGROUPS, int WIDE, class Branch>
__device__ __forceinline__ void attend(const Branch& branch, unsigned char* shared) {
  const u32 base = (shared_address(shared) + 1023) & ~1023u, own = base + warpgroup() * PK * PANEL;
  Ring<WARPGROUPS, WIDE> ring;
  ring.base = base + WARPGROUPS * PK * PANEL;
  ring.barriers = ring.base + STAGES * ring.STAGE;
  ring.steps = (branch.tiles + WIDE - 1) / WIDE;
  load_queries(branch, own);
  ring.init();
  ring.start(branch);
  await_queries();
  attend_tiles<WARPGROUPS, WIDE>(branch, ring, branch, 0, own);
}

// Up to COUNT tiles of rows one after the other: queries and first keys of a tile arrive while the one before is worked
// on. advance(tile) makes the first tile the next one and returns false after the last. A tile has
//   add_runs(runs)   what it streams
//   attend_all<WARPGROUPS>(ring, runs, begin, queries)   attend_tiles for each of its branches; returns its steps
// Shared memory: STREAM_SHARED with twice the panels of queries.
template <int WARPGROUPS, int COUNT, class Tile, class Advance>
__device__ __forceinline__ void attend_each(Tile& tile, unsigned char* shared, const Advance& advance) {
  const u32 base = (shared_address(shared) + 1023) & ~1023u, own = base + warpgroup() * 2 * PK * PANEL;
  Ring<WARPGROUPS, 1> ring;
  ring.base = base + WARPGROUPS * 2 * PK * PANEL;
  ring.barriers = ring.base + STAGES * ring.STAGE;
  load_queries(tile.packed_rows(), own);
  ring.init();
  Runs runs;
  if (threadIdx.x < 32) {
    tile.add_runs(runs);
    const int first = runs.steps;
    ring.start(runs, 0, first);
    Tile later = tile;
#pragma unroll 1
    for (int i = 1; i < COUNT && advance(later); i++) later.add_runs(runs);
    ring.start(runs, first, runs.steps);
  }
  ring.steps = runs.steps;
  int begin = 0;
#pragma unroll 1
  for (int i = 0;; i++) {
    await_queries();
    Tile later = tile;
    const bool more = i + 1 < COUNT && advance(later);
    if (more) load_queries(later.packed_rows(), own + (~i & 1) * PK * PANEL);
    begin += tile.template attend_all<WARPGROUPS>(ring, runs, begin, own + (i & 1) * PK * PANEL);
    if (!more) break;
    advance(tile);
  }
}

// Two branches of the same rows, the window and another. second.prepare() is called once queries and the first branch's
// tiles have been requested: then the first warp knows the second branch's tiles. All warps know them after
// second.complete(), which follows a barrier of the warpgroup. Shared memory: STREAM_SHARED.
template <int WARPGROUPS, class First, class Second>
__device__ __forceinline__ void attend_both(const First& first, Second& second, unsigned char* shared) {
  const u32 base = (shared_address(shared) + 1023) & ~1023u, own = base + warpgroup() * PK * PANEL;
  const Both<First, Second> both = {first, second};
  Ring<WARPGROUPS, 1> ring;
  ring.base = base + WARPGROUPS * PK * PANEL;
  ring.barriers = ring.base + STAGES * ring.STAGE;
  load_queries(first, own);
  ring.init();
  ring.start(both, 0, first.tiles);
  second.prepare();
  ring.steps = first.tiles + second.tiles;
  ring.start(both, first.tiles, ring.steps);
  await_queries();
  second.complete();
  ring.steps = first.tiles + second.tiles;
  if constexpr (WINDOW > 0) attend_tiles<WARPGROUPS, 1>(first, ring, both, 0, own);
  attend_tiles<WARPGROUPS, 1>(second, ring, both, first.tiles, own);
}

// Rows of one group packed without gaps: row r of the tile is token (start + r) / h, head (start + r) % h.
struct PackedRows {
  const bf16* q;
  const unsigned char* packed;
  bf16* o;
  float* l;
  int first, group, start, rows;  // first token of the sequence, group, first packed row, rows present
  __device__ __forceinline__ int token(int r) const { return r < rows ? (int)((u32)(start + r) / HPG) : -1; }
  __device__ __forceinline__ i64 index(int r) const {
    const int token = (u32)(start + r) / HPG;  // (first + token) * HEADS + group * HPG + (start + r) % HPG
    return r < rows ? (i64)first * HEADS + token * (HEADS - HPG) + group * HPG + start + r : -1;
  }
  struct Rows {
    __device__ __forceinline__ Rows(const PackedRows&, int, int) {}
    __device__ __forceinline__ void sees(int, bool&, bool&) const {}
  };
  __device__ __forceinline__ bool even(int) const { return false; }
  __device__ __forceinline__ bool has_low(int) const { return false; }
  static __device__ __forceinline__ float log2_of(float x) { return log2_approximate(x); }
  struct Ahead {};
  __device__ __forceinline__ void load(Ahead&, int, int) const {}
  __device__ __forceinline__ void finish(int r, int column, uint4 x, float lse, const Ahead& = {}) const {
    const i64 at = index(r);
    store16(o + at * DV + column, x);
    if (column == 0) l[at] = LN2 * lse;
  }
};
