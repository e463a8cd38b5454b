import { describe, expect, it } from 'vitest';
import { dot, finiteDifferences, randomValues, relativeError } from '../../../testing/numbers.js';
import { denseForward } from '../dense/reference.js';
import type { HeadShape } from '../shape.js';
import { selectedBackward, selectedForward } from './reference.js';

const ONE: HeadShape = { heads: 1, groups: 1, dk: 1, dv: 1 };
const SHAPE: HeadShape = { heads: 4, groups: 2, dk: 2, dv: 3 };

/** A selection of two blocks of 2 for 5 + 2 tokens and 2 groups: the first or the middle block, and the current one. */
const SELECTED = [0, -1, 0, -1, 0, -1, 0, -1, 0, 1, 0, 1, 0, 1, 1, -1, 0, 2, 1, 2, 0, -1, 0, -1, 0, -1, 0, -1];
const STARTS = [0, 5, 7];
const SELECTION = { lSel: 2, nSel: 2 };

describe('selected attention reference', () => {
  it('attends the tokens of the blocks up to the current one', () => {
    const zeros = new Float64Array(5);
    const v = Float64Array.of(1, 2, 4, 8, 16);
    const selected = [0, -1, 0, -1, 0, 1, 1, -1, 0, 2];
    const { out } = selectedForward(zeros, zeros, v, selected, [0, 5], ONE, SELECTION);
    expect(relativeError(out, [1, 1.5, 7 / 3, 6, 19 / 3])).toBeLessThan(1e-15);
  });

  it('gives 0 and -Infinity where nothing is selected', () => {
    const { out, lse } = selectedForward(
      randomValues(1, 1),
      randomValues(1, 2),
      randomValues(1, 3),
      [-1, -1],
      [0, 1],
      ONE,
      SELECTION,
    );
    expect([out[0], lse[0]]).toEqual([0, -Infinity]);
  });

  it('is dense when every block is selected', () => {
    const [q, k, v] = [randomValues(5 * 8, 1), randomValues(5 * 4, 2), randomValues(5 * 6, 3)];
    const all = Array.from({ length: 5 * 2 * 3 }, (_, i) => i % 3);
    const { out, lse } = selectedForward(q, k, v, all, [0, 5], SHAPE, { lSel: 2, nSel: 3 });
    const dense = denseForward(q, k, v, [0, 5], SHAPE);
    expect(out).toEqual(dense.out);
    expect(lse).toEqual(dense.lse);
  });

  it('has gradients equal to finite differences', () => {
    const [q, k, v, dOut] = [randomValues(56, 1), randomValues(28, 2), randomValues(42, 3), randomValues(84, 4)];
    const gradients = selectedBackward(q, k, v, SELECTED, STARTS, SHAPE, SELECTION, dOut);
    const value = () => dot(selectedForward(q, k, v, SELECTED, STARTS, SHAPE, SELECTION).out, dOut);
    expect(relativeError(gradients.dq, finiteDifferences(value, q))).toBeLessThan(1e-8);
    expect(relativeError(gradients.dk, finiteDifferences(value, k))).toBeLessThan(1e-8);
    expect(relativeError(gradients.dv, finiteDifferences(value, v))).toBeLessThan(1e-8);
  });
});
