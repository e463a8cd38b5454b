/**
 * Splitting a fused projection into heads and rotating them (RoPE), in float64 but for the angle.
 *
 * The angle is a float32 product of float32 factors, as Llama computes it: at position 131072 its rounding alone is
 * worth 0.004, so code that loads such weights must round the same way, and kernel and reference agree only if both do.
 */
import type { RotaryAngles } from './frequencies.js';

export interface PartShape {
  readonly heads: number;
  readonly size: number;
  readonly rotate: boolean;
}

/** The angle of pair j at a position, in float32. */
export function angle(position: number, j: number, { frequencies, scale }: RotaryAngles): number {
  const frequency = Math.fround(frequencies[j]);
  return Math.fround(Math.fround(Math.fround(position) / Math.fround(scale)) * frequency);
}

/** Rotates the pairs (x[j], x[j + size/2]) of one head by `direction` times their angles, and multiplies by the amplitude. */
function rotateHead(x: Float64Array, position: number, angles: RotaryAngles, direction: 1 | -1): Float64Array {
  const half = x.length / 2;
  const y = new Float64Array(x.length);
  for (let j = 0; j < half; j++) {
    const a = direction * angle(position, j, angles);
    const [cosine, sine] = [angles.amplitude * Math.cos(a), angles.amplitude * Math.sin(a)];
    y[j] = x[j] * cosine - x[j + half] * sine;
    y[j + half] = x[j + half] * cosine + x[j] * sine;
  }
  return y;
}

/** `fused` [T, sum of heads*size] -> one [T, heads, size] per part; `positions` has one number per token. */
export function splitForward(
  fused: Float64Array,
  parts: readonly PartShape[],
  positions: ArrayLike<number>,
  angles: RotaryAngles,
): Float64Array[] {
  const width = parts.reduce((total, { heads, size }) => total + heads * size, 0);
  const outputs = parts.map(({ heads, size }) => new Float64Array(positions.length * heads * size));
  forEachHead(parts, positions.length, width, (part, token, from, to) => {
    const { size, rotate } = parts[part];
    const x = fused.subarray(from, from + size);
    outputs[part].set(rotate ? rotateHead(x, positions[token], angles, 1) : x, to);
  });
  return outputs;
}

/** `gradients` of the parts, null where nothing used one -> the gradient of `fused`. */
export function splitBackward(
  gradients: readonly (Float64Array | null)[],
  parts: readonly PartShape[],
  positions: ArrayLike<number>,
  angles: RotaryAngles,
): Float64Array {
  const width = parts.reduce((total, { heads, size }) => total + heads * size, 0);
  const dFused = new Float64Array(positions.length * width);
  forEachHead(parts, positions.length, width, (part, token, from, to) => {
    const { size, rotate } = parts[part];
    const dy = gradients[part]?.subarray(to, to + size);
    if (dy) dFused.set(rotate ? rotateHead(dy, positions[token], angles, -1) : dy, from);
  });
  return dFused;
}

function forEachHead(
  parts: readonly PartShape[],
  tokens: number,
  width: number,
  body: (part: number, token: number, fusedAt: number, partAt: number) => void,
): void {
  let column = 0;
  parts.forEach(({ heads, size }, part) => {
    for (let token = 0; token < tokens; token++)
      for (let head = 0; head < heads; head++)
        body(part, token, token * width + column + head * size, (token * heads + head) * size);
    column += heads * size;
  });
}
