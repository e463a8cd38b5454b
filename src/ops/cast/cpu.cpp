// float32 <-> bfloat16. Rounding works on the bits: adding 0x7fff plus the lowest bit that stays rounds ties to even.
#include "runtime.h"

namespace {

constexpr int64_t kNumbers = 1 << 14;  // of one task

// On bits, so that loops over it become vector code without a branch.
inline uint16_t round_bits(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
}

}  // namespace

extern "C" {

void cast_f32_to_bf16(const uint32_t* __restrict from, uint16_t* __restrict into, int64_t count) {
  parallel_chunks(count, kNumbers, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) into[i] = round_bits(from[i]);
  });
}

void cast_bf16_to_f32(const uint16_t* __restrict from, uint32_t* __restrict into, int64_t count) {
  parallel_chunks(count, kNumbers, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) into[i] = static_cast<uint32_t>(from[i]) << 16;
  });
}
}
