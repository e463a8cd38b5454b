// Reductions over ranks, elementwise and in order of rank: the same bits on every rank and in every run. Sums are computed in
// float64 and rounded once, so the number of ranks hardly affects them.
#include "bfloat16.h"
#include "runtime.h"

#include <cstring>

namespace {

constexpr int64_t kNumbers = 1 << 13;  // per task
constexpr int64_t kTile = 512;

struct Bfloat16 {
  uint16_t bits;
  explicit operator double() const {
    const uint32_t wide = widen_bf16(bits);
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
};

inline void store(double value, float* into) { *into = static_cast<float>(value); }
inline void store(double value, double* into) { *into = value; }
inline void store(double value, int32_t* into) { *into = static_cast<int32_t>(value); }
inline void store(double value, uint8_t* into) { *into = static_cast<uint8_t>(value); }
inline void store(double value, Bfloat16* into) {
  const float narrow = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof(bits));
  into->bits = round_to_bf16(bits);
}

enum Reduction { kSum = 0, kMax = 1, kMin = 2 };

template <int reduction>
inline double join(double a, double b) {
  if (reduction == kSum) return a + b;
  // NaN propagates, so that every rank sees it.
  if (a != a || b != b) return a + b;
  if (reduction == kMax) return a > b ? a : b;
  return a < b ? a : b;
}

template <class T, int reduction>
void reduce(const T* parts, T* into, int64_t count, int64_t ranks) {
  parallel_chunks(count, kNumbers, [&](int64_t begin, int64_t end) {
    // Rank by rank over a tile: the loops vectorise, and the sums stay in the cache.
    double values[kTile];
    for (int64_t tile = begin; tile < end; tile += kTile) {
      const int64_t size = end - tile < kTile ? end - tile : kTile;
      for (int64_t i = 0; i < size; ++i) values[i] = static_cast<double>(parts[tile + i]);
      for (int64_t rank = 1; rank < ranks; ++rank) {
        const T* more = parts + rank * count + tile;
        for (int64_t i = 0; i < size; ++i) values[i] = join<reduction>(values[i], static_cast<double>(more[i]));
      }
      for (int64_t i = 0; i < size; ++i) store(values[i], into + tile + i);
    }
  });
}

template <class T>
void reduce_any(const void* parts, void* into, int64_t count, int64_t ranks, int64_t reduction) {
  const T* from = static_cast<const T*>(parts);
  T* to = static_cast<T*>(into);
  if (reduction == kSum) reduce<T, kSum>(from, to, count, ranks);
  else if (reduction == kMax) reduce<T, kMax>(from, to, count, ranks);
  else reduce<T, kMin>(from, to, count, ranks);
}

}  // namespace

// parts [ranks][count] -> into [count]; reduction 0 sum, 1 max, 2 min.
extern "C" {
void ranks_reduce_f32(const void* parts, void* into, int64_t count, int64_t ranks, int64_t reduction) {
  reduce_any<float>(parts, into, count, ranks, reduction);
}
void ranks_reduce_f64(const void* parts, void* into, int64_t count, int64_t ranks, int64_t reduction) {
  reduce_any<double>(parts, into, count, ranks, reduction);
}
void ranks_reduce_bf16(const void* parts, void* into, int64_t count, int64_t ranks, int64_t reduction) {
  reduce_any<Bfloat16>(parts, into, count, ranks, reduction);
}
void ranks_reduce_i32(const void* parts, void* into, int64_t count, int64_t ranks, int64_t reduction) {
  reduce_any<int32_t>(parts, into, count, ranks, reduction);
}
void ranks_reduce_u8(const void* parts, void* into, int64_t count, int64_t ranks, int64_t reduction) {
  reduce_any<uint8_t>(parts, into, count, ranks, reduction);
}
}
