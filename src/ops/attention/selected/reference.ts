/** Attention over selected blocks in float64: token t attends the tokens s <= t of the blocks chosen for its group. */

import { attendBackward, attendForward, range, sequenceOf, type VisibleKeys } from '../branch-reference.js';
import type { HeadShape, SparseShape } from '../shape.js';

type SelectionShape = Pick<SparseShape, 'lSel' | 'nSel'>;

/** `q` [T,H,dk], `k` [T,G,dk], `v` [T,G,dv], `selected` [T,G,nSel] with -1 for none; `starts` is cu_seqlens. */
export function selectedForward(
  q: Float64Array,
  k: Float64Array,
  v: Float64Array,
  selected: ArrayLike<number>,
  starts: ArrayLike<number>,
  shape: HeadShape,
  selection: SelectionShape,
) {
  return attendForward(q, k, v, shape, tokensOfBlocks(selected, starts, shape, selection));
}

export function selectedBackward(
  q: Float64Array,
  k: Float64Array,
  v: Float64Array,
  selected: ArrayLike<number>,
  starts: ArrayLike<number>,
  shape: HeadShape,
  selection: SelectionShape,
  dOut: Float64Array,
) {
  return attendBackward(q, k, v, shape, tokensOfBlocks(selected, starts, shape, selection), dOut);
}

function tokensOfBlocks(
  selected: ArrayLike<number>,
  starts: ArrayLike<number>,
  { groups }: HeadShape,
  { lSel, nSel }: SelectionShape,
): VisibleKeys {
  const sequence = sequenceOf(starts);
  return (token, group) =>
    range(0, nSel)
      .map((slot) => selected[(token * groups + group) * nSel + slot])
      .filter((block) => block >= 0)
      .flatMap((block) => {
        const begin = starts[sequence[token]] + block * lSel;
        return range(begin, Math.min(begin + lSel, token + 1));
      });
}
