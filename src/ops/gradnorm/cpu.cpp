// Sums of squares in float64, and counts of what is not finite, of many tensors. Each partial sum covers the same numbers
// whatever the thread count, and the partial sums are added in order.
#include "runtime.h"
#include "simd.h"

namespace {

constexpr int64_t kFloats = 1 << 14;  // numbers of one partial sum

struct Sum {
  double squares;
  double non_finite;
};

Sum partial_sum(const float* values, int64_t count) {
  SquareSums squares;
  ivec non_finite = {};
  const auto take = [&](const float* p) {
    squares.add(p);
    for (int i = 0; i < kSquareLanes; i += kLanes) {
      ivec bits;
      std::memcpy(&bits, p + i, sizeof(bits));
      non_finite -= (bits & 0x7F800000) == 0x7F800000;  // a true lane is -1
    }
  };
  int64_t i = 0;
  for (; i + kSquareLanes <= count; i += kSquareLanes) take(values + i);
  if (i < count) {
    float rest[kSquareLanes] = {};
    std::memcpy(rest, values + i, static_cast<size_t>(count - i) * sizeof(float));
    take(rest);
  }
  Sum sum{squares.total(), 0};
  for (int lane = 0; lane < kLanes; ++lane) sum.non_finite += non_finite[lane];
  return sum;
}

struct Record {
  int64_t size, first_piece;
  Address<const float> values;
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
