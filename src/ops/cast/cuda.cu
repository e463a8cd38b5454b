// float32 <-> bfloat16, on the bits: the instruction that rounds would give every NaN the same ones.
#include "elements.cuh"

__device__ __forceinline__ u32 rounded(u32 bits) {
  const u32 nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : nearest;
}

extern "C" __global__ void __launch_bounds__(256) cast_f32_to_bf16(const u32* from, bf16* into, i64 count) {
  each<8>(count, aligned(from) && aligned(into), [=](i64 i, auto n) {
    if constexpr (decltype(n)::value == 1) {
      into[i] = (bf16)rounded(from[i]);
    } else {
      const uint4 a = *(const uint4*)(from + i), b = *(const uint4*)(from + i + 4);
      *(uint4*)(into + i) = make_uint4(rounded(a.x) | rounded(a.y) << 16, rounded(a.z) | rounded(a.w) << 16,
                                       rounded(b.x) | rounded(b.y) << 16, rounded(b.z) | rounded(b.w) << 16);
    }
  });
}

extern "C" __global__ void __launch_bounds__(256) cast_bf16_to_f32(const bf16* from, u32* into, i64 count) {
  each<8>(count, aligned(from) && aligned(into), [=](i64 i, auto n) {
    if constexpr (decltype(n)::value == 1) {
      into[i] = (u32)from[i] << 16;
    } else {
      const uint4 x = *(const uint4*)(from + i);
      *(uint4*)(into + i) = make_uint4(x.x << 16, x.x & 0xffff0000u, x.y << 16, x.y & 0xffff0000u);
      *(uint4*)(into + i + 4) = make_uint4(x.z << 16, x.z & 0xffff0000u, x.w << 16, x.w & 0xffff0000u);
    }
  });
}
