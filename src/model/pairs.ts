/**
 * Exact numbers of visible (query, key) pairs of one head over one sequence: operations that include masked pairs would be
 * too many.
 */
import type { SparseShape } from '../ops/attention/shape.js';

export function densePairs(length: number): number {
  return (length * (length + 1)) / 2;
}

export function windowPairs(length: number, w: number): number {
  const full = Math.max(0, length - w);
  return densePairs(Math.min(length, w)) + full * w;
}

/** Token t sees the blocks that end before it: floor((t + 1 - l) / d) + 1 of them from token l - 1 on. */
export function compressedPairs(length: number, { l, d }: Pick<SparseShape, 'l' | 'd'>): number {
  if (length < l) return 0;
  const last = length - l;
  const whole = Math.floor(last / d);
  return last + 1 + d * densePairs(whole - 1) + whole * (last - whole * d + 1);
}

/** Scores that rank blocks: only tokens with more blocks than slots have a choice to make. */
export function scorePairs(length: number, sparse: Pick<SparseShape, 'l' | 'd' | 'lSel' | 'nSel'>): number {
  const without = Math.min(length, sparse.nSel * sparse.lSel);
  return compressedPairs(length, sparse) - compressedPairs(without, sparse);
}

/** Independent of which blocks are selected: a token sees its own up to itself and all others whole. */
export function selectedPairs(length: number, { lSel, nSel }: Pick<SparseShape, 'lSel' | 'nSel'>): number {
  const before = Math.min(length, nSel * lSel); // tokens that see all before them
  const rest = length - before;
  const blocks = Math.floor(rest / lSel);
  return densePairs(before) + rest * (nSel - 1) * lSel + blocks * densePairs(lSel) + densePairs(rest % lSel);
}

/** As `selectedPairs` for given blocks [length, groups, nSel], averaged over the groups, which choose different ones. */
export function pairsOfBlocks(
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
