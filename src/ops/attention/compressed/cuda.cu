// Branch kernel: attention over compressed blocks: token t sees the blocks that end at or before it, i*d + l - 1 <= t.
#include "../branch.cuh"

struct Finished {
  i64 l, d;
  __device__ i64 low(int) const { return 0; }
  __device__ i64 high(int t) const { return t + 1 < l ? 0 : (t + 1 - l) / d + 1; }
  __device__ i64 first_token(int key) const { return key * d + l - 1; }
  __device__ i64 end_token(int) const { return NEVER; }
};

ATTENTION_KERNELS(compressed, ALSO(, i64 l, i64 d), (Banded<Finished>{{l, d}}))
