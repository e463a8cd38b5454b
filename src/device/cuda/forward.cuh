// The forward pass of every branch that streams keys past a tile of queries: FlashAttention with the
// heads of a group packed as rows, so that they share each key and value.
//
// A tile is 64 rows per warpgroup. Keys and values come in steps of WIDE * 64 through a ring of
// shared-memory stages filled by cp.async. P*V of one step runs on the tensor cores while the
// exponentials of the next run on the other units.
#pragma once
#include "matrix.cuh"

constexpr int AHEAD = 3;           // steps on their way
constexpr int STAGES = AHEAD + 1;  // and one whose values P*V still reads

// bytes of shared memory of a tile with `OWN` panels of rows per warpgroup
template <int WARPGROUPS, int WIDE, int OWN> constexpr int STREAM_SHARED = (WARPGROUPS * OWN + STAGES * WIDE * (PK + PV)) * PANEL + 1024;

// Blocks that fit on a multiprocessor by registers
#define FORWARD_BLOCKS(warpgroups, wide) ((warpgroups) >= 3 || (wide) > 1 || PK + PV > 2 ? 1 : 2)

// Starts the copy of 64 rows of D columns that all exist; row(r) counts rows of D.
template <int D, int THREADS, class Row>
__device__ __forceinline__ void load_keys(u32 to, int thread, const bf16* from, Row row) {
  constexpr int CHUNKS = ((D + 63) / 64) * 8;
#pragma unroll
  for (int c = thread; c < 64 * CHUNKS; c += THREADS) {
    const int r = c / CHUNKS, chunk = c % CHUNKS;
    const bool present = D % 64 == 0 || chunk * 8 < D;
    copy16(to + (chunk / 8) * PANEL + swizzle(r, chunk & 7), from + (i64)row(r) * D + (present ? chunk * 8 : 0), present);
  }
}

// A branch says what the tile sees, in key tiles of 64:
//   tiles            how many it streams
//   k, v, row(i, r)  row r of key tile i is row(i, r) of k and v; past the end any row that exists
//   whole(i)         true when every row of the tile sees all 64 keys of tile i
//   range(i, t, lo, hi)  token t sees rows lo <= r < hi of tile i; nothing for i >= tiles
//   token(row), query(row), out(row), lse(row)   of a packed row; token -1 and null past the end
template <int WARPGROUPS, int WIDE, class Branch>
__device__ __forceinline__ void attend(const Branch& branch, unsigned char* shared) {
  constexpr int THREADS = WARPGROUPS * 128, STAGE = WIDE * (PK + PV) * PANEL;
  const int thread = threadIdx.x, group = thread / 128, lane = thread & 31;
  const u32 base = (shared_address(shared) + 1023) & ~1023u;
  const u32 queries = base + group * PK * PANEL;
  const u32 ring = base + WARPGROUPS * PK * PANEL;
  const int steps = (branch.tiles + WIDE - 1) / WIDE;

  const auto request = [&](int k) {  // a stage holds the keys of each tile, then the values of each
    if (k < steps) {
      const u32 stage = ring + (k % STAGES) * STAGE;
#pragma unroll
      for (int j = 0; j < WIDE; j++) {
        load_keys<DK, THREADS>(stage + j * PK * PANEL, thread, branch.k, [&](int r) { return branch.row(k * WIDE + j, r); });
        load_keys<DV, THREADS>(stage + (WIDE * PK + j * PV) * PANEL, thread, branch.v, [&](int r) { return branch.row(k * WIDE + j, r); });
      }
    }
    copies_commit();
  };
  load_panel<DK, 128>(queries, thread & 127, branch.q, [&](int r) { return branch.query(group * 64 + r); });
#pragma unroll
  for (int k = 0; k < AHEAD; k++) request(k);
  copies_wait<AHEAD - 1>();
  matrix_publish();
  __syncthreads();

  const int row = group * 64 + ((thread & 127) / 32) * 16 + lane / 4;  // this thread's rows: row and row + 8
  const int token0 = branch.token(row), token1 = branch.token(row + 8);
  const float c = scale_log2();
  float out[PV][32], score[WIDE][32], top0 = -infinity(), top1 = -infinity(), sum0 = 0.0f, sum1 = 0.0f;
  u32 weights[WIDE][4][4];
#pragma unroll
  for (int p = 0; p < PV; p++)
#pragma unroll
    for (int i = 0; i < 32; i++) out[p][i] = 0.0f;

  const auto multiply = [&](int k) {
#pragma unroll
    for (int j = 0; j < WIDE; j++) product_rows<DK>(score[j], queries, ring + (k % STAGES) * STAGE + j * PK * PANEL);
    matrix_commit();
  };
  const auto accumulate = [&](int k) {
    const u32 values = ring + (k % STAGES) * STAGE + WIDE * PK * PANEL;
#pragma unroll
    for (int j = 0; j < WIDE; j++)
#pragma unroll
      for (int p = 0; p < PV; p++)
#pragma unroll
        for (int s = 0; s < 4; s++) product<ACROSS>(out[p], weights[j][s], values + (j * PV + p) * PANEL, s, true);
    matrix_commit();
  };
  // Scores of step k become weights; the caller waits for the last P*V before it rescales the output.
  const auto soften = [&](int k, float& keep0, float& keep1) {
#pragma unroll
    for (int j = 0; j < WIDE; j++) {
      hold(score[j]);
      if (!branch.whole(k * WIDE + j)) {
        int low0, high0, low1, high1;
        branch.range(k * WIDE + j, token0, low0, high0);
        branch.range(k * WIDE + j, token1, low1, high1);
#pragma unroll
        for (int i = 0; i < 32; i++) {
          const int key = (i / 4) * 8 + (lane & 3) * 2 + (i & 1);
          const bool seen = (i & 2) ? key >= low1 && key < high1 : key >= low0 && key < high0;
          if (!seen) score[j][i] = -infinity();
        }
      }
    }
    float max0 = top0, max1 = top1;
#pragma unroll
    for (int j = 0; j < WIDE; j++)
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        max0 = fmaxf(max0, fmaxf(score[j][i], score[j][i + 1]));
        max1 = fmaxf(max1, fmaxf(score[j][i + 2], score[j][i + 3]));
      }
    max0 = fmaxf(max0, __shfl_xor_sync(~0u, max0, 1));
    max1 = fmaxf(max1, __shfl_xor_sync(~0u, max1, 1));
    max0 = fmaxf(max0, __shfl_xor_sync(~0u, max0, 2));
    max1 = fmaxf(max1, __shfl_xor_sync(~0u, max1, 2));
    const float shift0 = max0 == -infinity() ? 0.0f : max0 * c;  // nothing seen yet: every exponent stays -inf
    const float shift1 = max1 == -infinity() ? 0.0f : max1 * c;
    keep0 = exp2_fast(top0 * c - shift0);
    keep1 = exp2_fast(top1 * c - shift1);
    float add0 = 0.0f, add1 = 0.0f;
#pragma unroll
    for (int j = 0; j < WIDE; j++)
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        score[j][i] = exp2_fast(fmaf(score[j][i], c, -shift0));
        score[j][i + 1] = exp2_fast(fmaf(score[j][i + 1], c, -shift0));
        score[j][i + 2] = exp2_fast(fmaf(score[j][i + 2], c, -shift1));
        score[j][i + 3] = exp2_fast(fmaf(score[j][i + 3], c, -shift1));
        add0 += score[j][i] + score[j][i + 1];
        add1 += score[j][i + 2] + score[j][i + 3];
      }
    top0 = max0;
    top1 = max1;
    sum0 = sum0 * keep0 + add0;
    sum1 = sum1 * keep1 + add1;
  };

  if (steps > 0) {
    float keep0, keep1;
    matrix_begin();
    multiply(0);
    matrix_wait<0>();
    soften(0, keep0, keep1);
#pragma unroll
    for (int j = 0; j < WIDE; j++) as_operand(weights[j], score[j]);
    for (int k = 1; k < steps; k++) {
      copies_wait<AHEAD - 2>();  // step k is here
      matrix_publish();
      __syncthreads();           // for everybody, and everybody has left step k - 2
      request(k - 1 + AHEAD);
      matrix_begin();
      multiply(k);
      accumulate(k - 1);
      matrix_wait<1>();
      soften(k, keep0, keep1);
      matrix_wait<0>();
#pragma unroll
      for (int p = 0; p < PV; p++) {
        hold(out[p]);
        if (__any_sync(~0u, keep0 != 1.0f || keep1 != 1.0f)) {  // the maximum rarely moves after the first steps
#pragma unroll
          for (int i = 0; i < 32; i += 4) {
            out[p][i] *= keep0;
            out[p][i + 1] *= keep0;
            out[p][i + 2] *= keep1;
            out[p][i + 3] *= keep1;
          }
        }
      }
#pragma unroll
      for (int j = 0; j < WIDE; j++) as_operand(weights[j], score[j]);
    }
    matrix_begin();
    accumulate(steps - 1);
    matrix_wait<0>();
#pragma unroll
    for (int p = 0; p < PV; p++) hold(out[p]);
  }
  copies_wait<0>();
  __syncthreads();  // the ring is free: the output goes out through it, 16 bytes a thread

  sum0 += __shfl_xor_sync(~0u, sum0, 1);
  sum1 += __shfl_xor_sync(~0u, sum1, 1);
  sum0 += __shfl_xor_sync(~0u, sum0, 2);
  sum1 += __shfl_xor_sync(~0u, sum1, 2);
  const float scale0 = sum0 > 0.0f ? 1.0f / sum0 : 0.0f, scale1 = sum1 > 0.0f ? 1.0f / sum1 : 0.0f;
  if ((lane & 3) == 0) {
    if (token0 >= 0) *branch.lse(row) = sum0 > 0.0f ? LN2 * (top0 * c + log2f(sum0)) : -infinity();
    if (token1 >= 0) *branch.lse(row + 8) = sum1 > 0.0f ? LN2 * (top1 * c + log2f(sum1)) : -infinity();
  }
#pragma unroll
  for (int p = 0; p < PV; p++)
    store_rows(out[p], shared + (ring - shared_address(shared)) + group * PANEL, scale0, scale1, [&](int r, int chunk) {
      bf16* to = branch.out(group * 64 + r);
      return to != nullptr && p * 64 + chunk * 8 < DV ? to + p * 64 + chunk * 8 : nullptr;
    });
}

// Rows of one group packed without gaps: row r of the tile is token (start + r) / h, head (start + r) % h.
struct PackedRows {
  const bf16 *q, *k, *v;
  bf16* o;
  float* l;
  int first, group, start, rows;  // first token of the sequence, group, first packed row, rows present
  __device__ __forceinline__ int token(int r) const { return r < rows ? (start + r) / HPG : -1; }
  __device__ __forceinline__ i64 index(int r) const {
    return (i64)(first + (start + r) / HPG) * HEADS + group * HPG + (start + r) % HPG;
  }
  __device__ __forceinline__ const bf16* query(int r) const { return r < rows ? q + index(r) * DK : nullptr; }
  __device__ __forceinline__ bf16* out(int r) const { return r < rows ? o + index(r) * DV : nullptr; }
  __device__ __forceinline__ float* lse(int r) const { return l + index(r); }
};
