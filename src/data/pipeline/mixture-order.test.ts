import { describe, expect, it } from 'vitest';
import fc from '../../testing/properties.js';
import { MixtureOrder } from './mixture-order.js';

const cases = fc.record({
  weights: fc.array(fc.integer({ min: 1, max: 50 }), { minLength: 1, maxLength: 4 }),
  seed: fc.integer({ min: 0, max: 1e6 }),
});

describe('the order of a mixture', () => {
  it('counts what it orders: the samples of each source before any number', () => {
    fc.assert(
      fc.property(cases, fc.integer({ min: 0, max: 3000 }), ({ weights, seed }, end) => {
        const order = new MixtureOrder(weights, seed);
        const counts = weights.map(() => 0);
        for (let k = 0; k < end; k++) counts[order.sourceAt(k)]++;
        expect(weights.map((_, source) => order.count(source, end))).toEqual(counts);
      }),
      { numRuns: 60 },
    );
  });

  it('keeps the counts beyond 2^32 samples', () => {
    const order = new MixtureOrder([3, 1], 5);
    const at = 2 ** 32 + 12_345;
    for (let k = at; k < at + 50; k++)
      expect(order.count(0, k + 1) - order.count(0, k)).toBe(Number(order.sourceAt(k) === 0));
    expect(order.count(0, 2 ** 32)).toBe(3 * 2 ** 30);
  });

  it('gives shares within 0.5 % of the weights over 10,000 samples, from any sample on', () => {
    fc.assert(
      fc.property(cases, fc.integer({ min: 0, max: 1e9 }), ({ weights, seed }, from) => {
        const order = new MixtureOrder(weights, seed);
        const total = weights.reduce((sum, weight) => sum + weight, 0);
        for (const [source, weight] of weights.entries()) {
          const share = (order.count(source, from + 10_000) - order.count(source, from)) / 10_000;
          expect(Math.abs(share - weight / total)).toBeLessThan(0.005);
        }
      }),
    );
  });

  it('is another one for another seed', () => {
    const first = (seed: number) => Array.from({ length: 64 }, (_, k) => new MixtureOrder([1, 1, 1], seed).sourceAt(k));
    expect(first(1)).not.toEqual(first(2));
  });
});
