/**
 * FP8 in float64: the formats e4m3 (4 bits of exponent, 3 of mantissa) and e5m2, the scale of a matrix, and a linear layer
 * whose operands are rounded to them. Rounding is to nearest, ties to even; what exceeds the largest number becomes it.
 */
import { linearBackward, linearForward } from './reference.js';

export type Fp8Format = 'e4m3' | 'e5m2';

interface FormatBits {
  readonly mantissa: number;
  readonly bias: number;
  /** The largest number, 1.75 times a power of two. */
  readonly largest: number;
}

const FORMATS: Readonly<Record<Fp8Format, FormatBits>> = {
  e4m3: { mantissa: 3, bias: 7, largest: 448 },
  e5m2: { mantissa: 2, bias: 15, largest: 57_344 },
};

/** The number that a code of one byte stands for. e4m3 has no infinities, and one NaN of either sign. */
export function fp8Value(code: number, format: Fp8Format): number {
  const { mantissa, bias, largest } = FORMATS[format];
  const exponent = (code & 0x7f) >> mantissa;
  const fraction = (code & ((1 << mantissa) - 1)) / 2 ** mantissa;
  const size = exponent === 0 ? fraction * 2 ** (1 - bias) : (1 + fraction) * 2 ** (exponent - bias);
  const isInfinity = format === 'e5m2' && (code & 0x7f) === 0x7c;
  const value = size <= largest ? size : isInfinity ? Number.POSITIVE_INFINITY : Number.NaN;
  return code & 0x80 ? -value : value;
}

/** The nearest number of the format. NaN stays NaN. */
export function roundToFp8(value: number, format: Fp8Format): number {
  const { mantissa, bias, largest } = FORMATS[format];
  const size = Math.abs(value);
  if (Number.isNaN(value) || size === 0) return value;
  const exponent = Math.max(Math.floor(Math.log2(Math.min(size, largest))), 1 - bias);
  const unit = 2 ** (exponent - mantissa);
  return Math.sign(value) * Math.min(roundToEven(size / unit) * unit, largest);
}

function roundToEven(value: number): number {
  const below = Math.floor(value);
  const rest = value - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 === 1) ? below + 1 : below;
}

/** The largest power of two that keeps values of up to `most` within the format; at most 2^126. */
export function fp8Scale(most: number, format: Fp8Format): number {
  if (most === 0) return 2 ** 126;
  const exact = Math.floor(Math.log2(FORMATS[format].largest / most));
  return 2 ** Math.min(126, exact);
}

/**
 * The values as a product sees them: rounded with one scale for all, that of the largest magnitude or of a bound on it. NaN
 * for all if one is not finite.
 */
export function quantised(values: Float64Array, format: Fp8Format, bound?: number): Float64Array {
  const most = bound ?? values.reduce((top, value) => Math.max(top, Math.abs(value)), 0);
  if (!Number.isFinite(most)) return values.map(() => Number.NaN);
  const scale = fp8Scale(most, format);
  return values.map((value) => roundToFp8(value * scale, format) / scale);
}

/** A bound on the norms of rows [dim] that were divided by their rms and multiplied by `weight` [dim]. */
export function normBound(weight: Float64Array): number {
  return 1.001 * Math.sqrt(weight.length) * Math.max(...weight.map(Math.abs));
}

/** A bound on the magnitudes of silu(x wᵀ), for rows of x with norms up to `norm` and the rows of `w`, both in e4m3. */
export function siluBound(norm: number, w: Float64Array, inputs: number): number {
  let largest = 0;
  for (let row = 0; row < w.length; row += inputs)
    largest = Math.max(largest, Math.hypot(...w.subarray(row, row + inputs)));
  return Math.max(0.28, 1.2 * norm * largest);
}

/** y = x wᵀ of a layer in FP8, and its two gradients, whose products have dy in e5m2. */
export function fp8Linear(
  x: Float64Array,
  w: Float64Array,
  dy: Float64Array,
  [rows, outputs, inputs]: readonly [number, number, number],
): Record<'y' | 'dx' | 'dw', Float64Array> {
  const [x8, w8, dy8] = [quantised(x, 'e4m3'), quantised(w, 'e4m3'), quantised(dy, 'e5m2')];
  return {
    y: linearForward(x8, w8, rows, outputs, inputs),
    ...linearBackward(x8, w8, dy8, rows, outputs, inputs),
  };
}
