// Splits a fused projection into heads and rotates them; the backward merges the gradients with the inverse rotation.
//
// Cosines and sines are computed anew for every token from a table of frequencies: a vectorised double polynomial costs
// less than reading a table of cosines. The angle itself is rounded to float32 (reference.ts says why).
#include <algorithm>

#include "runtime.h"
#include "simd.h"

namespace {
constexpr int64_t kTokens = 64;  // tokens of one task

inline dvec all(double x) { return x - dvec{}; }

// factors[0] + x factors[1] + x² factors[2] + ...
template <int count>
inline dvec polynomial(dvec x, const double (&factors)[count]) {
  dvec value = all(factors[count - 1]);
#pragma GCC unroll 8
  for (int i = count - 2; i >= 0; --i) value = multiply_add(value, x, all(factors[i]));
  return value;
}

// -x where bit 1 of `quadrant` is set.
inline dvec signed_by(dvec x, lvec quadrant) {
  lvec bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits ^= (quadrant & 2) << 62;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// The series of sin(x)/x and of cos(x) in x².
constexpr double kSine[] = {1, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800};
constexpr double kCosine[] = {1, -0.5, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600};

// amplitude times cosine and sine of position * frequency, right to float32 for angles up to 2^20. Reduced by multiples of pi/2 in
// two parts (the first has 33 bits, so its product is exact). Writes up to kDoubles - 1 numbers past the last.
void cosines_sines(float position, const float* frequency, float amplitude, int64_t half, float* __restrict cosines,
                   float* __restrict sines) {
  constexpr double kTwoOverPi = 0.63661977236758134308, kHigh = 1.57079632673412561417e+00,
                   kLow = 6.07710050650619224932e-11;
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer in the low mantissa bits
  for (int64_t j = 0; j < half; j += kDoubles) {
    narrow_vec angles = {};
    if (j + kDoubles <= half) std::memcpy(&angles, frequency + j, sizeof(angles));  // a constant size: no call
    else std::memcpy(&angles, frequency + j, sizeof(float) * static_cast<size_t>(half - j));
    angles *= position;
    const dvec x = __builtin_convertvector(angles, dvec);
    const dvec shifted = multiply_add(x, all(kTwoOverPi), all(kMagic)), turns = shifted - all(kMagic);
    const dvec r = multiply_add(-turns, all(kLow), multiply_add(-turns, all(kHigh), x));
    const dvec r2 = r * r;
    const dvec s = r * polynomial(r2, kSine), c = polynomial(r2, kCosine);
    lvec quadrant;
    std::memcpy(&quadrant, &shifted, sizeof(quadrant));
    const lvec odd = (quadrant & 1) != 0;
    const narrow_vec sine = __builtin_convertvector(signed_by(odd ? c : s, quadrant), narrow_vec) * amplitude;
    const narrow_vec cosine = __builtin_convertvector(signed_by(odd ? s : c, quadrant + 1), narrow_vec) * amplitude;
    std::memcpy(sines + j, &sine, sizeof(sine));
    std::memcpy(cosines + j, &cosine, sizeof(cosine));
  }
}

template <bool add>
void rotate_head(const float* __restrict from, float* __restrict to, const float* cosines, const float* sines,
                 int64_t half, float direction) {
  each_vector(0, half, [&](int64_t j, auto get, auto put) {
    const vec a = get(from + j), b = get(from + j + half), c = get(cosines + j), s = splat(direction) * get(sines + j);
    const vec x = multiply_add(a, c, -(b * s)), y = multiply_add(b, c, a * s);
    put(to + j, add ? get(to + j) + x : x);
    put(to + j + half, add ? get(to + j + half) + y : y);
  });
}

template <bool add>
void copy_head(const float* __restrict from, float* __restrict to, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] = add ? to[i] + from[i] : from[i];
}

struct Rotation {
  const float* frequencies;  // of the pairs of a head
  float scale, amplitude;
  int64_t stride, start;
};

// A part of the fused projection: columns [column, column + heads*size) of it, and a tensor [tokens][heads][size].
struct Part {
  float* data;  // null: no gradient
  int64_t column, heads, size;
  bool rotate;
};

// The parts of a call; a shape is heads + size * 2^20 + rotate * 2^40. Returns how many there are.
int64_t parts_of(float* const (&data)[8], const int64_t (&shapes)[8], int64_t column, Part (&parts)[8]) {
  int64_t count = 0;
  for (int p = 0; p < 8; ++p) {
    const int64_t heads = shapes[p] & 0xFFFFF, size = shapes[p] >> 20 & 0xFFFFF;
    if (heads > 0) parts[count++] = {data[p], column, heads, size, shapes[p] >> 40 != 0};
    column += heads * size;
  }
  return count;
}

// Runs body(token, part, cosines, sines) for every part of every token, the tables being those of the token's position.
template <class Body>
void for_each_part(const int32_t* offsets, const int32_t* starts, int64_t sequences, int64_t tokens, const Part* parts,
                   int64_t count, const Rotation& how, const Body& body) {
  int64_t longest = 0;
  for (int64_t p = 0; p < count; ++p) longest = std::max(longest, parts[p].size / 2);
  parallel_chunks(tokens, kTokens, [&](int64_t begin, int64_t end) {
    float* cosines = scratch<float>(0, longest + kDoubles);
    float* sines = scratch<float>(1, longest + kDoubles);
    int64_t sequence = std::upper_bound(offsets, offsets + sequences + 1, begin) - offsets - 1;
    for (int64_t t = begin; t < end; ++t) {
      while (offsets[sequence + 1] <= t) ++sequence;
      const int64_t first = starts != nullptr ? starts[sequence] : how.start;
      const int64_t position = (t - offsets[sequence]) * how.stride + first;
      int64_t ready = 0;  // pairs of this token in the tables: parts of one size share them
      for (int64_t p = 0; p < count; ++p) {
        const int64_t half = parts[p].size / 2;
        if (parts[p].rotate && half != ready) {
          cosines_sines(static_cast<float>(position) / how.scale, how.frequencies, how.amplitude, half, cosines, sines);
          ready = half;
        }
        body(t, parts[p], cosines, sines);
      }
    }
  });
}
}  // namespace

// Up to eight parts, side by side from `column` on: one launch for all of them on a GPU.
#define PARTS                                                                                                      \
  float *p0, float *p1, float *p2, float *p3, float *p4, float *p5, float *p6, float *p7, int64_t s0, int64_t s1, \
      int64_t s2, int64_t s3, int64_t s4, int64_t s5, int64_t s6, int64_t s7
#define POSITIONS                                                                                                      \
  int64_t column, int64_t sequences, int64_t tokens, int64_t width, const float *frequencies, float scale,         \
      float amplitude, int64_t stride, int64_t start

extern "C" {

// Every part = its columns of fused [tokens][width].
void rope_split(const float* fused, const int32_t* offsets, const int32_t* starts, PARTS, POSITIONS) {
  Part parts[8] = {};
  const int64_t count = parts_of({p0, p1, p2, p3, p4, p5, p6, p7}, {s0, s1, s2, s3, s4, s5, s6, s7}, column, parts);
  for_each_part(offsets, starts, sequences, tokens, parts, count, {frequencies, scale, amplitude, stride, start},
                [&](int64_t t, const Part& part, const float* cosines, const float* sines) {
                  const int64_t heads = part.heads, size = part.size;
                  const float* from = fused + t * width + part.column;
                  float* to = part.data + t * heads * size;
                  if (!part.rotate) return copy_head<false>(from, to, heads * size);
                  for (int64_t h = 0; h < heads; ++h)
                    rotate_head<false>(from + h * size, to + h * size, cosines, sines, size / 2, 1.0f);
                });
}

// The columns of d_fused (+)= the gradient of every part rotated back; a missing gradient (null) counts as zero.
// The largest magnitude is for FP8, which a CPU does not have.
void rope_merge(float* d_fused, const int32_t* offsets, const int32_t* starts, PARTS, POSITIONS, int64_t accumulate,
                float* /* largest */) {
  Part parts[8] = {};
  const int64_t count = parts_of({p0, p1, p2, p3, p4, p5, p6, p7}, {s0, s1, s2, s3, s4, s5, s6, s7}, column, parts);
  for (Part& part : parts) part.rotate = part.rotate && part.data != nullptr;
  for_each_part(offsets, starts, sequences, tokens, parts, count, {frequencies, scale, amplitude, stride, start},
                [&](int64_t t, const Part& part, const float* cosines, const float* sines) {
                  const int64_t heads = part.heads, size = part.size;
                  const float* from = part.data + t * heads * size;
                  float* to = d_fused + t * width + part.column;
                  if (part.data == nullptr) {
                    if (!accumulate) std::memset(to, 0, sizeof(float) * heads * size);
                  } else if (!part.rotate) {
                    accumulate ? copy_head<true>(from, to, heads * size) : copy_head<false>(from, to, heads * size);
                  } else {
                    for (int64_t h = 0; h < heads; ++h, from += size, to += size)
                      accumulate ? rotate_head<true>(from, to, cosines, sines, size / 2, -1.0f)
                                 : rotate_head<false>(from, to, cosines, sines, size / 2, -1.0f);
                  }
                });
}
}
