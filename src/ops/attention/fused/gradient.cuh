// dQ of the branches that stream keys past a tile of queries: compressed and window, one after the other through one
// ring and into one sum, or the window alone. The tile's scores are computed again, dS = P * (dP - delta) stays in
// registers and dQ = dS * K is written once, so nothing is added in memory and the result does not depend on the order
// of anything. Branches are those of the forward pass; `shift` is lse with the gate folded in (see combine_backward).
#pragma once
#include "forward.cuh"

// Interface that one branch and two branches of the same rows (Both) share: their rows, the number of tiles, and which
// of PARTS log-sum-exps and deltas belong to tile i.
template <class Branch> struct Streamed {
  static constexpr int PARTS = 1;
  static __device__ __forceinline__ const Branch& rows(const Branch& branch) { return branch; }
  static __device__ __forceinline__ int tiles(const Branch& branch) { return branch.tiles; }
  static __device__ __forceinline__ int part(const Branch&, int) { return 0; }
};
template <class First, class Second> struct Streamed<Both<First, Second>> {
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ const First& rows(const Both<First, Second>& both) { return both.first; }
  static __device__ __forceinline__ int tiles(const Both<First, Second>& both) {
    return both.first.tiles + both.second.tiles;
  }
  static __device__ __forceinline__ int part(const Both<First, Second>& both, int i) { return i >= both.first.tiles; }
};

// `shift` and `delta` of each part.
template <int WARPGROUPS, class Branch, int PARTS>
__device__ __forceinline__ void query_gradient(const Branch& branch, unsigned char* shared, const bf16* d_out,
                                               const float* const (&shift)[PARTS], const float* const (&delta)[PARTS],
                                               bf16* dq) {
  static_assert(PARTS == Streamed<Branch>::PARTS, "a log-sum-exp for every branch");
  // ---- Shared memory: Q and dO of each warpgroup's 64 rows, then the ring of K and V tiles
  const auto& rows = Streamed<Branch>::rows(branch);
  const int thread = threadIdx.x, group = thread / 128, lane = thread & 31;
  const u32 base = (shared_address(shared) + 1023) & ~1023u;
  const u32 own = base + warpgroup() * (PK + PV) * PANEL;
  Ring<WARPGROUPS, 1> ring;
  ring.base = base + WARPGROUPS * (PK + PV) * PANEL;
  ring.barriers = ring.base + STAGES * ring.STAGE;
  ring.steps = Streamed<Branch>::tiles(branch);
  const int steps = ring.steps;
  ring.init();
  ring.start(branch);
  load_panel<DK, 128>(own, thread & 127, rows.q, [&](int r) { return rows.index(group * 64 + r); });
  load_panel<DV, 128>(own + PK * PANEL, thread & 127, d_out, [&](int r) { return rows.index(group * 64 + r); });
  copies_commit();
  const u32 queries = handle(own), gradients = handle(own + PK * PANEL);

  // ---- State of this thread: of a warpgroup's 64 rows it has two, a quad of lanes shares them
  const int row = group * 64 + ((thread & 127) / 32) * 16 + lane / 4;
  const int token0 = rows.token(row), token1 = rows.token(row + 8);
  float shifts[PARTS][2], deltas[PARTS][2];  // of the thread's two rows
#pragma unroll
  for (int b = 0; b < PARTS; b++) {
    shifts[b][0] = token0 >= 0 ? shift[b][rows.index(row)] : positive_infinity();
    shifts[b][1] = token1 >= 0 ? shift[b][rows.index(row + 8)] : positive_infinity();
    deltas[b][0] = token0 >= 0 ? delta[b][rows.index(row)] : 0.0f;
    deltas[b][1] = token1 >= 0 ? delta[b][rows.index(row + 8)] : 0.0f;
  }
  const float c = scale_log2();
  float d_query[PK][32], score[32], d_score[32];
  u32 operand[4][4];
#pragma unroll
  for (int p = 0; p < PK; p++)
#pragma unroll
    for (int i = 0; i < 32; i++) d_query[p][i] = 0.0f;

  // ---- The parts of a step: S = Q*K and dP = dO*V; dQ += dS*K; P from S; dS from P and dP
  const auto multiply = [&](int k) {
    const u32 stage = handle(ring.stage(k));
    product_rows<DK>(score, queries, stage);
    matrix_commit();
    product_rows<DV>(d_score, gradients, advance(stage, PK * PANEL));
    matrix_commit();
  };
  const auto accumulate = [&](int k) {
#pragma unroll
    for (int p = 0; p < PK; p++)
#pragma unroll
      for (int s = 0; s < 4; s++)
        product<ACROSS>(d_query[p], operand[s], advance(handle(ring.stage(k)), p * PANEL), s, true);
    matrix_commit();
  };
  const auto weigh = [&](int k) {
    hold(score);
    const bool last = PARTS > 1 && Streamed<Branch>::part(branch, k) > 0;
    const float shift0 = last ? shifts[PARTS - 1][0] : shifts[0][0];
    const float shift1 = last ? shifts[PARTS - 1][1] : shifts[0][1];
#pragma unroll
    for (int i = 0; i < 32; i++) score[i] = exp2_approximate(fmaf(score[i], c, (i & 2) ? -shift1 : -shift0));
    if (!branch.whole(k)) {
      int low0, high0, low1, high1;
      branch.range(k, token0, low0, high0);
      branch.range(k, token1, low1, high1);
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const int key = (i / 4) * 8 + (lane & 3) * 2 + (i & 1);
        const bool seen = (i & 2) ? key >= low1 && key < high1 : key >= low0 && key < high0;
        if (!seen) score[i] = 0.0f;
      }
    }
  };
  const auto differentiate = [&](int k) {
    hold(d_score);
    const bool last = PARTS > 1 && Streamed<Branch>::part(branch, k) > 0;
    const float delta0 = last ? deltas[PARTS - 1][0] : deltas[0][0];
    const float delta1 = last ? deltas[PARTS - 1][1] : deltas[0][1];
#pragma unroll
    for (int i = 0; i < 32; i++) d_score[i] = score[i] * (d_score[i] - ((i & 2) ? delta1 : delta0));
  };
  // ---- The pipeline: dS*K of step k - 1 runs beside the products and exponentials of step k
  copies_wait<0>();
  matrix_publish();
  barrier(1 + group, 128);
  if (steps > 0) {
    ring.wait(0);
    matrix_begin();
    multiply(0);
    matrix_wait<1>();
    weigh(0);
    matrix_wait<0>();
    differentiate(0);
    as_operand(operand, d_score);
    for (int k = 1; k < steps; k++) {
      ring.wait(k);
      matrix_begin();
      multiply(k);
      accumulate(k - 1);
      ring.refill(branch, k);
      matrix_wait<2>();
      weigh(k);
      matrix_wait<1>();
      differentiate(k);
      matrix_wait<0>();
      ring.leave(k - 1);
#pragma unroll
      for (int p = 0; p < PK; p++) hold(d_query[p]);
      as_operand(operand, d_score);
    }
    matrix_begin();
    accumulate(steps - 1);
    matrix_wait<0>();
#pragma unroll
    for (int p = 0; p < PK; p++) hold(d_query[p]);
  }
  // ---- Output: dQ [rows, DK]
  barrier(1 + group, 128);
#pragma unroll
  for (int p = 0; p < PK; p++)
    store_rows(d_query[p], shared + (own - shared_address(shared)), scale(), scale(),
               [&](int, int r, int chunk, uint4 x) {
                 if (group * 64 + r < rows.rows && p * 64 + chunk * 8 < DK)
                   *(uint4*)(dq + rows.index(group * 64 + r) * DK + p * 64 + chunk * 8) = x;
               });
}
