/** FLOP of single kernel calls for the profile: what the kernel multiplies, recomputed scores included. */
import { compressedPairs, densePairs, scorePairs, selectedPairs, windowPairs } from '../model/pairs.js';
import { headShapeOf, type ModelShape, sparseShapeOf } from '../model/shape.js';
import type { CallFlops } from './train-profile.js';

/** Attention has the same lengths in every call; linear layers have their sizes as arguments. */
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
    ...attention('selected', (length) => selectedPairs(length, sparse)),
    ['select_forward', 2 * dk * heads * total((length) => scorePairs(length, sparse))],
  ]);
  return (kernel, values) => {
    if (kernel === 'matrix_products') return 2 * (values.slice(4, 8) as number[]).reduce((all, size) => all * size, 1);
    if (!kernel.startsWith('linear_')) return calls.get(kernel) ?? 0;
    const [rows, outputs, inputs] = values.slice(3, 6) as number[];
    return 2 * rows * outputs * inputs;
  };
}
