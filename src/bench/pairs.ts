/** Exact counts of visible (query, key) pairs: GFLOP/s that include masked pairs would be too high. */
import type { SparseShape } from '../ops/attention/shape.js';
import { compressedCount } from '../ops/common/sequences.js';

/** Pairs of one head over one sequence of `length` tokens. */
export function densePairs(length: number): number {
  return (length * (length + 1)) / 2;
}

export function windowPairs(length: number, w: number): number {
  const full = Math.max(0, length - w);
  return densePairs(Math.min(length, w)) + full * w;
}

export function compressedPairs(length: number, { l, d }: Pick<SparseShape, 'l' | 'd'>): number {
  let pairs = 0;
  for (let t = 0; t < length; t++) pairs += compressedCount(t + 1, l, d);
  return pairs;
}

/** Scores that rank blocks: only tokens with more blocks than slots have a choice to make. */
export function scorePairs(length: number, { l, d, lSel, nSel }: SparseShape): number {
  let pairs = 0;
  for (let t = nSel * lSel; t < length; t++) pairs += compressedCount(t + 1, l, d);
  return pairs;
}

/** Pairs of one head, averaged over the groups, which choose different blocks; `selected` [length, groups, nSel]. */
export function selectedPairs(
  selected: ArrayLike<number>,
  groups: number,
  { lSel, nSel }: Pick<SparseShape, 'lSel' | 'nSel'>,
): number {
  let pairs = 0;
  for (let i = 0; i < selected.length; i++) {
    if (selected[i] < 0) continue;
    const token = Math.floor(i / (groups * nSel));
    pairs += Math.min(lSel, token + 1 - selected[i] * lSel);
  }
  return pairs / groups;
}
