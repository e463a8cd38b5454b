/** Window attention in float64: token t attends exactly the w tokens t-w+1 to t, as far as its sequence has them. */

import { attendBackward, attendForward, range, sequenceOf, type VisibleKeys } from '../branch-reference.js';
import type { HeadShape } from '../shape.js';

/** `q` [T,H,dk], `k` [T,G,dk], `v` [T,G,dv]; `starts` is cu_seqlens. */
export function windowForward(
  q: Float64Array,
  k: Float64Array,
  v: Float64Array,
  starts: ArrayLike<number>,
  shape: HeadShape,
  w: number,
) {
  return attendForward(q, k, v, shape, recent(starts, w));
}

export function windowBackward(
  q: Float64Array,
  k: Float64Array,
  v: Float64Array,
  starts: ArrayLike<number>,
  shape: HeadShape,
  w: number,
  dOut: Float64Array,
) {
  return attendBackward(q, k, v, shape, recent(starts, w), dOut);
}

function recent(starts: ArrayLike<number>, w: number): VisibleKeys {
  const sequence = sequenceOf(starts);
  return (token) => range(Math.max(starts[sequence[token]], token - w + 1), token + 1);
}
