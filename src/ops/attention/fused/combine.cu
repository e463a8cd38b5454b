// Combination of the three branches by the gate, the start of the backward pass, and fp32 -> bf16 for
// gradients that several kernels added to. Eight columns per thread, LANES threads per row (token, head).
#include "common.cuh"

constexpr int LANES = DV <= 32 ? 4 : DV <= 64 ? 8 : DV <= 128 ? 16 : 32;

__device__ __forceinline__ void unpack(float (&to)[8], const bf16* from) {
  const uint4 x = *(const uint4*)from;
  to[0] = low_bf16(x.x), to[1] = high_bf16(x.x), to[2] = low_bf16(x.y), to[3] = high_bf16(x.y);
  to[4] = low_bf16(x.z), to[5] = high_bf16(x.z), to[6] = low_bf16(x.w), to[7] = high_bf16(x.w);
}

// out = sum of gate * branch
extern "C" __global__ void __launch_bounds__(256) combine_forward(const bf16* cmp, const bf16* sel, const bf16* win,
                                                                  const float* gates, bf16* out, int tokens) {
  const i64 row = ((i64)blockIdx.x * 256 + threadIdx.x) / LANES;
  const int column = threadIdx.x % LANES * 8;
  if (row >= (i64)tokens * HEADS || column >= DV) return;
  float a[8], b[8], c[8];
  unpack(a, cmp + row * DV + column);
  unpack(b, sel + row * DV + column);
  unpack(c, win + row * DV + column);
  const float ga = gates[row * 3], gb = gates[row * 3 + 1], gc = gates[row * 3 + 2];
  u32 r[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    r[i] = pack_bf16(ga * a[i * 2] + gb * b[i * 2] + gc * c[i * 2],
                     ga * a[i * 2 + 1] + gb * b[i * 2 + 1] + gc * c[i * 2 + 1]);
  *(uint4*)(out + row * DV + column) = make_uint4(r[0], r[1], r[2], r[3]);
}

// rowsum(d_out * branch) is both the gate's gradient and the delta of each branch. The gate enters the
// branch's backward pass through its log-sum-exp: gate * exp(s - lse) = exp2(s * log2e - shift), with
// shift = lse * log2e - log2(gate), infinite when the row sees nothing or the gate is zero.
// d_gates, like gates, is [T, H, 3]; delta and shift are [3, T, H].
extern "C" __global__ void __launch_bounds__(256) combine_backward(const bf16* d_out, const bf16* cmp, const bf16* sel,
                                                                   const bf16* win, const float* gates,
                                                                   const float* lse_cmp, const float* lse_sel,
                                                                   const float* lse_win, float* d_gates, float* delta,
                                                                   float* shift, int tokens) {
  const i64 row = ((i64)blockIdx.x * 256 + threadIdx.x) / LANES, rows = (i64)tokens * HEADS;
  const int lane = threadIdx.x % LANES, column = lane * 8;
  float sums[3] = {0.0f, 0.0f, 0.0f};
  if (row < rows && column < DV) {
    float d[8], x[8];
    unpack(d, d_out + row * DV + column);
#pragma unroll
    for (int b = 0; b < 3; b++) {
      unpack(x, (b == 0 ? cmp : b == 1 ? sel : win) + row * DV + column);
#pragma unroll
      for (int i = 0; i < 8; i++) sums[b] += d[i] * x[i];
    }
  }
#pragma unroll
  for (int b = 0; b < 3; b++)
#pragma unroll
    for (int s = 1; s < LANES; s *= 2) sums[b] += __shfl_xor_sync(~0u, sums[b], s);
  if (row >= rows || lane >= 3) return;
  const float sum = lane == 0 ? sums[0] : lane == 1 ? sums[1] : sums[2];
  const float gate = gates[row * 3 + lane], lse = (lane == 0 ? lse_cmp : lane == 1 ? lse_sel : lse_win)[row];
  d_gates[row * 3 + lane] = sum;
  delta[lane * rows + row] = sum;
  shift[lane * rows + row] =
      lse == -positive_infinity() || gate == 0.0f ? positive_infinity() : lse * LOG2_E - log2f(gate);
}

// fp32 sums of the backward pass as bf16: keys and values of the compressed and of the selected branch in one launch.
// Eight values a thread; sizes are multiples of eight. compressed, selected: rows (key, group) of the two branches.
// grid ((compressed + selected) * (Dk + Dv) / 2048 rounded up)
extern "C" __global__ void __launch_bounds__(256) round_sums(const float* dk_cmp_sums, const float* dk_sel_sums,
                                                             const float* dv_cmp_sums, const float* dv_sel_sums,
                                                             bf16* dk_cmp, bf16* dk_sel, bf16* dv_cmp, bf16* dv_sel,
                                                             i64 compressed, i64 selected) {
  i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * 8;
  const i64 keys = (compressed + selected) * DK;
  const bool is_key = i < keys;
  if (!is_key) i -= keys;
  const i64 border = compressed * (is_key ? DK : DV), end = border + selected * (is_key ? DK : DV);
  if (i >= end) return;
  const bool is_cmp = i < border;
  if (!is_cmp) i -= border;
  const float* const from = (is_key ? is_cmp ? dk_cmp_sums : dk_sel_sums : is_cmp ? dv_cmp_sums : dv_sel_sums) + i;
  bf16* const to = (is_key ? is_cmp ? dk_cmp : dk_sel : is_cmp ? dv_cmp : dv_sel) + i;
  const float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
  *(uint4*)to = make_uint4(pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w));
}
