// Branch kernel: sliding-window attention: token t sees the keys t-w+1 ... t, exactly w of them.
#include "../branch.cuh"

struct Window {
  i64 w;
  __device__ i64 low(int t) const { return t - w + 1 > 0 ? t - w + 1 : 0; }
  __device__ i64 high(int t) const { return (i64)t + 1; }
  __device__ i64 first_token(int key) const { return key; }
  __device__ i64 end_token(int key) const { return key + w; }
};

ATTENTION_KERNELS(window, ALSO(, i64 w), (Banded<Window>{{w}}))
