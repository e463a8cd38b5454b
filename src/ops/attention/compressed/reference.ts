/** Attention over compressed blocks in float64: token t attends the blocks that end at or before it. */

import { compressedCount } from '../../common/sequences.js';
import { attendBackward, attendForward, range, sequenceOf, type VisibleKeys } from '../branch-reference.js';
import type { HeadShape, SparseShape } from '../shape.js';

type BlockShape = Pick<SparseShape, 'l' | 'd'>;

/** `q` [T,H,dk], `k` [Tc,G,dk], `v` [Tc,G,dv]; `starts` and `cmpStarts` are cu_seqlens of tokens and of blocks. */
export function compressedForward(
  q: Float64Array,
  k: Float64Array,
  v: Float64Array,
  starts: ArrayLike<number>,
  cmpStarts: ArrayLike<number>,
  shape: HeadShape,
  blocks: BlockShape,
) {
  return attendForward(q, k, v, shape, finishedBlocks(starts, cmpStarts, blocks));
}

export function compressedBackward(
  q: Float64Array,
  k: Float64Array,
  v: Float64Array,
  starts: ArrayLike<number>,
  cmpStarts: ArrayLike<number>,
  shape: HeadShape,
  blocks: BlockShape,
  dOut: Float64Array,
) {
  return attendBackward(q, k, v, shape, finishedBlocks(starts, cmpStarts, blocks), dOut);
}

/** Block i covers the positions [i*d, i*d+l): it is seen from i*d+l-1 on. */
export function finishedBlocks(
  starts: ArrayLike<number>,
  cmpStarts: ArrayLike<number>,
  { l, d }: BlockShape,
): VisibleKeys {
  const sequence = sequenceOf(starts);
  return (token) => {
    const s = sequence[token];
    const seen = token - starts[s] + 1;
    return range(cmpStarts[s], cmpStarts[s] + compressedCount(seen, l, d));
  };
}
