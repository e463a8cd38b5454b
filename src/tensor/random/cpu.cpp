// Philox4x32-10 and what is made of its words: bit for bit what reference.ts computes. Only operations that IEEE 754 rounds
// correctly are used, and no fused multiply-adds, which TypeScript does not have.
//
// A batch of blocks is made at a time, step by step in loops of equal iterations, so that they become vector code.
#include "logarithm.h"
#include "runtime.h"

#include <cmath>
#include <cstring>

namespace {

constexpr int64_t kValues = 1 << 14;  // values of one task
constexpr int kBatch = 64;            // blocks made at a time

struct Words {
  uint32_t w[4][kBatch];
};

void philox(uint64_t seed, uint64_t stream, uint64_t first, Words& out) {
  for (int i = 0; i < kBatch; ++i) {
    const uint64_t index = first + i;
    uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32);
    uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0;
      const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
      c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
      c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(b);
      c3 = static_cast<uint32_t>(a);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    out.w[0][i] = c0;
    out.w[1][i] = c1;
    out.w[2][i] = c2;
    out.w[3][i] = c3;
  }
}

inline double cosine(double x) {
  const double x2 = x * x;
  double series = 1;
#pragma GCC unroll 16
  for (int even = 18; even >= 2; even -= 2) series = 1 - (series * x2) * (1.0 / (even * (even - 1)));
  return series;
}

inline double sine(double x) {
  const double x2 = x * x;
  double series = 1;
#pragma GCC unroll 16
  for (int even = 18; even >= 2; even -= 2) series = 1 - (series * x2) * (1.0 / (even * (even + 1)));
  return x * series;
}

// 31-bit values pass through int32, for which every instruction set has a conversion.
inline double wide(uint32_t small) { return static_cast<double>(static_cast<int32_t>(small)); }

void normal_pairs(const Words& words, double* x, double* y) {
  for (int i = 0; i < kBatch; ++i) {
    const double unit = (wide(words.w[0][i] >> 5) * 67108864.0 + wide(words.w[1][i] >> 6) + 1) * 0x1p-53;
    const double radius = std::sqrt(-2 * log_of_normal(unit));
    const double inside = (wide(words.w[2][i] & 0x3FFFFFFFu) * 4194304.0 + wide(words.w[3][i] >> 10)) * 0x1p-52 - 0.5;
    const double angle = inside * (3.141592653589793 / 2);
    const double c = cosine(angle), s = sine(angle);
    const uint32_t quadrant = words.w[2][i] >> 30;
    const bool swap = (quadrant & 1) != 0;
    const double first = swap ? s : c, second = swap ? c : s;
    x[i] = radius * (quadrant == 1 || quadrant == 2 ? -first : first);
    y[i] = radius * (quadrant >= 2 ? -second : second);
  }
}

// Fills out[0, count) with values offset, offset+1, ... where make(first_block, values) makes a batch of
// kBatch * per_block values.
template <int per_block, class T, class Make>
void fill(T* out, int64_t count, int64_t offset, const Make& make) {
  parallel_chunks(count, kValues, [&](int64_t begin, int64_t end) {
    T values[kBatch * per_block];
    int64_t at = offset + begin;
    const int64_t stop = offset + end;
    while (at < stop) {
      const int64_t block = at / per_block;
      make(static_cast<uint64_t>(block), values);
      const int64_t skip = at - block * per_block;
      const int64_t left = stop - at, made = kBatch * per_block - skip;
      const int64_t take = left < made ? left : made;
      std::memcpy(out + (at - offset), values + skip, sizeof(T) * take);
      at += take;
    }
  });
}

}  // namespace

extern "C" {

void random_uniform(float* out, int64_t count, int64_t seed, int64_t stream, int64_t offset) {
  fill<4>(out, count, offset, [=](uint64_t first, float* values) {
    Words words;
    philox(seed, stream, first, words);
    for (int i = 0; i < kBatch; ++i)
      for (int k = 0; k < 4; ++k) values[4 * i + k] = static_cast<float>(static_cast<int32_t>(words.w[k][i] >> 8)) * 0x1p-24f;
  });
}

void random_normal(float* out, int64_t count, int64_t seed, int64_t stream, int64_t offset, double deviation) {
  fill<2>(out, count, offset, [=](uint64_t first, float* values) {
    Words words;
    philox(seed, stream, first, words);
    double x[kBatch], y[kBatch];
    normal_pairs(words, x, y);
    for (int i = 0; i < kBatch; ++i) {
      values[2 * i] = static_cast<float>(x[i] * deviation);
      values[2 * i + 1] = static_cast<float>(y[i] * deviation);
    }
  });
}

// floor(r * limit / 2^64) for 64 random bits r, by halves: limit is at most 2^31, so nothing overflows.
void random_integers(int32_t* out, int64_t count, int64_t seed, int64_t stream, int64_t offset, int64_t limit) {
  const uint64_t n = static_cast<uint64_t>(limit);
  fill<2>(out, count, offset, [=](uint64_t first, int32_t* values) {
    Words words;
    philox(seed, stream, first, words);
    for (int i = 0; i < kBatch; ++i)
      for (int k = 0; k < 2; ++k)
        values[2 * i + k] =
            static_cast<int32_t>((words.w[2 * k][i] * n + ((words.w[2 * k + 1][i] * n) >> 32)) >> 32);
  });
}
}
