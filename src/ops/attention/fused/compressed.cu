// Compressed branch: softmax over the visible compressed keys, forward and backward; dQ together with the window's.
#include "gradient.cuh"
#include "backward.cuh"
#include "window.cuh"

#ifndef CMP_WARPGROUPS
#define CMP_WARPGROUPS 2
#endif
#ifndef CMP_TILES
#define CMP_TILES (PK + PV <= 2 ? 2 : 1)  // of rows that a block of the forward pass works on, one after the other
#endif
#ifndef DQ_WARPGROUPS
#define DQ_WARPGROUPS (PK + PV <= 2 ? 3 : 1)
#endif
#ifndef CMP_CHUNK
#define CMP_CHUNK 512  // tokens one block of the backward pass walks
#endif

EXPORT(compressed_forward_shared, STREAM_SHARED<CMP_WARPGROUPS, 1, (CMP_TILES > 1 ? 2 : 1) * PK>)
EXPORT(compressed_forward_threads, STREAM_THREADS<CMP_WARPGROUPS>)
EXPORT(compressed_forward_rows, CMP_WARPGROUPS * 64)
EXPORT(compressed_forward_tiles, CMP_TILES)
EXPORT(compressed_backward_shared, BACKWARD_SHARED)
EXPORT(compressed_window_query_gradient_shared, STREAM_SHARED<DQ_WARPGROUPS, 1, PK + PV>)
EXPORT(compressed_window_query_gradient_threads, STREAM_THREADS<DQ_WARPGROUPS>)
EXPORT(compressed_window_query_gradient_rows, DQ_WARPGROUPS * 64)
EXPORT(compressed_backward_chunk, CMP_CHUNK)

// grid (tiles of 64 compressed keys of all sequences, groups)
extern "C" __global__ void __launch_bounds__(256) compressed_pack(const bf16* k_cmp, const bf16* v_cmp,
                                                                  unsigned char* packed, const int* cu_cmp,
                                                                  int sequences) {
  pack_tile<64>(k_cmp, v_cmp, packed, cu_cmp, sequences);
}

struct Compressed : PackedRows {
  int tile0, tiles, visible_first, length, number;  // tokens of the sequence, and the tile of rows
  static __device__ __forceinline__ float log2_of(float x) { return log2f(x); }  // blocks are ranked by it
  __device__ __forceinline__ int tile(int i) const { return tile0 + min(i, tiles - 1); }
  __device__ __forceinline__ const PackedRows& packed_rows() const { return *this; }
  __device__ __forceinline__ void add_runs(Runs& runs) const {
    runs.add(packed + ((i64)tile0 * GROUPS + group) * PACKED, tiles);
  }
  template <int WARPGROUPS, class Stages>
  __device__ __forceinline__ int attend_all(const Stages& ring, const Runs& runs, int begin, u32 queries) const {
    attend_tiles<WARPGROUPS, 1>(*this, ring, runs, begin, queries);
    return tiles;
  }
  __device__ __forceinline__ bool whole(int tile) const { return (tile + 1) * 64 <= visible_first; }
  __device__ __forceinline__ void range(int tile, int t, int& low, int& high) const {
    low = 0;
    high = count_compressed(t + 1) - tile * 64;
  }
};

// Sets the keys that the rows from `start` on see.
template <int ROWS> __device__ __forceinline__ void compressed_rows(Compressed& branch) {
  branch.rows = min(ROWS, branch.length * HPG - branch.start);
  branch.visible_first = branch.rows == ROWS ? count_compressed(branch.start / HPG + 1) : 0;
  branch.tiles = (count_compressed((branch.start + branch.rows - 1) / HPG + 1) + 63) / 64;
}

// Tile number `tile` of ROWS packed rows of all sequences; false past the last one.
template <int ROWS> __device__ __forceinline__ bool compressed_tile(Compressed& branch, const bf16* q,
                                                                    const unsigned char* packed, const int* cu_seqlens,
                                                                    int sequences, int tile) {
  Place place;
  if (!find_place(
          cu_seqlens, sequences, tile, [](int length) { return (length * HPG + ROWS - 1) / ROWS; },
          [](int length) { return (count_compressed(length) + 63) / 64; }, place))
    return false;
  branch.q = q;
  branch.packed = packed;
  branch.first = place.first;
  branch.group = blockIdx.y;
  branch.start = place.tile * ROWS;
  branch.length = place.length;
  branch.tile0 = place.units;
  compressed_rows<ROWS>(branch);
  return true;
}

// grid (groups of CMP_TILES tiles of all sequences but the first `skipped` tiles, groups), longest rows first
extern "C" __global__ void __launch_bounds__(STREAM_THREADS<CMP_WARPGROUPS>, FORWARD_BLOCKS(CMP_WARPGROUPS, 1))
compressed_forward(const bf16* q, const unsigned char* packed, bf16* out, float* lse, const int* cu_seqlens,
                   int sequences, int skipped) {
  extern __shared__ unsigned char shared[];
  constexpr int ROWS = CMP_WARPGROUPS * 64;
  int tile = skipped + (gridDim.x - 1 - blockIdx.x) * CMP_TILES;
  Compressed branch;
  if (!compressed_tile<ROWS>(branch, q, packed, cu_seqlens, sequences, tile)) return;
  branch.o = out;
  branch.l = lse;
  branch.number = tile;
  if constexpr (CMP_TILES == 1) {
    attend<CMP_WARPGROUPS, 1>(branch, shared);
  } else {
    attend_each<CMP_WARPGROUPS, CMP_TILES>(branch, shared, [&](Compressed& next) {
      next.number++;
      if (next.start + ROWS < next.length * HPG) {
        next.start += ROWS;
        compressed_rows<ROWS>(next);
        return true;
      }
      return compressed_tile<ROWS>(next, q, packed, cu_seqlens, sequences, next.number);
    });
  }
}

// dQ of the compressed and of the window branch: shift and delta are [3, T, H]. The same queries and gradients of the
// output serve both. grid (tiles of all sequences, groups)
extern "C" __global__ void __launch_bounds__(STREAM_THREADS<DQ_WARPGROUPS>, FORWARD_BLOCKS(DQ_WARPGROUPS, 1))
compressed_window_query_gradient(const bf16* q, const unsigned char* packed_cmp, const unsigned char* packed_win,
                                 const bf16* d_out, const float* shift, const float* delta, bf16* dq,
                                 const int* cu_seqlens, int sequences) {
  extern __shared__ unsigned char shared[];
  Compressed compressed;
  if (!compressed_tile<DQ_WARPGROUPS * 64>(compressed, q, packed_cmp, cu_seqlens, sequences,
                                           gridDim.x - 1 - blockIdx.x))
    return;
  Window window;
  window_rows<DQ_WARPGROUPS * 64>(window, q, packed_win, cu_seqlens, sequences, gridDim.x - 1 - blockIdx.x);
  const Both<Compressed, Window> both = {compressed, window};
  const i64 rows = 2 * (i64)cu_seqlens[sequences] * HEADS;  // from the compressed branch's to the window's
  query_gradient<DQ_WARPGROUPS>(both, shared, d_out, {shift, shift + rows}, {delta, delta + rows}, dq);
}

struct CompressedBackward : ContiguousRows {
  int cmp_tile;
  __device__ __forceinline__ bool whole(int from, int to) const {
    return from + 1 >= (cmp_tile * 64 + 63) * CMP_D + CMP_L;
  }
  __device__ __forceinline__ void range(int t, int& low, int& high) const {
    low = 0;
    high = count_compressed(t + 1) - cmp_tile * 64;
  }
};

// grid (compressed tiles of all sequences, chunks of tokens, groups); adds to dk and dv in fp32. Chunks are
// stretches of the sequence, the same for every tile: blocks that run together read the same queries.
// With parts = 1 (deterministic) dk and dv are [chunks, keys, G, D] and compressed_sum adds them in order.
extern "C" __global__ void __launch_bounds__(128, BACKWARD_BLOCKS) compressed_backward(
    const bf16* q, const bf16* k_cmp, const bf16* v_cmp, const bf16* d_out, const float* lse, const float* delta,
    float* dk, float* dv, const int* cu_seqlens, const int* cu_cmp, int sequences, int parts) {
  extern __shared__ unsigned char shared[];
  Place place;  // in units of compressed tiles: place.length is the number of compressed keys
  if (!find_place(cu_cmp, sequences, blockIdx.x, [](int count) { return (count + 63) / 64; }, place)) return;
  CompressedBackward branch;
  branch.cmp_tile = place.tile;
  branch.first = cu_seqlens[place.sequence];
  branch.group = blockIdx.z;
  const int length = cu_seqlens[place.sequence + 1] - branch.first;
  const int part = gridDim.y - 1 - blockIdx.y, chunk = part * CMP_CHUNK;
  branch.start = max(place.tile * 64 * CMP_D + CMP_L - 1, chunk);
  branch.tokens = min(chunk + CMP_CHUNK, length) - branch.start;
  if (branch.tokens <= 0) return;
  const i64 key = (i64)(place.first + place.tile * 64) * GROUPS + branch.group;
  const i64 skip = parts ? (i64)part * cu_cmp[sequences] * GROUPS : 0;
  backward<false, false>(branch, shared, q, d_out, lse, delta, k_cmp + key * DK, v_cmp + key * DV,
                         min(64, place.length - place.tile * 64), dk + (skip + key) * DK, dv + (skip + key) * DV,
                         GROUPS, parts != 0);
}

// Adds the parts in order of the tokens; keys that no token sees get zero. Four columns a thread.
// grid (keys * G * max(Dk, Dv) / 1024, 2: dk and dv)
extern "C" __global__ void __launch_bounds__(256) compressed_sum(const float* dk_parts, const float* dv_parts, bf16* dk,
                                                                 bf16* dv, const int* cu_seqlens, const int* cu_cmp,
                                                                 int sequences) {
  const int size = blockIdx.y == 0 ? DK : DV;
  const i64 all = (i64)cu_cmp[sequences] * GROUPS * size, i = ((i64)blockIdx.x * 256 + threadIdx.x) * 4;
  if (i >= all) return;
  const int row = (int)(i / (GROUPS * size));
  const int s = sequence_of(cu_cmp, sequences, row);
  const int length = cu_seqlens[s + 1] - cu_seqlens[s], tile = (row - cu_cmp[s]) / 64;
  const float* const from = blockIdx.y == 0 ? dk_parts : dv_parts;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int part = (tile * 64 * CMP_D + CMP_L - 1) / CMP_CHUNK; part <= (length - 1) / CMP_CHUNK; part++) {
    const float4 x = *(const float4*)(from + part * all + i);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  *(uint2*)((blockIdx.y == 0 ? dk : dv) + i) = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
}
