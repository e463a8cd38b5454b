// Branch kernel: dense causal attention: token t sees the keys 0 ... t.
#include "../branch.cuh"

struct Causal {
  __device__ i64 low(int) const { return 0; }
  __device__ i64 high(int t) const { return (i64)t + 1; }
  __device__ i64 first_token(int key) const { return key; }
  __device__ i64 end_token(int) const { return NEVER; }
};

ATTENTION_KERNELS(dense, ALSO(), (Banded<Causal>{}))
