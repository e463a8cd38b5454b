// Products, scaling, exponential and logarithm, number by number.
#include "elements.cuh"

typedef DTYPE T;

// y (+)= what `value` makes of N numbers at i.
template <class Value>
__device__ __forceinline__ void map(T* y, i64 count, bool wide, int accumulate, const Value& value) {
  each<WIDE<T>>(count, wide && aligned(y), [=](i64 i, auto n) {
    float v[decltype(n)::value];
    value(i, v);
    store(y + i, v, accumulate);
  });
}

// y (+)= a * b; b has one number for every `inner` numbers of a.
extern "C" __global__ void __launch_bounds__(256)
mul(const T* a, const T* b, T* y, i64 count, i64 inner, int accumulate) {
  const bool wide = aligned(a) && (inner == 1 ? aligned(b) : inner % WIDE<T> == 0);
  map(y, count, wide, accumulate, [=](i64 i, auto& v) {
    constexpr int N = sizeof(v) / sizeof(float);
    float factor[N];
    load(v, a + i);
    if (inner == 1) load(factor, b + i);
    const float shared = inner == 1 ? 0.0f : read_one(b + i / inner);
#pragma unroll
    for (int k = 0; k < N; k++) v[k] *= inner == 1 ? factor[k] : shared;
  });
}

// y[r] (+)= sum over a row of a * b; a block for each row.
extern "C" __global__ void __launch_bounds__(256)
row_dot(const T* a, const T* b, T* y, i64 rows, i64 inner, int accumulate) {
  __shared__ float room[8];
  for (i64 r = blockIdx.x; r < rows; r += gridDim.x) {
    float sum = 0.0f;
    for (i64 i = r * inner + threadIdx.x; i < (r + 1) * inner; i += blockDim.x) sum += read_one(a + i) * read_one(b + i);
    sum = block_sum(sum, room);
    if (threadIdx.x == 0) write_one(y + r, accumulate ? read_one(y + r) + sum : sum);
  }
}

extern "C" __global__ void __launch_bounds__(256) scale(const T* x, T* y, i64 count, float factor, int accumulate) {
  map(y, count, aligned(x), accumulate, [=](i64 i, auto& v) {
    load(v, x + i);
#pragma unroll
    for (float& one : v) one *= factor;
  });
}

extern "C" __global__ void __launch_bounds__(256) exp_forward(const T* x, T* y, i64 count) {
  map(y, count, aligned(x), 0, [=](i64 i, auto& v) {
    load(v, x + i);
#pragma unroll
    for (float& one : v) one = exp2_approximate(LOG2_E * one);
  });
}

extern "C" __global__ void __launch_bounds__(256) log_forward(const T* x, T* y, i64 count) {
  map(y, count, aligned(x), 0, [=](i64 i, auto& v) {
    load(v, x + i);
#pragma unroll
    for (float& one : v) one = logf(one);
  });
}

extern "C" __global__ void __launch_bounds__(256)
log_backward(const T* x, const T* dy, T* dx, i64 count, int accumulate) {
  map(dx, count, aligned(x) && aligned(dy), accumulate, [=](i64 i, auto& v) {
    constexpr int N = sizeof(v) / sizeof(float);
    float at[N];
    load(v, dy + i);
    load(at, x + i);
#pragma unroll
    for (int k = 0; k < N; k++) v[k] /= at[k];
  });
}
