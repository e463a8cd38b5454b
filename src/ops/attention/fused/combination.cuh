// The gated sum of the three branches, computed by the last kernel of the selected branch for eight columns at a time.
#pragma once
#include "common.cuh"

// Eight columns of a row: sums of bf16 values times a weight.
struct Columns {
  float o[8];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; i++) o[i] = 0.0f;
  }
  __device__ __forceinline__ void add(uint4 y, float weight) {
    o[0] += low_bf16(y.x) * weight, o[1] += high_bf16(y.x) * weight, o[2] += low_bf16(y.y) * weight,
        o[3] += high_bf16(y.y) * weight;
    o[4] += low_bf16(y.z) * weight, o[5] += high_bf16(y.z) * weight, o[6] += low_bf16(y.w) * weight,
        o[7] += high_bf16(y.w) * weight;
  }
  __device__ __forceinline__ uint4 packed(float f) const {
    return make_uint4(pack_bf16(o[0] * f, o[1] * f), pack_bf16(o[2] * f, o[3] * f), pack_bf16(o[4] * f, o[5] * f),
                      pack_bf16(o[6] * f, o[7] * f));
  }
};

// The combination of the branches; out may be null: then it is left to combine_forward.
struct Combination {
  const bf16 *cmp, *win;
  const float* gates;
  bf16* out;
  struct Others {
    uint4 cmp, win;
    float gates[3];
  };
  __device__ __forceinline__ void load(Others& o, i64 at, int column) const {
    if (out == nullptr) return;
    o.cmp = *(const uint4*)(cmp + at * DV + column);
    o.win = *(const uint4*)(win + at * DV + column);
#pragma unroll
    for (int i = 0; i < 3; i++) o.gates[i] = gates[at * 3 + i];
  }
  __device__ __forceinline__ void store(const Others& o, i64 at, int column, uint4 selected) const {
    if (out == nullptr) return;
    Columns c;
    c.clear();
    c.add(o.cmp, o.gates[0]);
    c.add(selected, o.gates[1]);
    c.add(o.win, o.gates[2]);
    store16(out + at * DV + column, c.packed(1.0f));
  }
};
