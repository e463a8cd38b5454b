/** Operations of single kernel calls, for a profile's GFLOP/s: what the kernel really multiplies, scores of the backward pass included. */
import { headShapeOf, type ModelShape, sparseShapeOf } from '../model/shape.js';
import { localBlocks } from './attention.js';
import { compressedPairs, densePairs, scorePairs, selectedPairs, windowPairs } from './pairs.js';
import type { CallFlops } from './train-profile.js';

/** Attention sees the same lengths in every call; linear layers say their sizes in their arguments. */
export function kernelFlops(shape: ModelShape, lengths: readonly number[]): CallFlops {
  const { heads, dk, dv } = headShapeOf(shape);
  const sparse = sparseShapeOf(shape);
  const total = (pairs: (length: number) => number) => lengths.reduce((sum, length) => sum + pairs(length), 0);
  const attention = (name: string, pairs: (length: number) => number) => {
    const count = heads * total(pairs);
    // Backward: the scores again, and the gradients of values, probabilities, queries and keys.
    const pair = { forward: 2 * (dk + dv), backward: 2 * (3 * dk + 2 * dv) };
    return [
      [`${name}_forward`, pair.forward * count],
      [`${name}_backward`, pair.backward * count],
    ] as const;
  };
  const calls = new Map<string, number>([
    ...attention('dense', densePairs),
    ...attention('window', (length) => windowPairs(length, sparse.w)),
    ...attention('compressed', (length) => compressedPairs(length, sparse)),
    // Which blocks are chosen changes nothing: the current one is seen in part, all others whole.
    ...attention('selected', (length) => selectedPairs(localBlocks(length, 1, sparse), 1, sparse)),
    ['select_forward', 2 * dk * heads * total((length) => scorePairs(length, sparse))],
  ]);
  return (kernel, values) => {
    if (!kernel.startsWith('linear_')) return calls.get(kernel) ?? 0;
    const [rows, outputs, inputs] = values.slice(3, 6) as number[];
    return 2 * rows * outputs * inputs;
  };
}
