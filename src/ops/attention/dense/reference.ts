/** Dense causal attention in float64: token t of a sequence attends its tokens 0 to t. */

import { attendBackward, attendForward, range, sequenceOf, type VisibleKeys } from '../branch-reference.js';
import type { HeadShape } from '../shape.js';

/** `q` [T,H,dk], `k` [T,G,dk], `v` [T,G,dv]; `starts` is cu_seqlens. */
export function denseForward(
  q: Float64Array,
  k: Float64Array,
  v: Float64Array,
  starts: ArrayLike<number>,
  shape: HeadShape,
) {
  return attendForward(q, k, v, shape, causal(starts));
}

export function denseBackward(
  q: Float64Array,
  k: Float64Array,
  v: Float64Array,
  starts: ArrayLike<number>,
  shape: HeadShape,
  dOut: Float64Array,
) {
  return attendBackward(q, k, v, shape, causal(starts), dOut);
}

function causal(starts: ArrayLike<number>): VisibleKeys {
  const sequence = sequenceOf(starts);
  return (token) => range(starts[sequence[token]], token + 1);
}
