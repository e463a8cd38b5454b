/**
 * Floating-point operations of training, in two conventions. `used` counts what the maths needs: 6 per parameter of
 * every matrix product and token, and the (query, key) pairs each branch really sees, three times the forward pass.
 * `palm` counts attention as if it were dense and not causal, the common convention of the PaLM paper, so that figures
 * can be compared with others'.
 */
import { compressedCount } from '../ops/common/sequences.js';
import { ITERATIONS } from '../ops/muon/reference.js';
import { weightMatrices } from './memory.js';
import { headShapeOf, hiddenSize, type ModelShape, phiHiddenSize, projectionPairs, sparseShapeOf } from './shape.js';

/** Parameters that take part in matrix products: not the embedding table (a look-up), not norms. */
export function matrixParameters(shape: ModelShape): number {
  const { dim, nLayers, vocabSize, mlp } = shape;
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const projections = dim * (heads * dk + projectionPairs(shape) * groups * (dk + dv) + heads * dv);
  const gate = shape.attention === 'nsa' ? 3 * heads * dim : 0;
  const feedForward = (mlp === 'swiglu' ? 3 : 2) * dim * hiddenSize(shape);
  return nLayers * (projections + gate + feedForward) + vocabSize * dim;
}

/** (query, key) pairs of one sequence and head, and the work of phi in multiplications. */
function attentionPairs(shape: ModelShape, length: number): number {
  if (shape.attention === 'dense') return (length * (length + 1)) / 2;
  const { l, d, lSel, nSel, w } = sparseShapeOf(shape);
  let pairs = 0;
  for (let t = 0; t < length; t++) {
    const current = Math.floor(t / lSel);
    pairs += Math.min(t + 1, w); // window
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
  let used = 0;
  let palm = 0;
  for (const [length, count] of counted) {
    const perPair = 2 * (dk + dv) * heads * shape.nLayers;
    let phi = 0;
    if (shape.attention === 'nsa' && shape.nsa.phi === 'mlp') {
      const hidden = phiHiddenSize(shape);
      phi = 2 * compressedCount(length, l, d) * groups * shape.nLayers * hidden * (l + 1) * (dk + dv);
    }
    used += count * (products * length + 3 * (perPair * attentionPairs(shape, length) + phi));
    palm += count * (products * length + 3 * perPair * length * length);
  }
  return { used, palm };
}
