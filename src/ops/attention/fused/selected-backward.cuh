// Backward of the selected branch: keys outer, over forced and chosen tokens alike.
#pragma once
#include "backward.cuh"
#include "plan.cuh"
#include "query-sums.cuh"

EXPORT(selected_backward_shared, BACKWARD_SHARED_DQ + SEL_CHUNK * 12)

// The tokens that see a block: first the forced ones (every token for block 0, two blocks of tokens for the
// others), then the list. A work item is one chunk (SEL_CHUNK tokens) of this sequence.
struct SelectedBackward {
  // in shared memory, per token of the item: its position, and where its heads start in q and in the shares
  const u32 *positions, *starts, *places;
  bf16* shares;
  int tokens, key0;
  __device__ __forceinline__ int token(int i) const { return (int)positions[i]; }
  __device__ __forceinline__ u32 row(int r) const { return starts[(u32)r / HPG] + (u32)r % HPG; }
  __device__ __forceinline__ bf16* share(int r) const {
    return shares + (i64)(places[(u32)r / HPG] + (u32)r % HPG) * DK;
  }
  // only tokens inside the block are masked, and they come first, in order
  __device__ __forceinline__ bool whole(int from, int) const { return SEL_L == 64 && from >= key0 + SEL_L - 1; }
  __device__ __forceinline__ void range(int t, int& low, int& high) const {
    low = 0;
    high = min(SEL_L, t + 1 - key0);
  }
};

// grid (upper bound of items); adds to dk and dv in fp32, writes dq shares [T, G, n, h, Dk]. With parts = 1
// (deterministic) dk and dv are [items, l', D] and selected_sum adds them in order; the lists must be sorted.
extern "C" __global__ void __launch_bounds__(128, BACKWARD_BLOCKS) selected_backward(
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, const float* lse, const float* delta, bf16* shares,
    float* dk, float* dv, const int* items, const int* offsets, const u32* lists, const int* cu_seqlens,
    const int* cu_blocks, int sequences, int parts) {
  extern __shared__ unsigned char shared[];
  const int blocks = cu_blocks[sequences];
  if (blockIdx.x >= offsets[2 * (blocks * GROUPS + 1) - 1]) return;
  const int item = items[blockIdx.x * 2], chunk = items[blockIdx.x * 2 + 1], at = item % blocks;
  const int s = sequence_of(cu_blocks, sequences, at);
  const int length = cu_seqlens[s + 1] - cu_seqlens[s], block = at - cu_blocks[s];
  const int forced = block == 0 ? length : min(length, (block + 2) * SEL_L) - block * SEL_L;
  const int chosen = offsets[item + 1] - offsets[item], from = chunk * SEL_CHUNK;
  u32* const list = (u32*)(shared + BACKWARD_SHARED_DQ);
  const int first = cu_seqlens[s], group = item / blocks;
  SelectedBackward branch;
  branch.positions = list;
  branch.starts = list + SEL_CHUNK;
  branch.places = list + 2 * SEL_CHUNK;
  branch.shares = shares;
  branch.key0 = block * SEL_L;
  branch.tokens = min(SEL_CHUNK, forced + chosen - from);
  for (int i = threadIdx.x; i < branch.tokens; i += 128) {
    u32 t, slot;
    if (from + i < forced) {  // slots of forced blocks: 0, or the last two
      t = branch.key0 + from + i;
      const int current = t / SEL_L;
      slot = block == 0 ? 0 : min(current, SEL_N - 1) - (current - block);
    } else {
      const u32 entry = lists[offsets[item] + from + i - forced];
      t = entry / 64;
      slot = entry % 64;
    }
    list[i] = t;
    list[SEL_CHUNK + i] = (first + t) * HEADS + group * HPG;
    list[2 * SEL_CHUNK + i] = (((first + t) * GROUPS + group) * SEL_N + slot) * HPG;
  }
  __syncthreads();
  const i64 key = (i64)(first + branch.key0) * GROUPS + group;
  const i64 to = parts ? (i64)blockIdx.x * SEL_L : key;
  backward<false, true>(branch, shared, q, d_out, lse, delta, k + key * DK, v + key * DV,
                        min(SEL_L, length - branch.key0), dk + to * DK, dv + to * DV, parts ? 1 : GROUPS, parts != 0);
}

// Adds the parts of every list in order. Four columns a thread. grid (lists, l' * max(Dk, Dv) / 1024, 2: dk and dv)
extern "C" __global__ void __launch_bounds__(256) selected_sum(const float* dk_parts, const float* dv_parts, bf16* dk,
                                                               bf16* dv, const int* offsets, const int* cu_seqlens,
                                                               const int* cu_blocks, int sequences) {
  const int size = blockIdx.z == 0 ? DK : DV, i = (blockIdx.y * 256 + threadIdx.x) * 4, row = i / size;
  const int blocks = cu_blocks[sequences], list = blockIdx.x, at = list % blocks,
            s = sequence_of(cu_blocks, sequences, at);
  const int token = (at - cu_blocks[s]) * SEL_L + row;
  if (row >= SEL_L || token >= cu_seqlens[s + 1] - cu_seqlens[s]) return;
  const int from = offsets[blocks * GROUPS + 1 + list], to = offsets[blocks * GROUPS + 2 + list];
  const float* const parts = (blockIdx.z == 0 ? dk_parts : dv_parts) + i;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int part = from; part < to; part++) {
    const float4 x = *(const float4*)(parts + (i64)part * SEL_L * size);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  bf16* const cell =
      (blockIdx.z == 0 ? dk : dv) + ((i64)(cu_seqlens[s] + token) * GROUPS + list / blocks) * size + i % size;
  *(uint2*)cell = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
}

constexpr int DQ_LANES = DK <= 32 ? 4 : DK <= 64 ? 8 : DK <= 128 ? 16 : 32;

// dq += the shares of the selected blocks: dq holds the compressed and window branches', or with `sums` these do, and
// dq holds nothing. One row per DQ_LANES threads.
extern "C" __global__ void __launch_bounds__(256)
selected_query_gradient(bf16* dq, const bf16* shares, const int* selected, int tokens, const float* sums,
                        const int* cu_seqlens, const int* cu_blocks, int sequences) {
  const i64 row = ((i64)blockIdx.x * 256 + threadIdx.x) / DQ_LANES;
  const int chunk = threadIdx.x % DQ_LANES;
  if (row >= (i64)tokens * HEADS || chunk * 8 >= DK) return;
  const int token = (int)(row / HEADS), head = (int)(row % HEADS), group = head / HPG;
  const int* const blocks = selected + ((i64)token * GROUPS + group) * SEL_N;
  const i64 at = ((i64)token * GROUPS + group) * SEL_N * HPG + head % HPG;
  float o[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  const auto add = [&](const uint4 x) {
    o[0] += low_bf16(x.x), o[1] += high_bf16(x.x), o[2] += low_bf16(x.y), o[3] += high_bf16(x.y);
    o[4] += low_bf16(x.z), o[5] += high_bf16(x.z), o[6] += low_bf16(x.w), o[7] += high_bf16(x.w);
  };
#pragma unroll
  for (int s = 0; s < SEL_N; s++)
    if (blocks[s] >= 0) add(*(const uint4*)(shares + (at + s * HPG) * DK + chunk * 8));
#if JOINT_SHAPE
  if (sums) {
    const int s = sequence_of(cu_seqlens, sequences, token), r = (token - cu_seqlens[s]) * HPG + head % HPG;
    const float* const tile = sums + (((i64)cu_blocks[s] * HPG + r / 64) * GROUPS + group) * 4096;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 x = *(const float2*)(tile + query_sum(r % 64, chunk * 8 + i));
      o[i] += x.x, o[i + 1] += x.y;
    }
  }
#endif
#pragma unroll
  for (int i = 0; i < 8; i++) o[i] *= scale();
  if (!sums) add(*(const uint4*)(dq + row * DK + chunk * 8));
  *(uint4*)(dq + row * DK + chunk * 8) =
      make_uint4(pack_bf16(o[0], o[1]), pack_bf16(o[2], o[3]), pack_bf16(o[4], o[5]), pack_bf16(o[6], o[7]));
}
