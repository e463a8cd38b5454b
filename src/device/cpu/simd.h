// A vector type for AVX-512, AVX2 and NEON (compiler vector extensions), and the functions that kernels need on it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t ivec __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline vec load(const float* p) {
  vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof(v)); }
inline vec splat(float x) { return x - vec{}; }
inline vec max(vec a, vec b) { return a > b ? a : b; }

// a * b + c. A compiler decides whether to fuse a product and a sum by its version, the target processor and the surrounding
// loop; a row could then have different last bits alone and in a batch. So contraction is disabled (compile.ts), and fused
// explicitly where it pays: one rounding on every processor with FMA, two on others, the same in every loop.
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
#if defined(__AVX512F__)
inline vec multiply_add(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__FMA__)
inline vec multiply_add(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
#else
inline vec multiply_add(vec a, vec b, vec c) { return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#endif
#else
inline float multiply_add(float a, float b, float c) { return a * b + c; }
inline double multiply_add(double a, double b, double c) { return a * b + c; }
inline vec multiply_add(vec a, vec b, vec c) { return a * b + c; }
#endif

inline float sum(vec v) {
  // A fixed tree, so that the result does not depend on the compiler.
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// Maximum over the lanes, by halving. Runs once per row and block of a reduction.
#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 12)  // older g++ has no __builtin_shufflevector
typedef float half_vec __attribute__((vector_size(32)));
typedef float quarter_vec __attribute__((vector_size(16)));
inline float max_lane(vec v) {
  const half_vec a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const half_vec b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const half_vec h = a > b ? a : b;
  const quarter_vec c = __builtin_shufflevector(h, h, 0, 1, 2, 3);
  const quarter_vec d = __builtin_shufflevector(h, h, 4, 5, 6, 7);
  const quarter_vec q = c > d ? c : d;
  const float x = q[0] > q[1] ? q[0] : q[1], y = q[2] > q[3] ? q[2] : q[3];
  return x > y ? x : y;
}
#else
inline float max_lane(vec v) {
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = most > v[i] ? most : v[i];
  return most;
}
#endif

// 2^x, relative error below 2e-7; 0 below -126 (denormals are flushed), inf above 128, NaN stays NaN.
inline vec exp2_polynomial(vec f) {  // for f in [-0.5, 0.5]
  vec p = splat(1.5403530e-4f);
  p = multiply_add(p, f, splat(1.3333558e-3f));
  p = multiply_add(p, f, splat(9.6181291e-3f));
  p = multiply_add(p, f, splat(5.5504109e-2f));
  p = multiply_add(p, f, splat(2.4022651e-1f));
  p = multiply_add(p, f, splat(6.9314718e-1f));
  return multiply_add(p, f, splat(1.0f));
}
#if defined(__AVX512F__)
// Two instructions instead of ten.
inline vec exp2(vec x) {
  const __m512 y = _mm512_min_ps(_mm512_set1_ps(128.0f), x);  // if one is NaN, the second operand
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(keep, exp2_polynomial(y - n), n);
}
#else
inline vec exp2(vec x) {
  const vec clamped = x < splat(-126.0f) ? splat(-126.0f) : (x > splat(128.0f) ? splat(128.0f) : x);
  const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const vec shifted = clamped + magic;
  const vec whole = shifted - magic;
  const vec p = exp2_polynomial(clamped - whole);
  ivec bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  // Two factors, so that 2^128 overflows to inf instead of wrapping the exponent.
  const ivec n = bits - 0x4B400000;
  const ivec half = n >> 1;
  const ivec a = (half + 127) << 23, b = (n - half + 127) << 23;
  vec fa, fb;
  std::memcpy(&fa, &a, sizeof(fa));
  std::memcpy(&fb, &b, sizeof(fb));
  const vec result = p * fa * fb;
  return x < splat(-126.0f) ? vec{} : result;
}
#endif

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

inline vec exp(vec x) { return exp2(x * splat(kLog2E)); }

// One lane from each of kLanes rows: reads a matrix transposed. The cache lines stay in L1 while the caller advances over the
// columns, and its stores are whole vectors.
inline vec load_column(const float* p, int64_t ld) {
  vec v;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) v[i] = p[i * ld];
  return v;
}

// out[i*ld_out + j] = source[j*ld + i] for a square of kLanes rows and columns.
#if defined(__clang__) || __GNUC__ >= 12  // older g++ has no __builtin_shufflevector
template <int Width, int... Lane>
inline void swap_blocks(vec& a, vec& b, std::integer_sequence<int, Lane...>) {
  const vec top = __builtin_shufflevector(a, b, ((Lane & Width) ? kLanes + Lane - Width : Lane)...);
  b = __builtin_shufflevector(a, b, ((Lane & Width) ? kLanes + Lane : Lane + Width)...);
  a = top;
}
// Swaps the off-diagonal blocks of Width lanes in every square of 2 Width rows, then those half as wide.
template <int Width>
inline __attribute__((always_inline)) void transpose_blocks(vec (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if ((i & Width) == 0) swap_blocks<Width>(rows[i], rows[i + Width], std::make_integer_sequence<int, kLanes>{});
  if constexpr (Width > 1) transpose_blocks<Width / 2>(rows);
}
inline void transpose_square(const float* source, int64_t ld, float* out, int64_t ld_out) {
  vec rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = load(source + i * ld);
  transpose_blocks<kLanes / 2>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(out + i * ld_out, rows[i]);
}
#else
inline void transpose_square(const float* source, int64_t ld, float* out, int64_t ld_out) {
  for (int i = 0; i < kLanes; ++i) store(out + i * ld_out, load_column(source + i, ld));
}
#endif

// Loads or stores the first n lanes. The other lanes load as zero and are not stored.
inline vec load_part(const float* p, int n) {
  vec v = {};
  std::memcpy(&v, p, static_cast<size_t>(n) * sizeof(float));
  return v;
}
inline void store_part(float* p, vec v, int n) { std::memcpy(p, &v, static_cast<size_t>(n) * sizeof(float)); }
