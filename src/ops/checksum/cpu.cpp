// Sum of mix(word + (index + 1) * kGolden) over the words of 8 bytes, plus the number of bytes.
#include <atomic>
#include <cstring>

#include "runtime.h"

namespace {

constexpr int64_t kWords = 1 << 15;  // per task
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

extern "C" {

void checksum_add(const uint64_t* words, int64_t bytes, uint64_t* sum) {
  const int64_t count = bytes / 8;
  std::atomic<uint64_t> total(static_cast<uint64_t>(bytes));
  parallel_chunks(count, kWords, [&](int64_t begin, int64_t end) {
    uint64_t own = 0;
    for (int64_t i = begin; i < end; ++i) own += mix(words[i] + static_cast<uint64_t>(i + 1) * kGolden);
    total.fetch_add(own, std::memory_order_relaxed);
  });
  if (8 * count < bytes) {
    uint64_t last = 0;
    std::memcpy(&last, words + count, static_cast<size_t>(bytes - 8 * count));
    total += mix(last + static_cast<uint64_t>(count + 1) * kGolden);
  }
  *sum += total;
}
}
