// Sum of squares in float64, and a count of what is not finite. Each partial sum covers the same numbers whatever the
// thread count, and the partial sums are added in order.
#include "runtime.h"
#include "simd.h"

namespace {

constexpr int64_t kFloats = 1 << 14;  // numbers of one partial sum

// Half as many lanes as `vec`, so that their doubles fill one register.
constexpr int kDoubles = kLanes / 2;
typedef float narrow __attribute__((vector_size(kDoubles * sizeof(float))));
typedef int32_t narrow_bits __attribute__((vector_size(kDoubles * sizeof(int32_t))));
typedef double dvec __attribute__((vector_size(kDoubles * sizeof(double))));

struct Sum {
  double squares;
  double non_finite;
};

struct Lanes {
  dvec squares = {};
  narrow_bits non_finite = {};

  void take(const float* values, int64_t count) {
    narrow v = {};
    std::memcpy(&v, values, static_cast<size_t>(count) * sizeof(float));
    const dvec wide = __builtin_convertvector(v, dvec);
    squares += wide * wide;
    narrow_bits bits;
    std::memcpy(&bits, &v, sizeof(bits));
    non_finite -= (bits & 0x7F800000) == 0x7F800000;  // a true lane is -1
  }
};

Sum partial_sum(const float* values, int64_t count) {
  Lanes a, b, c, d;
  int64_t i = 0;
  for (; i + 4 * kDoubles <= count; i += 4 * kDoubles) {
    a.take(values + i, kDoubles);
    b.take(values + i + kDoubles, kDoubles);
    c.take(values + i + 2 * kDoubles, kDoubles);
    d.take(values + i + 3 * kDoubles, kDoubles);
  }
  for (; i < count; i += kDoubles) a.take(values + i, count - i < kDoubles ? count - i : kDoubles);
  const dvec squares = (a.squares + b.squares) + (c.squares + d.squares);
  const narrow_bits non_finite = (a.non_finite + b.non_finite) + (c.non_finite + d.non_finite);
  Sum sum{};
  for (int lane = 0; lane < kDoubles; ++lane) {
    sum.squares += squares[lane];
    sum.non_finite += non_finite[lane];
  }
  return sum;
}

}  // namespace

// result = {sum of squares, count of NaN and inf}; `partials` has room for one Sum per kFloats numbers.
extern "C" void gradnorm_sum(const float* values, Sum* partials, Sum* result, int64_t count) {
  parallel_chunks(count, kFloats, [&](int64_t begin, int64_t end) {
    partials[begin / kFloats] = partial_sum(values + begin, end - begin);
  });
  Sum sum{};
  for (int64_t p = 0; p * kFloats < count; ++p) {
    sum.squares += partials[p].squares;
    sum.non_finite += partials[p].non_finite;
  }
  *result = sum;
}
