// The window branch of the forward pass and of dQ: the last WINDOW tokens, in key tiles of 64.
#pragma once
#include "forward.cuh"

#ifndef LONGEST_FIRST
#define LONGEST_FIRST 0  // 1 for windows so long that late tiles have more work than early ones (dense attention)
#endif

struct Window : PackedRows {
  int tiles, tile0, packed0, token_first, token_last;
  __device__ __forceinline__ int tile(int i) const { return packed0 + tile0 + min(i, tiles - 1); }
  __device__ __forceinline__ bool whole(int tile) const {
    const int s = (tile0 + tile) * 64;
    return s + 63 <= token_first && s > token_last - WINDOW;
  }
  __device__ __forceinline__ bool has_low(int tile) const { return (tile0 + tile) * 64 <= token_last - WINDOW; }
  __device__ __forceinline__ void range(int tile, int t, int& low, int& high) const {
    high = t + 1 - (tile0 + tile) * 64;
    low = high - WINDOW;
  }
};

// The window of the rows `start`, `rows`.
__device__ __forceinline__ void window_tokens(Window& branch) {
  branch.token_first = branch.start / HPG;
  branch.token_last = (branch.start + branch.rows - 1) / HPG;
  branch.tile0 = max(0, branch.token_first - WINDOW + 1) / 64;
  branch.tiles = WINDOW == 0 ? 0 : branch.token_last / 64 + 1 - branch.tile0;  // 0: it is computed elsewhere
}

// Tile number `tile` of ROWS packed rows of all sequences; false past the last one.
template <int ROWS> __device__ __forceinline__ bool window_rows(Window& branch, const bf16* q,
                                                                const unsigned char* packed, const int* cu_seqlens,
                                                                int sequences, int tile) {
  Place place;
  if (!find_place(
          cu_seqlens, sequences, tile, [](int length) { return (length * HPG + ROWS - 1) / ROWS; },
          [](int length) { return (length + 63) / 64; }, place))
    return false;
  branch.q = q;
  branch.packed = packed;
  branch.packed0 = place.units;
  branch.first = place.first;
  branch.group = blockIdx.y;
  branch.start = place.tile * ROWS;
  branch.rows = min(ROWS, place.length * HPG - branch.start);
  window_tokens(branch);
  if (branch.rows < ROWS) branch.token_first = -1;  // a tile with absent rows is always masked
  return true;
}

// The tile that this block works on. `skipped`: tiles at the beginning that no block works on.
template <int ROWS> __device__ __forceinline__ bool window_tile(Window& branch, const bf16* q,
                                                                const unsigned char* packed, const int* cu_seqlens,
                                                                int sequences, int skipped = 0) {
  const int tile = skipped + (LONGEST_FIRST ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  return window_rows<ROWS>(branch, q, packed, cu_seqlens, sequences, tile);
}
