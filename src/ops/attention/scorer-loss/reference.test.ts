import { describe, expect, it } from 'vitest';
import { randomInputs, starts } from '../../../testing/attention.js';
import { finiteDifferences, relativeError } from '../../../testing/numbers.js';
import { compressedCount } from '../../common/sequences.js';
import { selectBlocks } from '../select/reference.js';
import type { SparseShape } from '../shape.js';
import { attentionShares, scorerLoss } from './reference.js';

/** Two groups, two sequences, and two or three blocks that are chosen by score. */
const CASE = {
  name: 'small',
  lengths: [30, 22],
  heads: { heads: 4, groups: 2, dk: 3, dv: 3 },
  sparse: { l: 4, d: 2, lSel: 4, nSel: 6, w: 4 },
};

function given(seed: number, sparse: SparseShape = CASE.sparse) {
  const { lengths, heads } = CASE;
  const { q, kCmp, kSel } = randomInputs({ ...CASE, sparse }, seed);
  const layout = {
    starts: starts(lengths),
    cmpStarts: starts(lengths.map((length) => compressedCount(length, sparse.l, sparse.d))),
    heads,
    sparse,
  };
  const selected = selectBlocks(q.values, kCmp.values, layout.starts, layout.cmpStarts, heads, sparse);
  return { inputs: { q: q.values, kCmp: kCmp.values, kSel: kSel.values, selected }, layout };
}

describe('scorer loss reference', () => {
  it('has gradients equal to finite differences, with the attention held fixed', () => {
    const { inputs, layout } = given(1);
    const targets = attentionShares(inputs, layout);
    const { dq, dkCmp, pairs } = scorerLoss(inputs, layout, targets);
    const value = () => scorerLoss(inputs, layout, targets).loss;
    expect(pairs).toBe(2 * (30 - 16 + 22 - 16));
    expect(relativeError(dq, finiteDifferences(value, inputs.q))).toBeLessThan(1e-7);
    expect(relativeError(dkCmp, finiteDifferences(value, inputs.kCmp))).toBeLessThan(1e-7);
  });

  it('is positive, and 0 with gradient 0 where importance and attention agree', () => {
    expect(scorerLoss(given(2).inputs, given(2).layout).loss).toBeGreaterThan(0.01);
    // Queries of zeros, and blocks that do not overlap: all have the same importance and the same attention.
    const { inputs, layout } = given(2, { ...CASE.sparse, d: 4 });
    const { loss, dq, dkCmp, pairs } = scorerLoss({ ...inputs, q: new Float64Array(inputs.q.length) }, layout);
    expect(pairs).toBeGreaterThan(0);
    expect(Math.abs(loss)).toBeLessThan(1e-12);
    expect(Math.max(...dq.map(Math.abs), ...dkCmp.map(Math.abs))).toBeLessThan(1e-12);
  });
});
