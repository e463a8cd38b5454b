// The forward pass of every branch that streams keys past a tile of queries: FlashAttention with the
// heads of a group packed as rows, so that they share each key and value.
//
// A tile is 64 rows per warpgroup. Keys and values, packed beforehand (pack_tile), come in steps of
// WIDE * 64 through a ring of shared-memory stages. The first warp requests them on the side (a producer warp
// would cost a warpgroup's registers); `full` and `empty` barriers let the warpgroups drift by a step or
// two. P*V of one step runs on the tensor cores while the exponentials of the next run on the other units.
#pragma once
#include "matrix.cuh"

constexpr int STAGES = 4;  // of the ring, unless said otherwise
#ifndef RAISE
#define RAISE 8.0f  // weights stay below 2^RAISE
#endif

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
//   even(i), sees(i, t)  true when every token sees all 64 keys of tile i or none; whether t does
//   range(i, t, lo, hi)  token t sees rows lo <= r < hi of tile i; nothing for i >= tiles
//   token(row), index(row)   of a packed row; -1 past the end
//   finish(row, column, x, lse)   takes eight output columns (bf16) of a row that exists, and its lse (base 2)

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

// The ring: addresses, barriers and requests, the same for the forward pass and for dQ.
template <int WARPGROUPS, int WIDE, int STAGES = ::STAGES> struct Ring {
  static constexpr int STAGE = WIDE * PACKED;
  u32 base, barriers;
  int steps;
  __device__ __forceinline__ u32 stage(int k) const { return base + (k % STAGES) * STAGE; }
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
    const u32 full = barriers + (k % STAGES) * 16;
    bulk_expect(full, STAGE, lane);
#pragma unroll
    for (int j = 0; j < WIDE; j++)
      bulk_copy(stage(k) + j * PACKED, packed_tile(branch, k * WIDE + j), PACKED, full, lane);
    bulk_end(full, lane);
  }
  template <class Branch> __device__ __forceinline__ void start(const Branch& branch) const {
    if (threadIdx.x < 32)
      for (int k = 0; k < STAGES && k < steps; k++) request(branch, k);
  }
  // During step k the stage of step k - 2 is filled again, once every warp has left it.
  template <class Branch> __device__ __forceinline__ void refill(const Branch& branch, int k) const {
    if (threadIdx.x < 32 && k >= 2 && k - 2 + STAGES < steps) {
      barrier_wait(barriers + ((k - 2) % STAGES) * 16 + 8, ((k - 2) / STAGES) & 1);
      request(branch, k - 2 + STAGES);
    }
  }
  __device__ __forceinline__ void wait(int k) const { barrier_wait(barriers + (k % STAGES) * 16, (k / STAGES) & 1); }
  __device__ __forceinline__ void leave(int k) const {  // this warp has read all it needs of step k
    if ((threadIdx.x & 31) == 0) barrier_arrive(barriers + (k % STAGES) * 16 + 8);
  }
};

// The tiles of one branch: steps `begin` and following of the ring, which gets its tiles from `source`. OWN_STAGING:
// the output goes out through a panel of its own, so that the queries stay for another branch.
template <int WARPGROUPS, int WIDE, bool OWN_STAGING, class Branch, class Stages, class Source>
__device__ __forceinline__ void attend_tiles(const Branch& branch, const Stages& ring, const Source& source, int begin,
                                             u32 query_address, unsigned char* staging) {
  // ---- State of this thread: of a warpgroup's 64 rows it has two, a quad of lanes shares them
  const int thread = threadIdx.x, group = thread / 128, lane = thread & 31;
  const int steps = (branch.tiles + WIDE - 1) / WIDE;
  const int row = group * 64 + ((thread & 127) / 32) * 16 + lane / 4;  // this thread's rows: row and row + 8
  const int token0 = branch.token(row), token1 = branch.token(row + 8);
  const u32 queries = handle(query_address);
  const float c = scale_log2();
  float out[PV][32], score[WIDE][32], top0 = -positive_infinity(), top1 = -positive_infinity(), sum0 = 0.0f,
                                      sum1 = 0.0f;
  float shift0 = 0.0f, shift1 = 0.0f, limit0 = -positive_infinity(), limit1 = -positive_infinity();
  u32 weights[WIDE][4][4];
#pragma unroll
  for (int p = 0; p < PV; p++)
#pragma unroll
    for (int i = 0; i < 32; i++) out[p][i] = 0.0f;

  // ---- The parts of a step
  // score [64, WIDE * 64] = Q [64, DK] * K^T of step k
  const auto multiply = [&](int k) {
#pragma unroll
    for (int j = 0; j < WIDE; j++) product_rows<DK>(score[j], queries, handle(ring.stage(begin + k) + j * PACKED));
    matrix_commit();
  };
  // out [64, DV] += P [64, WIDE * 64] * V of step k
  const auto accumulate = [&](int k, u32(&weights)[WIDE][4][4]) {
    const u32 values = handle(ring.stage(begin + k) + PK * PANEL);
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
  // Scores of step k that a row does not see become -inf; in0, in1: whether a row sees anything of it.
  const auto mask = [&](int k, bool& in0, bool& in1) {
    in0 = in1 = true;
#pragma unroll
    for (int j = 0; j < WIDE; j++) {
      hold(score[j]);
      if (WIDE == 1 && branch.even(k)) {
        in0 = branch.sees(k, token0);
        in1 = branch.sees(k, token1);
      } else if (!branch.whole(k * WIDE + j)) {
        int low0, high0, low1, high1;
        branch.range(k * WIDE + j, token0, low0, high0);
        branch.range(k * WIDE + j, token1, low1, high1);
#pragma unroll
        for (int i = 0; i < 32; i++) {
          const int key = (i / 4) * 8 + (lane & 3) * 2 + (i & 1);
          const bool seen = (i & 2) ? key >= low1 && key < high1 : key >= low0 && key < high0;
          if (!seen) score[j][i] = -positive_infinity();
        }
      }
    }
  };
  // Scores of step k become weights, relative to a reference that moves only when a score exceeds it by 2^RAISE:
  // then `raised` is set for the whole warp, and the caller rescales the output once the last P*V is done.
  const auto soften = [&](int k, float& keep0, float& keep1, bool& raised) {
    bool in0, in1;
    mask(k, in0, in1);
    float max0 = score[0][0], max1 = score[0][2];
#pragma unroll
    for (int j = 0; j < WIDE; j++)
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        max0 = fmaxf(max0, fmaxf(score[j][i], score[j][i + 1]));
        max1 = fmaxf(max1, fmaxf(score[j][i + 2], score[j][i + 3]));
      }
    if (!in0) max0 = -positive_infinity();
    if (!in1) max1 = -positive_infinity();
    raised = __any_sync(~0u, max0 > limit0 || max1 > limit1);
    if (raised) {
      max0 = quad_max(max0);
      max1 = quad_max(max1);
      max0 = max0 > limit0 ? max0 : top0;  // a row's bits must not depend on its neighbours: they may be later tokens
      max1 = max1 > limit1 ? max1 : top1;
      shift0 = max0 == -positive_infinity() ? 0.0f : max0 * c;  // nothing seen yet: every exponent stays -inf
      shift1 = max1 == -positive_infinity() ? 0.0f : max1 * c;
      // Exactly 1 where nothing moves: a product and a difference in one instruction would leave the product's
      // rounding.
      keep0 = max0 == top0 ? 1.0f : exp2_approximate(top0 * c - shift0);
      keep1 = max1 == top1 ? 1.0f : exp2_approximate(top1 * c - shift1);
      top0 = max0;
      top1 = max1;
      limit0 = max0 + RAISE / c;
      limit1 = max1 + RAISE / c;
      sum0 *= keep0;
      sum1 *= keep1;
    }
    const float minus0 = in0 ? -shift0 : -positive_infinity(), minus1 = in1 ? -shift1 : -positive_infinity();
    float add0 = 0.0f, add1 = 0.0f;
#pragma unroll
    for (int j = 0; j < WIDE; j++)
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        score[j][i] = exp2_approximate(fmaf(score[j][i], c, minus0));
        score[j][i + 1] = exp2_approximate(fmaf(score[j][i + 1], c, minus0));
        score[j][i + 2] = exp2_approximate(fmaf(score[j][i + 2], c, minus1));
        score[j][i + 3] = exp2_approximate(fmaf(score[j][i + 3], c, minus1));
        add0 += score[j][i] + score[j][i + 1];
        add1 += score[j][i + 2] + score[j][i + 3];
      }
    sum0 += add0;
    sum1 += add1;
  };

  // ---- The pipeline: P*V of step k - 1 runs beside Q*K of step k and its exponentials
  if (steps > 0) {
    float keep0, keep1;
    bool raised;
    ring.wait(begin);
    matrix_begin();
    multiply(0);
    ring.refill(source, begin);
    matrix_wait<0>();
    soften(0, keep0, keep1, raised);
#pragma unroll
    for (int j = 0; j < WIDE; j++) as_operand(weights[j], score[j]);
    for (int k = 1; k < steps; k++) {
      ring.wait(begin + k);
      matrix_begin();
      multiply(k);
      accumulate(k - 1, weights);
      ring.refill(source, begin + k);
      matrix_wait<1>();
      soften(k, keep0, keep1, raised);
      matrix_wait<0>();
      ring.leave(begin + k - 1);
#pragma unroll
      for (int p = 0; p < PV; p++) hold(out[p]);
      if (raised) rescale(keep0, keep1);
#pragma unroll
      for (int j = 0; j < WIDE; j++) as_operand(weights[j], score[j]);
    }
    matrix_begin();
    accumulate(steps - 1, weights);
    matrix_wait<0>();
    ring.leave(begin + steps - 1);
#pragma unroll
    for (int p = 0; p < PV; p++) hold(out[p]);
  }
  if (!OWN_STAGING)
    barrier(1 + group, 128);  // the queries are no longer needed: the output goes out through their panel

  // ---- Output [rows, DV] and log-sum-exp [rows]
  sum0 = quad_sum(sum0);
  sum1 = quad_sum(sum1);
  const float scale0 = sum0 > 0.0f ? 1.0f / sum0 : 0.0f, scale1 = sum1 > 0.0f ? 1.0f / sum1 : 0.0f;
  const float lse0 = sum0 > 0.0f ? top0 * c + log2f(sum0) : -positive_infinity(),
              lse1 = sum1 > 0.0f ? top1 * c + log2f(sum1) : -positive_infinity();
#pragma unroll
  for (int p = 0; p < PV; p++)
    store_rows(out[p], staging, scale0, scale1, [&](int i, int r, int chunk, uint4 x) {
      const float lse =
          __shfl_sync(~0u, i < 2 ? lse0 : lse1, ((i * 4 + lane / 8) & 7) * 4);  // of the quad that owns row r
      if (group * 64 + r < branch.rows && p * 64 + chunk * 8 < DV)
        branch.finish(group * 64 + r, p * 64 + chunk * 8, x, lse);
    });
}

// The queries of this warpgroup's rows, one panel after the other for each warpgroup.
template <class Branch> __device__ __forceinline__ void load_queries(const Branch& branch, u32 own) {
  const int thread = threadIdx.x, group = thread / 128;
  load_panel<DK, 128>(own, thread & 127, branch.q, [&](int r) { return branch.index(group * 64 + r); });
  copies_commit();
  copies_wait<0>();
  matrix_publish();
  barrier(1 + group, 128);
}

template <int WARPGROUPS, int WIDE, class Branch>
__device__ __forceinline__ void attend(const Branch& branch, unsigned char* shared) {
  const u32 origin = shared_address(shared), base = (origin + 1023) & ~1023u, own = base + warpgroup() * PK * PANEL;
  Ring<WARPGROUPS, WIDE> ring;
  ring.base = base + WARPGROUPS * PK * PANEL;
  ring.barriers = ring.base + STAGES * ring.STAGE;
  ring.steps = (branch.tiles + WIDE - 1) / WIDE;
  ring.init();
  ring.start(branch);
  load_queries(branch, own);
  attend_tiles<WARPGROUPS, WIDE, false>(branch, ring, branch, 0, own, shared + (own - origin));
}

// Two branches of the same rows; the second may have no tiles, then nothing of it is written. Shared memory:
// ATTEND_BOTH_SHARED.
constexpr int BOTH_STAGES = PK + PV <= 2 ? 4 : 3;
template <int WARPGROUPS> constexpr int ATTEND_BOTH_SHARED =
    (WARPGROUPS * (PK + 1) + BOTH_STAGES * (PK + PV)) * PANEL + 1024 + 128;
template <int WARPGROUPS, class First, class Second>
__device__ __forceinline__ void attend_both(const First& first, const Second& second, unsigned char* shared) {
  const u32 origin = shared_address(shared), base = (origin + 1023) & ~1023u,
            own = base + warpgroup() * (PK + 1) * PANEL;
  const Both<First, Second> both = {first, second};
  Ring<WARPGROUPS, 1, BOTH_STAGES> ring;
  ring.base = base + WARPGROUPS * (PK + 1) * PANEL;
  ring.barriers = ring.base + BOTH_STAGES * ring.STAGE;
  ring.steps = first.tiles + second.tiles;
  ring.init();
  ring.start(both);
  load_queries(first, own);
  unsigned char* const staging = shared + (own + PK * PANEL - origin);
  attend_tiles<WARPGROUPS, 1, true>(first, ring, both, 0, own, staging);
  if (second.tiles > 0) attend_tiles<WARPGROUPS, 1, true>(second, ring, both, first.tiles, own, staging);
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
  __device__ __forceinline__ bool even(int) const { return false; }
  __device__ __forceinline__ bool sees(int, int) const { return true; }
  __device__ __forceinline__ void finish(int r, int column, uint4 x, float lse) const {
    const i64 at = index(r);
    *(uint4*)(o + at * DV + column) = x;
    if (column == 0) l[at] = LN2 * lse;
  }
};
