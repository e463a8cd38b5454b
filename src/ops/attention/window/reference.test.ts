import { describe, expect, it } from 'vitest';
import { dot, finiteDifferences, randomValues, relativeError } from '../../../testing/numbers.js';
import { denseForward } from '../dense/reference.js';
import type { HeadShape } from '../shape.js';
import { windowBackward, windowForward } from './reference.js';

const SHAPE: HeadShape = { heads: 2, groups: 1, dk: 2, dv: 3 };
const ONE: HeadShape = { heads: 1, groups: 1, dk: 1, dv: 1 };

describe('window attention reference', () => {
  it('attends exactly w tokens, the current one among them', () => {
    const zeros = new Float64Array(6);
    const { out } = windowForward(zeros, zeros, Float64Array.of(1, 2, 4, 8, 16, 32), [0, 4, 6], ONE, 2);
    expect([...out]).toEqual([1, 1.5, 3, 6, 16, 24]);
  });

  it('returns the values for w = 1', () => {
    const v = randomValues(5, 1);
    expect(windowForward(randomValues(5, 2), randomValues(5, 3), v, [0, 5], ONE, 1).out).toEqual(v);
  });

  it.each([
    [4, true],
    [5, true],
    [3, false],
  ])('of width %i is dense for 4 tokens: %s', (w, same) => {
    const [q, k, v] = [randomValues(16, 1), randomValues(8, 2), randomValues(12, 3)];
    const error = relativeError(windowForward(q, k, v, [0, 4], SHAPE, w).out, denseForward(q, k, v, [0, 4], SHAPE).out);
    expect(error === 0).toBe(same);
  });

  it('has gradients equal to finite differences', () => {
    const [q, k, v, dOut] = [randomValues(28, 1), randomValues(14, 2), randomValues(21, 3), randomValues(42, 4)];
    const starts = [0, 5, 7];
    const gradients = windowBackward(q, k, v, starts, SHAPE, 3, dOut);
    const value = () => dot(windowForward(q, k, v, starts, SHAPE, 3).out, dOut);
    expect(relativeError(gradients.dq, finiteDifferences(value, q))).toBeLessThan(1e-8);
    expect(relativeError(gradients.dk, finiteDifferences(value, k))).toBeLessThan(1e-8);
    expect(relativeError(gradients.dv, finiteDifferences(value, v))).toBeLessThan(1e-8);
  });
});
