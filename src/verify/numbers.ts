/** Reproducible random values, and the error measures of docs/explain/attention.md. */
export { relativeError } from '../ops/common/distance.js';

/** Uniform in [-1, 1) times `spread`, reproducible on every machine, exact in float32. */
export function randomValues(count: number, seed: number, spread = 1): Float64Array {
  let state = (Math.imul(seed, 0x9e3779b1) + 0x1234567) >>> 0 || 1;
  const values = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    values[i] = Math.fround(((state >>> 0) / 2 ** 31 - 1) * spread);
  }
  return values;
}

/** How many 32-bit values differ in their bits: two NaNs of the same bits are equal, 0 and -0 are not. */
export function differentBits(a: Float32Array | Int32Array, b: Float32Array | Int32Array): number {
  if (a.length !== b.length) throw new Error(`${a.length} values cannot be compared with ${b.length}`);
  const [x, y] = [a, b].map((values) => new Int32Array(values.buffer, values.byteOffset, values.length));
  let count = 0;
  for (let i = 0; i < x.length; i++) if (x[i] !== y[i]) count += 1;
  return count;
}

export function dot(a: ArrayLike<number>, b: ArrayLike<number>): number {
  let total = 0;
  for (let i = 0; i < a.length; i++) total += a[i] * b[i];
  return total;
}

export function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}

/** Adds to the first values of `into`. */
export function addTo(into: Float64Array, values: ArrayLike<number>): void {
  for (let i = 0; i < values.length; i++) into[i] += values[i];
}

/** cu_seqlens of some lengths. */
export function startsOf(lengths: readonly number[]): number[] {
  let total = 0;
  return [0, ...lengths.map((length) => (total += length))];
}
