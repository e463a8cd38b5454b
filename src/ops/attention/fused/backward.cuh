// dK and dV of every branch: one block holds 64 keys and values and walks the queries that see them, 64
// packed rows (token, head of the group) at a time. Four products a step: S = K*Q, dP = V*dO, and
// dV += P*dO, dK += dS*Q in registers over the whole walk. The selected branch, whose queries are
// scattered, also writes its share of dQ = dS*K, one row per (token, head, slot), to be summed later.
//
// Scores are kept transposed (keys are rows), so P and dS are A operands without leaving registers.
// The gate is folded into lse (see combine_backward): P here is gate * softmax, and dS = P * (dP - delta).
#pragma once
#include "matrix.cuh"

#define BACKWARD_BLOCKS (PK + PV <= 2 ? 3 : 1)

// Stages of queries. With three the next step is made ready while the last products run; with dQ there is room for two.
template <bool WITH_DQ> constexpr int BACKWARD_STAGES = WITH_DQ || PK + PV > 2 ? 2 : 3;
constexpr int BACKWARD_SHARED = (1 + BACKWARD_STAGES<false>)*(PK + PV) * PANEL + BACKWARD_STAGES<false> * 1024 + 1024;
constexpr int BACKWARD_SHARED_DQ =
    (1 + BACKWARD_STAGES<true>)*(PK + PV) * PANEL + BACKWARD_STAGES<true> * 1024 + 1024 + 2 * PANEL;

static __device__ const float ABSENT[2] = {3.0e38f, 0.0f};  // shift and delta of rows past the end

// Queries that follow each other: tokens start, start + 1, ... of the sequence.
struct ContiguousRows {
  int first, group, start, tokens;
  __device__ __forceinline__ int token(int i) const { return start + i; }
  __device__ __forceinline__ u32 row(int r) const {  // (first + start + r / h) * H + group * h + r % h
    return (u32)(first + start) * HEADS + group * HPG + r + (u32)r / HPG * (HEADS - HPG);
  }
};

// dS = P * (dP - delta), transposed [64 keys, 64 rows], in place of dP. p: P as an operand; delta: of the 64 rows, f32
// in shared memory.
__device__ __forceinline__ void score_gradients(float (&d_score)[32], const u32 (&p)[4][4], const unsigned char* delta,
                                                int lane) {
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const float2 d = *(const float2*)(delta + (n * 8 + (lane & 3) * 2) * 4);
    const u32 upper = p[n / 2][(n % 2) * 2], lower = p[n / 2][(n % 2) * 2 + 1];
    d_score[n * 4] = low_bf16(upper) * (d_score[n * 4] - d.x);
    d_score[n * 4 + 1] = high_bf16(upper) * (d_score[n * 4 + 1] - d.y);
    d_score[n * 4 + 2] = low_bf16(lower) * (d_score[n * 4 + 2] - d.x);
    d_score[n * 4 + 3] = high_bf16(lower) * (d_score[n * 4 + 3] - d.y);
  }
}

// A branch defines which queries the block walks:
//   tokens, token(i)      how many, and which position in the sequence the i-th is
//   row(r)                index of (token, head) of packed row r in q, d_out, lse and delta
//   whole(from, to)       true when the tokens of a step (first and last given) all see all 64 keys
//   range(t, lo, hi)      token t sees keys lo <= r < hi
//   share(r)              where packed row r's share of dQ goes (when WITH_DQ)
// DIRECT: no other block has these keys, dk and dv are stored as bf16; otherwise they are added in fp32, or with
// `apart` stored as this block's part of the sum, to be added in order later. stride: rows of dk and dv from key to
// key.
template <bool DIRECT, bool WITH_DQ, class Branch, class Out>
__device__ __forceinline__ void backward(const Branch& branch, unsigned char* shared, const bf16* q, const bf16* d_out,
                                         const float* lse, const float* delta, const bf16* k, const bf16* v, int keys,
                                         Out* dk, Out* dv, int stride = GROUPS, bool apart = false) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const u32 origin = shared_address(shared), base = (origin + 1023) & ~1023u;
  const u32 key_panel = base, value_panel = base + PK * PANEL, ring = value_panel + PV * PANEL;
  constexpr int COUNT = BACKWARD_STAGES<WITH_DQ>, STAGE = (PK + PV) * PANEL;
  const u32 ds_panel = ring + COUNT * STAGE;              // and a panel to write dQ through
  const u32 side = ds_panel + (WITH_DQ ? 2 * PANEL : 0);  // per stage: lse[64], delta[64], low[64], high[64]
  unsigned char* const generic = shared - origin;
  const int rows = branch.tokens * HPG, steps = (rows + 63) / 64;

  // ---- The queries of a step: Q [64, DK], dO [64, DV], lse and delta [64] into one stage
  const u32 keys_at = handle(key_panel), values_at = handle(value_panel);
  const auto request = [&](int i, int slot) {
    if (i < steps) {
      const u32 stage = ring + slot * STAGE;
      // Absent rows repeat the last one with an immense shift: all that they add is zero.
      const auto row = [&](int r) { return branch.row(min(i * 64 + r, rows - 1)); };
      if constexpr (DK == 64 && DV == 64) {  // four rows a thread, each index once for Q and dO
        const u32 to = stage + swizzle(thread / 8, thread % 8);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const u32 at = row(thread / 8 + e * 16);
          copy16(to + e * 2048, q + thread % 8 * 8 + (i64)at * 64);
          copy16(to + PANEL + e * 2048, d_out + thread % 8 * 8 + (i64)at * 64);
        }
      } else {
        load_rows<DK>(stage, q, row);
        load_rows<DV>(stage + PK * PANEL, d_out, row);
      }
      const int r = i * 64 + (thread & 63);
      copy4(side + slot * 1024 + thread * 4,
            r < rows ? (thread < 64 ? lse : delta) + branch.row(r) : ABSENT + thread / 64, true);
    }
    copies_commit();
  };
  const auto sees_all = [&](int i) {
    return branch.whole(branch.token(i * 64 / HPG), branch.token(min(rows - 1, i * 64 + 63) / HPG));
  };
  // After this the rows of step i, and which keys they see, are in shared memory.
  const auto arrive = [&](int i, int slot) {
    if (thread < 64 && !sees_all(i)) {
      int low = 0, high = 64;
      if (i * 64 + thread < rows) branch.range(branch.token((i * 64 + thread) / HPG), low, high);
      ((int*)(generic + side + slot * 1024 + 512))[thread] = low;
      ((int*)(generic + side + slot * 1024 + 768))[thread] = high;
    }
    copies_wait<0>();
    matrix_publish();
    __syncthreads();
  };
  load_panel<DK, 128>(key_panel, thread, k, [&](int r) { return r < keys ? r * GROUPS : -1; });
  load_panel<DV, 128>(value_panel, thread, v, [&](int r) { return r < keys ? r * GROUPS : -1; });
  request(0, 0);

  const float c = scale_log2();
  float d_key[PK][32], d_value[PV][32];
#pragma unroll
  for (int i = 0; i < 32; i++) {
#pragma unroll
    for (int p = 0; p < PK; p++) d_key[p][i] = 0.0f;
#pragma unroll
    for (int p = 0; p < PV; p++) d_value[p][i] = 0.0f;
  }

  // dQ of a step is written while the next one's products run; `panel` is its last 64 columns.
  const auto emit = [&](int i, int panel) {
    if constexpr (WITH_DQ)
      emit_rows(generic + ds_panel + PANEL, [&](int, int r, int chunk, uint4 x) {
        if (i * 64 + r < rows && panel * 64 + chunk * 8 < DK)
          store_streaming(branch.share(i * 64 + r) + panel * 64 + chunk * 8, x);
      });
  };
  constexpr bool AHEAD = COUNT > 2;
  int slot = 0;
  if (AHEAD) {
    arrive(0, 0);
    request(1, 1);
  }
  for (int i = 0; i < steps; i++) {
    const int following = COUNT == 2 ? (i + 1) & 1 : slot + 1 < COUNT ? slot + 1 : 0;
    if (COUNT == 2) slot = i & 1;
    if (!AHEAD) {
      arrive(i, slot);
      request(i + 1, following);
    }
    // ---- Scores, transposed: S [64 keys, 64 rows] = K * Q^T and dP = V * dO^T; P = exp2(S - shift)
    const u32 queries = handle(ring + slot * STAGE), gradients = advance(queries, PK * PANEL);
    const unsigned char* stage_side = generic + side + slot * 1024;
    const bool whole = sees_all(i);

    float score[32], d_score[32];
    u32 operand[4][4];
    matrix_begin();
    product_rows<DK>(score, keys_at, queries);
    matrix_commit();
    product_rows<DV>(d_score, values_at, gradients);
    matrix_commit();
    if (WITH_DQ && i > 0) emit(i - 1, PK - 1);
    matrix_wait<1>();
    hold(score);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float2 shift = *(const float2*)(stage_side + (n * 8 + (lane & 3) * 2) * 4);
      score[n * 4] = exp2_approximate(fmaf(score[n * 4], c, -shift.x));
      score[n * 4 + 1] = exp2_approximate(fmaf(score[n * 4 + 1], c, -shift.y));
      score[n * 4 + 2] = exp2_approximate(fmaf(score[n * 4 + 2], c, -shift.x));
      score[n * 4 + 3] = exp2_approximate(fmaf(score[n * 4 + 3], c, -shift.y));
    }
    if (!whole) {
      const int key = warp * 16 + lane / 4;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const int2 low = *(const int2*)(stage_side + 512 + (n * 8 + (lane & 3) * 2) * 4);
        const int2 high = *(const int2*)(stage_side + 768 + (n * 8 + (lane & 3) * 2) * 4);
        if (key < low.x || key >= high.x) score[n * 4] = 0.0f;
        if (key < low.y || key >= high.y) score[n * 4 + 1] = 0.0f;
        if (key + 8 < low.x || key + 8 >= high.x) score[n * 4 + 2] = 0.0f;
        if (key + 8 < low.y || key + 8 >= high.y) score[n * 4 + 3] = 0.0f;
      }
    }
    // ---- dV [64, DV] += P * dO; dS = P * (dP - delta)
    as_operand(operand, score);
    matrix_begin();
#pragma unroll
    for (int p = 0; p < PV; p++)
#pragma unroll
      for (int s = 0; s < 4; s++) product<ACROSS>(d_value[p], operand[s], advance(gradients, p * PANEL), s, true);
    matrix_commit();
    matrix_wait<1>();
    hold(d_score);
    score_gradients(d_score, operand, stage_side + 256, lane);
    // ---- dK [64, DK] += dS * Q; with WITH_DQ also the shares dQ [64, DK] = dS^T * K
    u32 d_operand[4][4];
    as_operand(d_operand, d_score);
    if constexpr (WITH_DQ) {
#pragma unroll
      for (int s = 0; s < 4; s++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          *(u32*)(generic + ds_panel + swizzle(warp * 16 + lane / 4 + (e & 1) * 8, s * 2 + e / 2) + (lane & 3) * 4) =
              d_operand[s][e];
      matrix_publish();
    }
    matrix_begin();
#pragma unroll
    for (int p = 0; p < PK; p++)
#pragma unroll
      for (int s = 0; s < 4; s++) product<ACROSS>(d_key[p], d_operand[s], advance(queries, p * PANEL), s, true);
    matrix_commit();
    if constexpr (WITH_DQ) {
      __syncthreads();
#pragma unroll
      for (int p = 0; p < PK; p++) {
        float d_query[32];
        matrix_begin();
#pragma unroll
        for (int s = 0; s < 4; s++)
          product<ACROSS, ACROSS>(d_query, handle(ds_panel), advance(keys_at, p * PANEL), s, s > 0);
        matrix_commit();
        matrix_wait<0>();
        hold(d_query);
        stage_rows(d_query, generic + ds_panel + PANEL, 1.0f, 1.0f);  // selected_query_gradient applies the scale
        if (p + 1 < PK) emit(i, p);
      }
    }
    if (AHEAD && i + 1 < steps) {  // while the last products run; the third stage is no longer read
      arrive(i + 1, following);
      request(i + 2, following + 1 < COUNT ? following + 1 : 0);
    }
    matrix_wait<0>();
#pragma unroll
    for (int p = 0; p < PK; p++) hold(d_key[p]);
#pragma unroll
    for (int p = 0; p < PV; p++) hold(d_value[p]);
    slot = following;
  }
  if (WITH_DQ && steps > 0) emit(steps - 1, PK - 1);

  // ---- The sums leave: dK [keys, DK] and dV [keys, DV]
  const auto store = [&](Out* to, float (&d)[32], int column, int size, float f) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const int at = column + n * 8 + (lane & 3) * 2, r = warp * 16 + lane / 4;
      if (column + n * 8 >= size) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (r + half * 8 >= keys) continue;
        Out* const cell = to + (i64)(r + half * 8) * stride * size + at;
        if constexpr (DIRECT) *(u32*)cell = pack_bf16(d[n * 4 + half * 2] * f, d[n * 4 + half * 2 + 1] * f);
        else if (apart) *(float2*)cell = make_float2(d[n * 4 + half * 2] * f, d[n * 4 + half * 2 + 1] * f);
        else reduce2(cell, d[n * 4 + half * 2] * f, d[n * 4 + half * 2 + 1] * f);
      }
    }
  };
#pragma unroll
  for (int p = 0; p < PK; p++) store(dk, d_key[p], p * 64, DK, scale());
#pragma unroll
  for (int p = 0; p < PV; p++) store(dv, d_value[p], p * 64, DV, 1.0f);
}
