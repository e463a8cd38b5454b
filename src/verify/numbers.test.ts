import { describe, expect, it } from 'vitest';
import { addTo, differentBits, dot, randomValues, relativeError, startsOf } from './numbers.js';

describe('numbers', () => {
  it('are random, spread, exact in float32 and the same for a seed', () => {
    const values = randomValues(10_000, 7, 2);
    expect(values).toEqual(randomValues(10_000, 7, 2));
    expect(values).not.toEqual(randomValues(10_000, 8, 2));
    expect(Float64Array.from(Float32Array.from(values))).toEqual(values);
    expect(Math.abs(dot(values, values) / 10_000 - 4 / 3)).toBeLessThan(0.05);
    expect(Math.max(...values)).toBeLessThanOrEqual(2);
    expect(randomValues(100, 0).some((value) => value !== randomValues(1, 0)[0])).toBe(true);
  });

  it('have a relative distance, absolute from zero, and NaN if one is', () => {
    expect(relativeError([1, 2], [1, 2])).toBe(0);
    expect(relativeError([3, 0], [0, 4])).toBe(1.25);
    expect(relativeError([3, 4], [0, 0])).toBe(5);
    expect(relativeError([], [])).toBe(0);
    expect(relativeError([Number.NaN], [1])).toBeNaN();
    expect(() => relativeError([1], [])).toThrow('1 values cannot be compared with 0');
  });

  it('differ in bits where they do', () => {
    expect(differentBits(Float32Array.of(1, Number.NaN, 0), Float32Array.of(1, Number.NaN, -0))).toBe(1);
    expect(differentBits(Float32Array.of(9, 1, 2).subarray(1), Float32Array.of(1, 3))).toBe(1);
    expect(() => differentBits(new Int32Array(1), new Int32Array(2))).toThrow('cannot be compared');
  });

  it('add up', () => {
    const into = Float64Array.of(1, 2, 3);
    addTo(into, [10, 20]);
    expect([...into]).toEqual([11, 22, 3]);
    expect(startsOf([3, 0, 2])).toEqual([0, 3, 3, 5]);
  });
});
