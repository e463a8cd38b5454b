// Sums of squares in float64, and counts of what is not finite, of many tensors. Each partial sum covers the same numbers
// whatever the thread count, and the partial sums are added in order.
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

struct Record {
  int64_t size, first_piece;
  const float* values;
};

struct Piece {
  int32_t record, index;
};

}  // namespace

// sums[tensor] for all tensors, and their total in sums[tensors]; `partials` has room for one Sum per piece.
extern "C" void gradnorm_sums(const Record* records, const Piece* pieces, Sum* partials, Sum* sums, int64_t tensors,
                              int64_t piece_count) {
  parallel_chunks(piece_count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const Record& record = records[pieces[p].record];
      const int64_t from = pieces[p].index * kFloats, left = record.size - from;
      partials[p] = partial_sum(record.values + from, left < kFloats ? left : kFloats);
    }
  });
  Sum total{};
  for (int64_t t = 0; t < tensors; ++t) {
    Sum sum{};
    for (int64_t p = 0; p * kFloats < records[t].size; ++p) {
      sum.squares += partials[records[t].first_piece + p].squares;
      sum.non_finite += partials[records[t].first_piece + p].non_finite;
    }
    sums[t] = sum;
    total.squares += sum.squares;
    total.non_finite += sum.non_finite;
  }
  sums[tensors] = total;
}
