/** Numbers for tests: reproducible random values, distances, finite differences. */
export { relativeError } from '../ops/common/distance.js';

/** Uniform in [-1, 1), the same for a seed everywhere. */
export function randomValues(count: number, seed: number): Float64Array {
  let state = (seed * 2654435761 + 12345) >>> 0;
  const out = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    state >>>= 0;
    // Values that float32 holds exactly, so a kernel and its reference start from the same numbers.
    out[i] = Math.fround((state / 2 ** 32) * 2 - 1);
  }
  return out;
}

/**
 * Gradient of a scalar function by central differences, at `indices` (all by default). Use float64 functions only.
 */
export function finiteDifferences(
  f: (x: Float64Array) => number,
  x: Float64Array,
  indices?: number[],
  h = 1e-5,
): Float64Array {
  const at = indices ?? Array.from(x, (_, i) => i);
  return Float64Array.from(at, (i) => {
    const kept = x[i];
    x[i] = kept + h;
    const above = f(x);
    x[i] = kept - h;
    const below = f(x);
    x[i] = kept;
    return (above - below) / (2 * h);
  });
}

export function dot(a: ArrayLike<number>, b: ArrayLike<number>): number {
  let total = 0;
  for (let i = 0; i < a.length; i++) total += a[i] * b[i];
  return total;
}
