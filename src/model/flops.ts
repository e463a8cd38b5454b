/**
 * Floating-point operations of training, in two conventions. `used` counts what the maths needs: 6 per parameter of
 * every matrix product and token, and the (query, key) pairs each branch really sees, three times the forward pass.
 * `palm` counts attention as if it were dense and not causal, the common convention of the PaLM paper, so that figures
 * can be compared with others'.
 */
import { isKept } from '../ops/attention/fused/op.js';
import { compressedCount } from '../ops/common/sequences.js';
import { ITERATIONS } from '../ops/muon/reference.js';
import { blockMatrices, phiMatrices, weightMatrices } from './memory.js';
import { compressedPairs, densePairs, selectedPairs, windowPairs } from './pairs.js';
import { headShapeOf, type LayerShape, layerShapes, type ModelShape, phiHiddenSize, sparseShapeOf } from './shape.js';

/** Parameters that take part in the matrix products of every token: not the embedding table (a look-up), norms or phi. */
function matrixParameters(shape: ModelShape): number {
  const layers = layerShapes(shape).map((layer) => blockMatrices(layer) - phiMatrices(layer));
  return layers.reduce((sum, count) => sum + count, 0) + shape.vocabSize * shape.dim;
}

/** (query, key) pairs of one sequence and head. */
function attentionPairs(shape: LayerShape, length: number): number {
  const sparse = sparseShapeOf(shape);
  if (shape.attention === 'dense') return densePairs(length);
  const window = windowPairs(length, sparse.w);
  return shape.attention === 'window'
    ? window
    : window + compressedPairs(length, sparse) + selectedPairs(length, sparse);
}

/** Operations of the Newton-Schulz iterations of one step of Muon: X Xᵀ, its square, and their product with X. */
export function muonFlops(shape: ModelShape): number {
  return weightMatrices(shape).reduce((sum, { rows, columns, count }) => {
    const [short, long] = [Math.min(rows, columns), Math.max(rows, columns)];
    return sum + ITERATIONS * count * 2 * short * short * (2 * long + short);
  }, 0);
}

/**
 * Operations that gradient checkpointing adds to a pass over sequences of the given lengths: the forward pass of the blocks
 * once more. The fused kernels keep the results of the compressed branch of long sequences instead.
 */
export function recomputedFlops(shape: ModelShape, lengths: readonly number[], isFused: boolean): number {
  const { heads, dk, dv } = headShapeOf(shape);
  const tokens = lengths.reduce((sum, length) => sum + length, 0);
  const head = 2 * shape.vocabSize * shape.dim * tokens;
  const forward = trainingFlops(shape, lengths).used / 3 - head;
  if (!isFused || !isKept(Math.max(...lengths))) return forward;
  const layers = layerShapes(shape).filter(({ attention }) => attention === 'nsa').length;
  const pairs = lengths.reduce((sum, length) => sum + compressedPairs(length, sparseShapeOf(shape)), 0);
  return forward - layers * 2 * (dk + dv) * heads * pairs;
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
