// SiLU and SwiGLU, forward and backward; the backward computes the sigmoid again from the saved input.
#include "elements.cuh"

typedef DTYPE T;

// Within a few units of the last place, and right at both ends: exp overflows to infinity, whose inverse is zero.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exp2_approximate(-LOG2_E * x)); }

extern "C" __global__ void __launch_bounds__(256) silu_forward(const T* x, T* y, i64 count) {
  each<WIDE<T>>(count, aligned(x) && aligned(y), [=](i64 i, auto n) {
    constexpr int N = decltype(n)::value;
    float a[N];
    load(a, x + i);
#pragma unroll
    for (int k = 0; k < N; k++) a[k] *= sigmoid(a[k]);
    store(y + i, a);
  });
}

extern "C" __global__ void __launch_bounds__(256)
silu_backward(const T* x, const T* dy, T* dx, i64 count, int accumulate) {
  each<WIDE<T>>(count, aligned(x) && aligned(dy) && aligned(dx), [=](i64 i, auto n) {
    constexpr int N = decltype(n)::value;
    float a[N], d[N];
    load(a, x + i);
    load(d, dy + i);
#pragma unroll
    for (int k = 0; k < N; k++) {
      const float s = sigmoid(a[k]);
      d[k] *= s * (1.0f + a[k] * (1.0f - s));
    }
    store(dx + i, d, accumulate);
  });
}

// Rows of x are the gate and then the up projection. A division finds the row: 32 bits suffice within a block.
template <int N, class Body> __device__ __forceinline__ void each_in_rows(i64 rows, i64 hidden, const Body& body) {
  const u32 vectors = (u32)(hidden / N);
  const i64 count = rows * vectors, threads = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
    const i64 row = count <= 0xffffffffll ? (i64)((u32)i / vectors) : i / vectors;
    body(row, (i - row * vectors) * N, Count<N>{});
  }
}

extern "C" __global__ void __launch_bounds__(256) swiglu_forward(const T* x, T* y, i64 rows, i64 hidden) {
  const auto body = [=](i64 row, i64 i, auto n) {
    constexpr int N = decltype(n)::value;
    const T* gate = x + row * 2 * hidden + i;
    float g[N], u[N];
    load(g, gate);
    load(u, gate + hidden);
#pragma unroll
    for (int k = 0; k < N; k++) g[k] *= sigmoid(g[k]) * u[k];
    store(y + row * hidden + i, g);
  };
  if (hidden % WIDE<T> == 0 && aligned(x) && aligned(y)) each_in_rows<WIDE<T>>(rows, hidden, body);
  else each_in_rows<1>(rows, hidden, body);
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_backward(const T* x, const T* dy, T* dx, i64 rows, i64 hidden, int accumulate) {
  const auto body = [=](i64 row, i64 i, auto n) {
    constexpr int N = decltype(n)::value;
    const i64 offset = row * 2 * hidden + i;
    float g[N], u[N], d[N];
    load(g, x + offset);
    load(u, x + offset + hidden);
    load(d, dy + row * hidden + i);
#pragma unroll
    for (int k = 0; k < N; k++) {
      const float s = sigmoid(g[k]);
      const float for_gate = d[k] * u[k] * s * (1.0f + g[k] * (1.0f - s));
      u[k] = d[k] * g[k] * s;
      g[k] = for_gate;
    }
    store(dx + offset, g, accumulate);
    store(dx + offset + hidden, u, accumulate);
  };
  if (hidden % WIDE<T> == 0 && aligned(x) && aligned(dy) && aligned(dx)) each_in_rows<WIDE<T>>(rows, hidden, body);
  else each_in_rows<1>(rows, hidden, body);
}
