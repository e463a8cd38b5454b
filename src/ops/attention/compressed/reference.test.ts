import { describe, expect, it } from 'vitest';
import { dot, finiteDifferences, randomValues, relativeError } from '../../../testing/numbers.js';
import type { HeadShape } from '../shape.js';
import { compressedBackward, compressedForward } from './reference.js';

const SHAPE: HeadShape = { heads: 2, groups: 1, dk: 2, dv: 3 };
const ONE: HeadShape = { heads: 1, groups: 1, dk: 1, dv: 1 };
const BLOCKS = { l: 4, d: 2 };

describe('compressed attention reference', () => {
  it('sees a block from its last token on, and nothing before', () => {
    // 9 tokens: blocks [0,4) [2,6) [4,8), seen from the positions 3, 5 and 7.
    const k = new Float64Array(3);
    const { out, lse } = compressedForward(
      new Float64Array(9),
      k,
      Float64Array.of(2, 4, 9),
      [0, 9],
      [0, 3],
      ONE,
      BLOCKS,
    );
    expect([...out]).toEqual([0, 0, 0, 2, 2, 3, 3, 5, 5]);
    expect([...lse.slice(0, 4)]).toEqual([-Infinity, -Infinity, -Infinity, 0]);
    expect(lse[8]).toBeCloseTo(Math.log(3), 15);
  });

  it('gives zero gradients where nothing is visible', () => {
    const q = randomValues(3 * 4, 1);
    const { dq, dk, dv } = compressedBackward(
      q,
      new Float64Array(0),
      new Float64Array(0),
      [0, 3],
      [0, 0],
      SHAPE,
      BLOCKS,
      randomValues(18, 2),
    );
    expect(dq).toEqual(new Float64Array(12));
    expect([dk.length, dv.length]).toEqual([0, 0]);
  });

  it('has gradients equal to finite differences', () => {
    const [starts, cmpStarts] = [
      [0, 7, 10, 15],
      [0, 2, 2, 3],
    ];
    const [q, k, v, dOut] = [randomValues(60, 1), randomValues(6, 2), randomValues(9, 3), randomValues(90, 4)];
    const gradients = compressedBackward(q, k, v, starts, cmpStarts, SHAPE, BLOCKS, dOut);
    const value = () => dot(compressedForward(q, k, v, starts, cmpStarts, SHAPE, BLOCKS).out, dOut);
    expect(relativeError(gradients.dq, finiteDifferences(value, q))).toBeLessThan(1e-8);
    expect(relativeError(gradients.dk, finiteDifferences(value, k))).toBeLessThan(1e-8);
    expect(relativeError(gradients.dv, finiteDifferences(value, v))).toBeLessThan(1e-8);
  });
});
