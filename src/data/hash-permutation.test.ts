import { describe, expect, it } from 'vitest';
import fc from '../testing/properties.js';
import { createPermutation } from './hash.js';

const all = (size: number, seed: number, epoch: number): number[] =>
  Array.from({ length: size }, (_, index) => createPermutation(size, seed, epoch)(index));

describe('createPermutation', () => {
  it('is a bijection for every size', () => {
    const sizes = fc.integer({ min: 1, max: 700 });
    fc.assert(
      fc.property(sizes, fc.maxSafeNat(), fc.nat(), (size, seed, epoch) => {
        const values = all(size, seed, epoch);
        expect(new Set(values).size).toBe(size);
        expect(values.every((value) => Number.isInteger(value) && value >= 0 && value < size)).toBe(true);
      }),
      { numRuns: 300 },
    );
  });

  it('stays in range and keeps values apart for sizes beyond 32 bits', () => {
    const size = 2 ** 45 + 12_345;
    const permute = createPermutation(size, 7, 0);
    const values = Array.from({ length: 20_000 }, (_, index) => permute(index));
    expect(new Set(values).size).toBe(values.length);
    expect(values.every((value) => Number.isInteger(value) && value >= 0 && value < size)).toBe(true);
    const mean = values.reduce((sum, value) => sum + value / size, 0) / values.length;
    expect(Math.abs(mean - 0.5)).toBeLessThan(0.02);
  });

  it('differs by seed and by epoch, and is the same for the same', () => {
    expect(all(100, 1, 0)).toEqual(all(100, 1, 0));
    expect(all(100, 1, 0)).not.toEqual(all(100, 2, 0));
    expect(all(100, 1, 0)).not.toEqual(all(100, 1, 1));
  });

  it('puts every value at every place about equally often', () => {
    const size = 10;
    const trials = 20_000;
    const counts = new Float64Array(size * size);
    for (let epoch = 0; epoch < trials; epoch++) {
      for (const [index, value] of all(size, 3, epoch).entries()) counts[index * size + value]++;
    }
    const expected = trials / size;
    const chiSquared = counts.reduce((sum, count) => sum + (count - expected) ** 2 / expected, 0);
    // 81 degrees of freedom: mean 81, standard deviation 12.7.
    expect(chiSquared).toBeLessThan(81 + 6 * 12.7);
  });

  it('leaves no trace of the order: neighbours do not stay neighbours', () => {
    const values = all(10_000, 5, 0);
    const near = values.filter((value, index) => index > 0 && Math.abs(value - values[index - 1]) <= 5).length;
    expect(near).toBeLessThan(40); // about 10 are expected by chance
  });
});
