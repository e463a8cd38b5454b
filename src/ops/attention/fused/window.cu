// Window branch: softmax over the last WINDOW tokens, forward and backward.
#include "gradient.cuh"
#include "backward.cuh"
#include "window.cuh"

#ifndef WIN_WARPGROUPS
#define WIN_WARPGROUPS 2
#endif
#ifndef WIN_WIDE
#define WIN_WIDE 1
#endif
#ifndef WIN_DQ_WARPGROUPS
#define WIN_DQ_WARPGROUPS (PK + PV <= 2 ? 3 : 1)
#endif

EXPORT(window_forward_shared, STREAM_SHARED<WIN_WARPGROUPS, WIN_WIDE, PK>)
EXPORT(window_forward_threads, STREAM_THREADS<WIN_WARPGROUPS>)
EXPORT(window_forward_rows, WIN_WARPGROUPS * 64)
EXPORT(window_backward_shared, BACKWARD_SHARED)
EXPORT(window_query_gradient_shared, STREAM_SHARED<WIN_DQ_WARPGROUPS, 1, PK + PV>)
EXPORT(window_query_gradient_threads, STREAM_THREADS<WIN_DQ_WARPGROUPS>)
EXPORT(window_query_gradient_rows, WIN_DQ_WARPGROUPS * 64)

// grid (tiles of 64 tokens of all sequences, groups)
extern "C" __global__ void __launch_bounds__(256) window_pack(const bf16* k, const bf16* v, unsigned char* packed,
                                                              const int* cu_seqlens, int sequences) {
  pack_tile<64>(k, v, packed, cu_seqlens, sequences);
}

// grid (tiles of all sequences but the first `skipped`, groups)
extern "C" __global__ void __launch_bounds__(STREAM_THREADS<WIN_WARPGROUPS>, FORWARD_BLOCKS(WIN_WARPGROUPS, WIN_WIDE))
window_forward(const bf16* q, const unsigned char* packed, bf16* out, float* lse, const int* cu_seqlens,
               int sequences, int skipped) {
  extern __shared__ unsigned char shared[];
  Window branch;
  if (!window_tile<WIN_WARPGROUPS * 64>(branch, q, packed, cu_seqlens, sequences, skipped)) return;
  branch.o = out;
  branch.l = lse;
  attend<WIN_WARPGROUPS, WIN_WIDE>(branch, shared);
}

// dQ of the window alone: dense attention, layers of a window, a window with queries of its own. grid (tiles of all
// sequences, groups)
extern "C" __global__ void __launch_bounds__(STREAM_THREADS<WIN_DQ_WARPGROUPS>, FORWARD_BLOCKS(WIN_DQ_WARPGROUPS, 1))
window_query_gradient(const bf16* q, const unsigned char* packed, const bf16* d_out, const float* shift,
                      const float* delta, bf16* dq, const int* cu_seqlens, int sequences) {
  extern __shared__ unsigned char shared[];
  Window branch;
  if (!window_tile<WIN_DQ_WARPGROUPS * 64>(branch, q, packed, cu_seqlens, sequences)) return;
  query_gradient<WIN_DQ_WARPGROUPS>(branch, shared, d_out, {shift}, {delta}, dq);
}

struct WindowBackward : ContiguousRows {
  int key0;
  __device__ __forceinline__ bool whole(int from, int to) const { return from >= key0 + 63 && to - WINDOW < key0; }
  __device__ __forceinline__ void range(int t, int& low, int& high) const {
    high = t + 1 - key0;
    low = high - WINDOW;
  }
};

// grid (key tiles of all sequences, groups); writes dk and dv
extern "C" __global__ void __launch_bounds__(128, BACKWARD_BLOCKS) window_backward(
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, const float* lse, const float* delta, bf16* dk,
    bf16* dv, const int* cu_seqlens, int sequences) {
  extern __shared__ unsigned char shared[];
  Place place;
  if (!find_place(cu_seqlens, sequences, blockIdx.x, [](int length) { return (length + 63) / 64; }, place)) return;
  WindowBackward branch;
  branch.first = place.first;
  branch.group = blockIdx.y;
  branch.key0 = place.tile * 64;
  branch.start = branch.key0;
  branch.tokens = min(64 + WINDOW - 1, place.length - branch.key0);
  const i64 key = (i64)(place.first + branch.key0) * GROUPS + branch.group;
  backward<true, false>(branch, shared, q, d_out, lse, delta, k + key * DK, v + key * DV,
                        min(64, place.length - branch.key0), dk + key * DK, dv + key * DV);
}
