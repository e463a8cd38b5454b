/** Attention over selected blocks in float64: token t attends the tokens s <= t of the blocks chosen for its group. */

import {
  attendBackward,
  attendForward,
  range,
  scores,
  sequenceOf,
  softmax,
  type VisibleKeys,
} from '../branch-reference.js';
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

/** The share of each selected block in the attention of a token, summed over the heads of the group: [T,G,nSel]. */
export function blockMasses(
  q: Float64Array,
  k: Float64Array,
  selected: ArrayLike<number>,
  starts: ArrayLike<number>,
  shape: HeadShape,
  selection: SelectionShape,
): Float64Array {
  const { lSel, nSel } = selection;
  const [sequence, visible] = [sequenceOf(starts), tokensOfBlocks(selected, starts, shape, selection)];
  const perGroup = shape.heads / shape.groups;
  const masses = new Float64Array(sequence.length * shape.groups * nSel);
  for (let token = 0; token < sequence.length; token++)
    for (let group = 0; group < shape.groups; group++) {
      const at = (token * shape.groups + group) * nSel;
      const keys = visible(token, group);
      const slots = keys.map((key) => {
        const block = Math.floor((key - starts[sequence[token]]) / lSel);
        return range(0, nSel).find((slot) => selected[at + slot] === block)!;
      });
      for (let head = group * perGroup; head < (group + 1) * perGroup; head++) {
        const { probabilities } = softmax(scores(q, k, shape, token * shape.heads + head, group, keys));
        probabilities.forEach((probability, i) => {
          masses[at + slots[i]] += probability;
        });
      }
    }
  return masses;
}
