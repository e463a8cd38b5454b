/** Printing float32 values: the fewest digits that read back as the same float32. */

/**
 * Losses are float32. Printed as float64 they would carry digits that mean nothing (0.1 -> 0.10000000149011612); printed
 * shorter than this, two different losses could look alike and "bitwise equal" could not be checked on the file.
 */
export function formatFloat32(value: number): string {
  const single = Math.fround(value);
  if (!Number.isFinite(single)) return String(single);
  // Nine digits always suffice for a float32.
  for (let digits = 1; digits < 9; digits++) {
    const candidate = Number(single.toPrecision(digits));
    if (Math.fround(candidate) === single) return String(candidate);
  }
  return String(Number(single.toPrecision(9)));
}
