#pragma once

// Cosine and sine of an angle, right to float32 for angles up to 2^20. Reduced by multiples of pi/2 in two parts (the
// first has 33 bits, so its product is exact); in float64, as on the CPU: float32 sums would cost digits that count.
__device__ __forceinline__ float2 cosine_sine(float angle) {
  constexpr double TWO_OVER_PI = 0.63661977236758134308, HIGH = 1.57079632673412561417e+00,
                   LOW = 6.07710050650619224932e-11;
  const double x = angle;
  const double turns = floor(x * TWO_OVER_PI + 0.5);
  const double r = (x - turns * HIGH) - turns * LOW;
  const double r2 = r * r;
  const double s =
      r * (1 + r2 * (-1.0 / 6 + r2 * (1.0 / 120 + r2 * (-1.0 / 5040 + r2 * (1.0 / 362880 - r2 * (1.0 / 39916800))))));
  const double c = 1 + r2 * (-0.5 + r2 * (1.0 / 24 + r2 * (-1.0 / 720 + r2 * (1.0 / 40320 + r2 * (-1.0 / 3628800 +
                                                                                              r2 * (1.0 / 479001600))))));
  const int quadrant = (int)(turns - 4 * floor(turns * 0.25));
  const float sine = (float)(quadrant & 1 ? c : s), cosine = (float)(quadrant & 1 ? s : c);
  return make_float2(quadrant == 1 || quadrant == 2 ? -cosine : cosine, quadrant >= 2 ? -sine : sine);
}
