// Sum of mix(word + (index + 1) * GOLDEN) over the words of 8 bytes, plus the number of bytes. Sums of integers do not
// depend on the order, so blocks add theirs atomically.
#include "elements.cuh"

constexpr u64 GOLDEN = 0x9e3779b97f4a7c15ull;

__device__ __forceinline__ u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

extern "C" __global__ void __launch_bounds__(256) checksum_add(const u64* words, i64 bytes, u64* sum) {
  const i64 count = bytes / 8, first = (i64)blockIdx.x * 256 + threadIdx.x, step = (i64)gridDim.x * 256;
  u64 own = 0;
#pragma unroll 8
  for (i64 i = first; i < count; i += step) own += mix(words[i] + (u64)(i + 1) * GOLDEN);
  if (first == 0) {
    own += (u64)bytes;
    u64 last = 0;
    for (i64 i = 8 * count; i < bytes; i++) last |= (u64)((const unsigned char*)words)[i] << (8 * (i - 8 * count));
    if (8 * count < bytes) own += mix(last + (u64)(count + 1) * GOLDEN);
  }
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) own += __shfl_xor_sync(~0u, own, bits);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, own);
}
