// Numbers of one byte (e4m3, e5m2), and the scale that fits a matrix to them: the largest power of two that keeps its
// largest magnitude within the format. A power of two, so that scaling rounds nothing. Headers of CUDA are not needed.
#pragma once
#include "elements.cuh"

typedef unsigned char u8;

// A format of one byte: mantissa bits, exponent bias, the exponent of its largest numbers (1.75 times that power of
// two), and the code of the largest.
template <int MANTISSA_, int BIAS_, int TOP_, u32 LARGEST_> struct Format {
  static constexpr int MANTISSA = MANTISSA_, BIAS = BIAS_, TOP = TOP_;
  static constexpr u32 LARGEST = LARGEST_;
};
typedef Format<3, 7, 8, 0x7e> E4m3;    // up to 448
typedef Format<2, 15, 15, 0x7b> E5m2;  // up to 57,344

// Rounds to nearest, ties to even; what exceeds the largest number becomes it, NaN stays NaN.
template <class F> __device__ __forceinline__ u32 fp8_code(float x) {
  const u32 bits = __float_as_uint(x), sign = bits >> 31 << 7, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fu;
  u32 code;
  if (size >= (u32)(128 - F::BIAS) << 23) {
    const u32 rounded = size + ((1u << (22 - F::MANTISSA)) - 1) + (size >> (23 - F::MANTISSA) & 1);
    code = (rounded >> (23 - F::MANTISSA)) - ((u32)(127 - F::BIAS) << F::MANTISSA);
  } else {  // subnormal: a multiple of the smallest number
    code = (u32)rintf(__uint_as_float(size) * __uint_as_float((u32)(126 + F::BIAS + F::MANTISSA) << 23));
  }
  return sign | (code < F::LARGEST ? code : F::LARGEST);
}

// Two codes; `low` is first in memory. GPUs before compute capability 8.9 have no instruction for it.
template <class F> __device__ __forceinline__ u32 pack_fp8(float low, float high) {
#if __CUDA_ARCH__ >= 890
  unsigned short pair;
  if constexpr (F::MANTISSA == 3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return fp8_code<F>(low) | fp8_code<F>(high) << 8;
#endif
}

// The exponent of the scale for a largest magnitude, given as its bits. Both 2^s and 2^-s are normal floats.
template <class F> __device__ __forceinline__ int scale_exponent(u32 most) {
  const int s = F::TOP - ((int)(most >> 23) - 127) - ((most & 0x7fffffu) > 0x600000u ? 1 : 0);
  return s < 126 ? s : 126;
}

constexpr int INVERSE = 4;  // index in a scale of what codes are multiplied by (fp8.ts has the same)

// The byte b of four words as one word, for b = 0 ... 3.
__device__ __forceinline__ void transpose_bytes(u32 (&to)[4], u32 a, u32 b, u32 c, u32 d) {
  const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
  const u32 upper_ab = __byte_perm(a, b, 0x7362), upper_cd = __byte_perm(c, d, 0x7362);
  to[0] = __byte_perm(ab, cd, 0x5410), to[1] = __byte_perm(ab, cd, 0x7632);
  to[2] = __byte_perm(upper_ab, upper_cd, 0x5410), to[3] = __byte_perm(upper_ab, upper_cd, 0x7632);
}
