// Logarithms from operations that IEEE 754 rounds correctly, without a fused one: the same bits on every machine.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>

// log(x) = e log 2 + 2 artanh((m-1)/(m+1)) for x = m 2^e, m near 1. For normal numbers above 0; relative error below 1e-15.
inline double log_of_normal(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const double exponent = static_cast<double>(static_cast<int32_t>(bits >> 52) - 1023);
  const uint64_t of_mantissa = (bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double m;
  std::memcpy(&m, &of_mantissa, sizeof(m));
  const bool high = m > 1.4142135623730951;
  const double mantissa = high ? m * 0.5 : m;
  const double e = high ? exponent + 1 : exponent;
  const double t = (mantissa - 1) / (mantissa + 1);
  const double t2 = t * t;
  double series = 1.0 / 23;
#pragma GCC unroll 16
  for (int odd = 21; odd >= 1; odd -= 2) series = series * t2 + 1.0 / odd;
  return e * 0.6931471805599453 + 2 * t * series;
}

// The natural logarithm of a float, in float64: -inf of 0, NaN below. Every float above 0 is a normal float64.
inline double natural_log(float x) {
  const double above = log_of_normal(static_cast<double>(x));
  if (x > 0.0f) return x < std::numeric_limits<float>::infinity() ? above : static_cast<double>(x);
  return x == 0.0f ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
}

inline float binary_log(float x) { return static_cast<float>(natural_log(x) * 1.4426950408889634); }
