// A part of every run of `whole` numbers: `part` of them after the first `before`.
#include "elements.cuh"

typedef DTYPE T;

extern "C" __global__ void __launch_bounds__(256)
slice_forward(const T* x, T* y, i64 outer, i64 whole, i64 part, i64 before) {
  each<1>(outer * part, false, [=](i64 i, auto) { y[i] = x[i / part * whole + before + i % part]; });
}

// Numbers outside the part have no gradient.
extern "C" __global__ void __launch_bounds__(256)
slice_backward(const T* dy, T* dx, i64 outer, i64 whole, i64 part, i64 before, int accumulate) {
  each<1>(outer * whole, false, [=](i64 i, auto) {
    const i64 run = i / whole, place = i - run * whole - before;
    const bool inside = place >= 0 && place < part;
    const float slope = inside ? read_one(dy + run * part + place) : 0.0f;
    if (!accumulate) write_one(dx + i, slope);
    else if (inside) write_one(dx + i, read_one(dx + i) + slope);
  });
}
