// dQ of a branch that streams keys past a tile of queries (compressed, window): the tile's scores are
// computed again, dS = P * (dP - delta) stays in registers and dQ = dS * K is written once, so nothing is
// added in memory and the result does not depend on the order of anything. Branches are those of the
// forward pass; `shift` is lse with the gate folded in (see combine_backward).
#pragma once
#include "forward.cuh"

template <int WARPGROUPS, class Branch>
__device__ __forceinline__ void query_gradient(const Branch& branch, unsigned char* shared, const bf16* d_out,
                                               const float* shift, const float* delta, bf16* dq) {
  const int thread = threadIdx.x, group = thread / 128, lane = thread & 31;
  const u32 base = (shared_address(shared) + 1023) & ~1023u;
  const u32 own = base + warpgroup() * (PK + PV) * PANEL;
  Ring<WARPGROUPS, 1> ring;
  ring.base = base + WARPGROUPS * (PK + PV) * PANEL;
  ring.barriers = ring.base + STAGES * ring.STAGE;
  ring.steps = branch.tiles;
  const int steps = ring.steps;
  ring.init();
  ring.start(branch);
  load_panel<DK, 128>(own, thread & 127, branch.q, [&](int r) { return branch.index(group * 64 + r); });
  load_panel<DV, 128>(own + PK * PANEL, thread & 127, d_out, [&](int r) { return branch.index(group * 64 + r); });
  copies_commit();
  const u32 queries = handle(own), gradients = handle(own + PK * PANEL);

  const int row = group * 64 + ((thread & 127) / 32) * 16 + lane / 4;
  const int token0 = branch.token(row), token1 = branch.token(row + 8);
  const float shift0 = token0 >= 0 ? shift[branch.index(row)] : positive_infinity(),
              delta0 = token0 >= 0 ? delta[branch.index(row)] : 0.0f;
  const float shift1 = token1 >= 0 ? shift[branch.index(row + 8)] : positive_infinity(),
              delta1 = token1 >= 0 ? delta[branch.index(row + 8)] : 0.0f;
  const float c = scale_log2();
  float d_query[PK][32], score[32], d_score[32];
  u32 operand[4][4];
#pragma unroll
  for (int p = 0; p < PK; p++)
#pragma unroll
    for (int i = 0; i < 32; i++) d_query[p][i] = 0.0f;

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
  const auto differentiate = [&]() {
    hold(d_score);
#pragma unroll
    for (int i = 0; i < 32; i++) d_score[i] = score[i] * (d_score[i] - ((i & 2) ? delta1 : delta0));
  };
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
    differentiate();
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
      differentiate();
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
  barrier(1 + group, 128);
#pragma unroll
  for (int p = 0; p < PK; p++)
    store_rows(d_query[p], shared + (own - shared_address(shared)), scale(), scale(),
               [&](int, int r, int chunk, uint4 x) {
                 if (group * 64 + r < branch.rows && p * 64 + chunk * 8 < DK)
                   *(uint4*)(dq + branch.index(group * 64 + r) * DK + p * 64 + chunk * 8) = x;
               });
}
