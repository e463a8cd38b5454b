/** Random problems for the float64 reference of the whole attention core. */

import type { NsaInputs, NsaLayout } from '../ops/attention/reference.js';
import type { HeadShape, SparseShape } from '../ops/attention/shape.js';
import { compressedCount } from '../ops/common/sequences.js';
import { randomInputs, starts } from './attention.js';

export function nsaLayout(lengths: readonly number[], heads: HeadShape, sparse: SparseShape): NsaLayout {
  const blocks = lengths.map((length) => compressedCount(length, sparse.l, sparse.d));
  return { starts: starts(lengths), cmpStarts: starts(blocks), heads, sparse };
}

export function nsaInputs(layout: NsaLayout, seed: number): NsaInputs {
  const lengths = Array.from(layout.starts)
    .slice(1)
    .map((end, s) => end - layout.starts[s]);
  const inputs = randomInputs({ name: '', lengths, heads: layout.heads, sparse: layout.sparse }, seed);
  const { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates } = inputs;
  return {
    q: q.values,
    kCmp: kCmp.values,
    vCmp: vCmp.values,
    kSel: kSel.values,
    vSel: vSel.values,
    kWin: kWin.values,
    vWin: vWin.values,
    gates: gates.values,
  };
}
