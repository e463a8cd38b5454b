/**
 * Floating-point operations of training, in two conventions. `used` counts what the maths needs: 6 per parameter of
 * every matrix product and token, and the (query, key) pairs each branch really sees, three times the forward pass.
 * `palm` counts attention as if it were dense and not causal, the common convention of the PaLM paper, so that figures
 * can be compared with others'.
 */
import { compressedCount } from '../ops/common/sequences.js';
import { ITERATIONS } from '../ops/muon/reference.js';
import { weightMatrices } from './memory.js';
import {
  headShapeOf,
  hiddenSize,
  type LayerShape,
  layerShapes,
  type ModelShape,
  phiHiddenSize,
  projectionPairs,
  sparseShapeOf,
} from './shape.js';

/** Parameters that take part in matrix products: not the embedding table (a look-up), not norms. */
export function matrixParameters(shape: ModelShape): number {
  const { dim, vocabSize, mlp } = shape;
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const feedForward = (mlp === 'swiglu' ? 3 : 2) * dim * hiddenSize(shape);
  const layers = layerShapes(shape).map((layer) => {
    const projections = dim * (heads * dk + projectionPairs(layer) * groups * (dk + dv) + heads * dv);
    const gate = layer.attention === 'nsa' ? 3 * heads * dim : 0;
    return projections + gate + feedForward;
  });
  return layers.reduce((sum, count) => sum + count, 0) + vocabSize * dim;
}

/** (query, key) pairs of one sequence and head. */
function attentionPairs(shape: LayerShape, length: number): number {
  if (shape.attention === 'dense') return (length * (length + 1)) / 2;
  const { l, d, lSel, nSel, w } = sparseShapeOf(shape);
  let pairs = 0;
  for (let t = 0; t < length; t++) {
    pairs += Math.min(t + 1, w); // window
    if (shape.attention === 'window') continue;
    const current = Math.floor(t / lSel);
    pairs += compressedCount(t + 1, l, d) * 1; // compressed
    pairs += current < nSel ? t + 1 : (nSel - 1) * lSel + (t % lSel) + 1; // selected
  }
  return pairs;
}

/** Operations of the Newton-Schulz iterations of one step of Muon: X Xᵀ, its square, and their product with X. */
export function muonFlops(shape: ModelShape): number {
  return weightMatrices(shape).reduce((sum, { rows, columns, count }) => {
    const [short, long] = [Math.min(rows, columns), Math.max(rows, columns)];
    return sum + ITERATIONS * count * 2 * short * short * (2 * long + short);
  }, 0);
}

/** Operations of one forward and backward pass over sequences of the given lengths. */
export function trainingFlops(shape: ModelShape, lengths: readonly number[]): { used: number; palm: number } {
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const { l, d } = sparseShapeOf(shape);
  const counted = new Map<number, number>();
  for (const length of lengths) counted.set(length, (counted.get(length) ?? 0) + 1);
  const products = 6 * matrixParameters(shape);
  // Layers of one kind do the same work.
  const kinds = new Map<LayerShape['attention'], { layer: LayerShape; layers: number }>();
  for (const layer of layerShapes(shape))
    kinds.set(layer.attention, { layer, layers: (kinds.get(layer.attention)?.layers ?? 0) + 1 });
  const perPair = 2 * (dk + dv) * heads;
  let used = 0;
  let palm = 0;
  for (const [length, count] of counted) {
    let attention = 0;
    for (const { layer, layers } of kinds.values()) {
      const hasPhi = layer.attention === 'nsa' && shape.nsa.phi === 'mlp';
      const blocks = hasPhi ? compressedCount(length, l, d) : 0;
      const phi = 2 * blocks * groups * phiHiddenSize(shape) * (l + 1) * (dk + dv);
      attention += layers * (perPair * attentionPairs(layer, length) + phi);
    }
    used += count * (products * length + 3 * attention);
    palm += count * (products * length + 3 * perPair * shape.nLayers * length * length);
  }
  return { used, palm };
}
