// bfloat16 as the upper half of a float32.
#pragma once
#include <cstdint>

// The bits of a float32 rounded to nearest, ties to even: adding 0x7fff plus the lowest bit that stays rounds ties to even. NaN
// stays NaN. On bits and without a branch, so that loops vectorise.
inline uint16_t round_to_bf16(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
}

inline uint32_t widen_bf16(uint16_t bits) { return static_cast<uint32_t>(bits) << 16; }
