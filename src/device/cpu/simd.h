// A vector type for AVX-512, AVX2, NEON and WebAssembly (compiler vector extensions), and the functions that kernels need on
// it. Nothing here or in a kernel calls libm's functions: their last bits differ between systems.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "logarithm.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__wasm_relaxed_simd__)
#include <wasm_simd128.h>
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
inline vec sqrt(vec v) {  // rounded correctly everywhere
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(v);
#elif defined(__AVX__)
  return _mm256_sqrt_ps(v);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

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
#elif defined(__wasm_relaxed_simd__)
// WebAssembly has only vector forms, and leaves open whether they round once: the device checks that before it uses them.
inline vec multiply_add(vec a, vec b, vec c) { return (vec)wasm_f32x4_relaxed_madd((v128_t)a, (v128_t)b, (v128_t)c); }
inline float multiply_add(float a, float b, float c) {
  return wasm_f32x4_extract_lane(wasm_f32x4_relaxed_madd(wasm_f32x4_splat(a), wasm_f32x4_splat(b), wasm_f32x4_splat(c)), 0);
}
inline double multiply_add(double a, double b, double c) {
  return wasm_f64x2_extract_lane(wasm_f64x2_relaxed_madd(wasm_f64x2_splat(a), wasm_f64x2_splat(b), wasm_f64x2_splat(c)), 0);
}
#else
inline float multiply_add(float a, float b, float c) { return a * b + c; }
inline double multiply_add(double a, double b, double c) { return a * b + c; }
inline vec multiply_add(vec a, vec b, vec c) { return a * b + c; }
#endif

// A sum runs over eight lanes on every machine: number i is added to lane i % kSumLanes, and the lanes are added by a fixed
// tree. So the bits of a sum do not depend on the width of a vector.
constexpr int kSumLanes = 8;
// Rows that are summed are padded with zeros to whole vectors and whole rounds of these lanes.
constexpr int64_t kPad = kLanes > kSumLanes ? kLanes : kSumLanes;

inline float sum_lanes(const float* lanes) {
  const float a = lanes[0] + lanes[4], b = lanes[1] + lanes[5], c = lanes[2] + lanes[6], d = lanes[3] + lanes[7];
  return (a + c) + (b + d);
}

// The lanes of one sum. Vectors must come in order, from a number i that is a multiple of kSumLanes on.
class LaneSums {
 public:
#if defined(__AVX512F__)
  void add(vec v) {
    lanes_ += low(v);
    lanes_ += high(v);
  }
  void add_products(vec a, vec b) {
    lanes_ = _mm256_fmadd_ps(low(a), low(b), lanes_);
    lanes_ = _mm256_fmadd_ps(high(a), high(b), lanes_);
  }
  // kept[lane] = kept[lane] * factor + lane
  void merge_into(float* kept, float factor) const {
    _mm256_storeu_ps(kept, _mm256_fmadd_ps(_mm256_loadu_ps(kept), _mm256_set1_ps(factor), lanes_));
  }
  float total() const {
    float lanes[kSumLanes];
    _mm256_storeu_ps(lanes, lanes_);
    return sum_lanes(lanes);
  }

 private:
  static __m256 low(vec v) { return _mm512_castps512_ps256(v); }
  static __m256 high(vec v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)); }
  __m256 lanes_ = {};
#else
  void add(vec v) {
    lanes_[0] += v;
    rotate();
  }
  void add_products(vec a, vec b) {
    lanes_[0] = multiply_add(a, b, lanes_[0]);
    rotate();
  }
  // kept[lane] = kept[lane] * factor + lane, after whole rounds of kSumLanes numbers
  void merge_into(float* kept, float factor) const {
    for (int i = 0; i < kParts; ++i)
      store(kept + i * kLanes, multiply_add(load(kept + i * kLanes), splat(factor), lanes_[i]));
  }
  float total() const {  // halves may be swapped: the tree adds them first
    float lanes[kSumLanes];
    for (int i = 0; i < kParts; ++i) store(lanes + i * kLanes, lanes_[i]);
    return sum_lanes(lanes);
  }

 private:
  static constexpr int kParts = kSumLanes / kLanes;
  void rotate() {
    if constexpr (kParts == 2) std::swap(lanes_[0], lanes_[1]);
  }
  vec lanes_[kParts] = {};
#endif
};

inline float sum(vec v) {
  LaneSums lanes;
  lanes.add(v);
  return lanes.total();
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

// 2^x, relative error below 2.2e-7; 0 below -126 (denormals are flushed), inf above 128, NaN stays NaN.
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
inline float power_of_2(float x) { return exp2(splat(x))[0]; }

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

// Runs body(offset, get, put) over [begin, end): whole vectors, then one that reads and writes only what is left.
template <class Body>
inline void each_vector(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes)
    body(i, [](const float* p) { return load(p); }, [](float* p, vec v) { store(p, v); });
  const int rest = static_cast<int>(end - i);
  if (rest > 0)
    body(i, [=](const float* p) { return load_part(p, rest); }, [=](float* p, vec v) { store_part(p, v, rest); });
}

// The sum of a[i] * b[i].
inline float dot(const float* a, const float* b, int64_t count) {
  LaneSums products;
  each_vector(0, count, [&](int64_t i, auto get, auto) { products.add_products(get(a + i), get(b + i)); });
  return products.total();
}

// Doubles of one register, and as many floats and integers.
constexpr int kDoubles = kLanes / 2;
typedef double dvec __attribute__((vector_size(kDoubles * sizeof(double))));
typedef int64_t lvec __attribute__((vector_size(kDoubles * sizeof(int64_t))));
typedef float narrow_vec __attribute__((vector_size(kDoubles * sizeof(float))));
inline dvec multiply_add(dvec a, dvec b, dvec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_pd(a, b, c);
#elif defined(__ARM_FEATURE_FMA)
  return (dvec)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#elif defined(__wasm_relaxed_simd__)
  return (dvec)wasm_f64x2_relaxed_madd((v128_t)a, (v128_t)b, (v128_t)c);
#else
  return a * b + c;
#endif
}
inline dvec widened(const float* p) {
  narrow_vec v;
  std::memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, dvec);
}

// A sum of squares in float64: number i is added to lane i % kSquareLanes.
constexpr int kSquareLanes = 16;
class SquareSums {
 public:
  void add(const float* p) {  // kSquareLanes numbers
    for (int i = 0; i < kParts; ++i) {
      const dvec v = widened(p + i * kDoubles);
      lanes_[i] += v * v;  // exact products: a fused sum has the same bits
    }
  }
  double total() const {
    double total = 0;
    for (int i = 0; i < kParts; ++i)
      for (int lane = 0; lane < kDoubles; ++lane) total += lanes_[i][lane];
    return total;
  }

 private:
  static constexpr int kParts = kSquareLanes / kDoubles;
  dvec lanes_[kParts] = {};
};

// Whether `multiply_add` rounds once, in all its forms: (1 + e)^2 - 1 - 2e is e^2, and 0 if the product is rounded first.
inline bool rounds_once() {
  volatile float e = 0x1p-12f;
  volatile double d = 0x1p-27;
  const float x = 1 + e, minus = -1 - 2 * e;
  const double y = 1 + d, negative = -1 - 2 * d;
  return multiply_add(splat(x), splat(x), splat(minus))[kLanes - 1] == e * e && multiply_add(x, x, minus) == e * e &&
         multiply_add(y, y, negative) == d * d;
}
