/** From the fused projection to queries, keys and values in float64: bias, norms of heads, rotary positions. */
import { rmsnormForward } from '../ops/rmsnorm/reference.js';
import type { RotaryAngles } from '../ops/rope/frequencies.js';
import { type PartShape, splitForward } from '../ops/rope/reference.js';
import { headShapeOf, type LayerShape, seesPositions } from './shape.js';

/** A part of the fused projection, and the name of its heads' norm in a model with `qkNorm`. */
export interface ReferencePart extends PartShape {
  readonly norm: 'q_norm' | 'k_norm' | null;
}

/** The parts of the fused projection, in their order. */
function referenceParts(shape: LayerShape): ReferencePart[] {
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const query: ReferencePart = { heads, size: dk, rotate: seesPositions(shape), norm: 'q_norm' };
  const key: ReferencePart = { heads: groups, size: dk, rotate: true, norm: 'k_norm' };
  const value: ReferencePart = { heads: groups, size: dv, rotate: false, norm: null };
  if (shape.attention !== 'nsa') return [query, key, value];
  const compressed: ReferencePart = { ...key, rotate: shape.nsa.cmpRope === 'before' };
  const selected = { ...key, rotate: seesPositions(shape) };
  return shape.nsa.sharedKv ? [query, compressed, value] : [query, compressed, value, selected, value, key, value];
}

/**
 * `fused` [T, columns] → one [T, heads, size] for each part. `weight` returns a parameter of the attention layer by its
 * name (`qkv_bias`, `q_norm`, `k_norm`).
 */
export function headsForward(
  shape: LayerShape,
  fused: Float64Array,
  weight: (name: string) => Float64Array,
  positions: ArrayLike<number>,
  angles: RotaryAngles,
): Float64Array[] {
  const parts = referenceParts(shape);
  const biased = shape.qkvBias ? addRow(fused, weight('qkv_bias')) : fused;
  if (!shape.qkNorm) return splitForward(biased, parts, positions, angles);
  const plain = parts.map((part) => ({ ...part, rotate: false }));
  return splitForward(biased, plain, positions, angles).map((x, i) => {
    const { norm } = parts[i];
    const normed = norm ? rmsnormForward(x, weight(norm), shape.normEps) : x;
    return splitForward(normed, [parts[i]], positions, angles)[0];
  });
}

/** Adds a row to every row. */
export function addRow(rows: Float64Array, row: Float64Array): Float64Array {
  return rows.map((value, i) => value + row[i % row.length]);
}
