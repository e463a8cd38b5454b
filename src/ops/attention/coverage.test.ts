import { describe, expect, it } from 'vitest';
import { Tensor } from '../../tensor/tensor.js';
import { cpu } from '../../testing/devices.js';
import { randomValues } from '../../testing/numbers.js';
import { coverageOf, coverageOfMass, meanCoverage, tokensToCover } from './coverage.js';

const SPARSE = { l: 4, d: 2, lSel: 4, nSel: 5, w: 4 };

describe('coverage', () => {
  // Blocks 0, 5 and 6 are forced; two of the four between them may be chosen.
  const mass = Float64Array.of(0.1, 0.05, 0.2, 0.15, 0.1, 0.1, 0.3);

  it('sums the attention in forced, chosen, best and random blocks', () => {
    const found = coverageOfMass(mass, [0, 1, 2, 5, 6], SPARSE);
    expect(found.forced).toBeCloseTo(0.5, 12);
    expect(found.chosen).toBeCloseTo(0.75, 12);
    expect(found.best).toBeCloseTo(0.85, 12);
    expect(found.random).toBeCloseTo(0.5 + 0.5 * 0.5, 12);
    expect(found.distance.map(({ all }) => Number(all.toFixed(6)))).toEqual([0.3, 0.1, 0.25, 0.35]);
    const sums = (name: 'all' | 'chosen' | 'best') => found.distance.reduce((sum, bin) => sum + bin[name], 0);
    expect(sums('all')).toBeCloseTo(1, 12);
    expect(sums('chosen')).toBeCloseTo(found.chosen, 12);
  });

  it('has the mean of all choices as that of a random one, and the largest as the best', () => {
    const between = [1, 2, 3, 4];
    const pairs = between.flatMap((a) => between.filter((b) => b > a).map((b) => [a, b]));
    const all = pairs.map((pair) => coverageOfMass(mass, [0, ...pair, 5, 6], SPARSE));
    expect(meanCoverage(all).chosen).toBeCloseTo(all[0].random, 12);
    expect(Math.max(...all.map(({ chosen }) => chosen))).toBeCloseTo(all[0].best, 12);
  });

  it('is the same for every choice when all keys are equal, and all of the attention when all blocks are chosen', () => {
    const even = new Float64Array(7).fill(1 / 7);
    const { chosen, best, random } = coverageOfMass(even, [0, 2, 4, 5, 6], SPARSE);
    for (const value of [chosen, best, random]) expect(value).toBeCloseTo(5 / 7, 12);
    const whole = coverageOfMass(mass, [0, 1, 2, 3, 4, 5, 6], { ...SPARSE, nSel: 7 });
    for (const value of [whole.chosen, whole.best, whole.random]) expect(value).toBeCloseTo(1, 12);
  });

  it('samples only tokens with something to choose, in every sequence', () => {
    expect(tokensToCover([0, 20, 50, 50, 73], SPARSE, 99)).toHaveLength(10 + 3);
    expect(tokensToCover([0, 20, 50, 50, 73], SPARSE, 2)).toEqual([
      { token: 43, start: 20 },
      { token: 49, start: 20 },
    ]);
    expect(tokensToCover([0, 20], SPARSE, 5)).toEqual([]);
  });

  it('computes the softmax of each head over its own sequence', () => {
    const [tokens, heads, groups, dk] = [60, 4, 2, 3];
    const device = cpu();
    const upload = (values: ArrayLike<number>, shape: number[]) => {
      const tensor = Tensor.empty(device, shape);
      tensor.write(Float32Array.from(values));
      return tensor;
    };
    const qs = Float32Array.from(randomValues(tokens * heads * dk, 1));
    const ks = Float32Array.from(randomValues(tokens * groups * dk, 2));
    const [q, k] = [upload(qs, [tokens, heads, dk]), upload(ks, [tokens, groups, dk])];
    try {
      const sample = { token: 57, start: 10 };
      const found = coverageOf({ q, k, selected: null }, [sample], SPARSE)[0];
      const wanted = Array.from({ length: groups }, (_, group) => {
        const mass = new Float64Array(12);
        for (const head of [2 * group, 2 * group + 1]) {
          const weights = Array.from({ length: 48 }, (_, i) => {
            const dot = [0, 1, 2].reduce(
              (sum, c) => sum + qs[(57 * heads + head) * dk + c] * ks[((10 + i) * groups + group) * dk + c],
              0,
            );
            return Math.exp(dot / Math.sqrt(dk));
          });
          const total = weights.reduce((a, b) => a + b);
          weights.forEach((weight, i) => {
            mass[Math.floor(i / 4)] += weight / total / 2;
          });
        }
        return coverageOfMass(mass, null, SPARSE);
      });
      found.forEach(({ best, random, chosen }, group) => {
        expect(best).toBeCloseTo(wanted[group].best, 6);
        expect(random).toBeCloseTo(wanted[group].random, 6);
        expect(chosen).toBeNaN();
      });
    } finally {
      q.free();
      k.free();
    }
  });
});
