import { describe, expect, it } from 'vitest';
import { dot, finiteDifferences, randomValues, relativeError } from '../../../testing/numbers.js';
import type { HeadShape } from '../shape.js';
import { denseBackward, denseForward } from './reference.js';

const SHAPE: HeadShape = { heads: 4, groups: 2, dk: 3, dv: 2 };

describe('dense attention reference', () => {
  it('averages the values a token may see when all scores are equal', () => {
    const shape = { heads: 1, groups: 1, dk: 1, dv: 1 };
    const zeros = new Float64Array(5);
    const { out, lse } = denseForward(zeros, zeros, Float64Array.of(1, 3, 5, 10, 20), [0, 3, 5], shape);
    expect([...out]).toEqual([1, 2, 3, 10, 15]);
    expect(relativeError(lse, [1, 2, 3, 1, 2].map(Math.log))).toBeLessThan(1e-15);
  });

  it('divides scores by the root of dk', () => {
    const shape = { heads: 1, groups: 1, dk: 4, dv: 1 };
    const k = Float64Array.of(0, 0, 0, 0, 1, 1, 1, 1); // the second key scores 4 / 2 = 2
    const { out } = denseForward(new Float64Array(8).fill(1), k, Float64Array.of(0, 1), [0, 2], shape);
    expect(out[1]).toBeCloseTo(Math.exp(2) / (1 + Math.exp(2)), 14);
  });

  it('gives each head the group it belongs to, group-major', () => {
    const shape = { heads: 4, groups: 2, dk: 1, dv: 1 };
    const { out } = denseForward(new Float64Array(4), new Float64Array(2), Float64Array.of(7, 9), [0, 1], shape);
    expect([...out]).toEqual([7, 7, 9, 9]);
  });

  it('stays finite for huge scores', () => {
    const shape = { heads: 1, groups: 1, dk: 1, dv: 1 };
    const big = Float64Array.of(1e4, -1e4, 1e4);
    const { out, lse } = denseForward(big, big, Float64Array.of(1, 2, 3), [0, 3], shape);
    expect([...out, ...lse].every(Number.isFinite)).toBe(true);
  });

  it('has gradients equal to finite differences', () => {
    const [q, k, v] = [randomValues(7 * 12, 1), randomValues(7 * 6, 2), randomValues(7 * 4, 3)];
    const dOut = randomValues(7 * 8, 4);
    const starts = [0, 5, 5, 7];
    const gradients = denseBackward(q, k, v, starts, SHAPE, dOut);
    const value = () => dot(denseForward(q, k, v, starts, SHAPE).out, dOut);
    expect(relativeError(gradients.dq, finiteDifferences(value, q))).toBeLessThan(1e-8);
    expect(relativeError(gradients.dk, finiteDifferences(value, k))).toBeLessThan(1e-8);
    expect(relativeError(gradients.dv, finiteDifferences(value, v))).toBeLessThan(1e-8);
  });
});
