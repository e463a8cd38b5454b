// Branch kernel: attention over selected blocks: token t sees the tokens s <= t of the blocks its group selected.
//
// Forward and dq: a tile of neighbouring tokens walks the tiles of keys that hold anything one of them selected. dk and
// dv: a tile of keys checks for every later token whether it selected something there.
#include "../branch.cuh"

struct Selected {
  const int* blocks;  // [tokens, groups, count], -1 for none
  i64 size;           // tokens of a block
  int count;

  __device__ const int* of(const Inputs& in, const Span& span, int t) const {
    return blocks + ((span.token0 + t) * in.groups + span.group) * count;
  }

  // Block numbers come from a tensor: an invalid one is masked and never becomes an address.
  __device__ u64 mask(const Inputs& in, const Span& span, int t, int k0) const {
    const int* const chosen = of(in, span, t);
    u64 bits = 0;
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      const i64 begin = chosen[i] * size, end = min(begin + size, (i64)t + 1);
      if (begin >= 0 && begin < k0 + TILE && end > k0) bits |= bits_between(begin - k0, end - k0);
    }
    return bits;
  }

  __device__ int next(const Inputs& in, const Span& span, int after) const {
    __shared__ int least[WARPS];
    int best = NEVER;
    for (int i = threadIdx.x; i < (span.t1 - span.t0) * count; i += THREADS) {
      const int t = span.t0 + i / count;
      const i64 begin = of(in, span, t)[i % count] * size, end = min(begin + size, (i64)t + 1);
      if (begin < 0 || begin >= end) continue;
      const int tile = max(after + 1, (int)(begin / TILE));
      if ((i64)tile * TILE < end) best = min(best, tile);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) best = min(best, __shfl_xor_sync(~0u, best, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) least[threadIdx.x / 32] = best;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) best = min(best, least[w]);
    return best == NEVER ? -1 : best;
  }

  __device__ i64 first_token(int k0) const { return k0; }
  __device__ i64 end_token(int) const { return NEVER; }
};

ATTENTION_KERNELS(selected, ALSO(, const int* blocks, i64 size, int count), (Selected{blocks, size, count}))
