// Sums, number by number. The result may be one of the inputs.
#include "elements.cuh"

typedef DTYPE T;
typedef DTYPE_R U;

// y = x + r. T is what x and y hold, U what r holds.
extern "C" __global__ void __launch_bounds__(256) add_forward(const T* x, const U* r, T* y, i64 count) {
  each<WIDE<T>>(count, aligned(x) && aligned(r) && aligned(y), [=](i64 i, auto n) {
    constexpr int N = decltype(n)::value;
    float a[N], b[N];
    load(a, x + i);
    load(b, r + i);
#pragma unroll
    for (int k = 0; k < N; k++) a[k] += b[k];
    store(y + i, a);
  });
}
