import { describe, expect, it } from 'vitest';
import fc from '../testing/properties.js';
import { Buckets } from './buckets.js';
import { decodeChartData, encodeChartData } from './chart-data.js';

function filled(values: readonly number[], capacity: number): Buckets {
  const buckets = new Buckets(['y'], capacity);
  values.forEach((value, i) => {
    buckets.add(i + 1, i, [value], 10 * i);
  });
  return buckets;
}

const all = (buckets: Buckets) => buckets.chartData(Number.NEGATIVE_INFINITY, Number.POSITIVE_INFINITY, 0, 0);

describe('buckets', () => {
  it('keep the extremes, their order and the last value of every stretch of rows', () => {
    const numbers = fc.array(fc.double({ noNaN: true, min: -1e6, max: 1e6 }), { minLength: 1, maxLength: 400 });
    fc.assert(
      fc.property(numbers, fc.integer({ min: 2, max: 33 }), (values, capacity) => {
        const { steps, values: columns, buckets } = all(filled(values, capacity));
        const { first, second, last } = columns.get('y')!;
        expect(buckets).toBeLessThanOrEqual(capacity);
        let covered = 0;
        for (let i = 0; i < buckets; i++) {
          expect(steps[0][i]).toBe(covered + 1);
          const rows = values.slice(covered, steps[1][i]);
          const [min, max] = [Math.min(...rows), Math.max(...rows)];
          expect([first[i], second[i]].sort((a, b) => a - b)).toEqual([min, max].sort((a, b) => a - b));
          if (min !== max) expect(first[i] === min).toBe(rows.indexOf(min) < rows.indexOf(max));
          expect(last[i]).toBe(rows.at(-1));
          covered = steps[1][i];
        }
        expect(covered).toBe(values.length);
      }),
    );
  });

  it('draw a single spike in a million steps, wherever it is', () => {
    fc.assert(
      fc.property(fc.integer({ min: 1, max: 1_000_000 }), fc.constantFrom(1e3, -1e3), (at, spike) => {
        const buckets = new Buckets(['y'], 512);
        for (let step = 1; step <= 1_000_000; step++) buckets.add(step, step, [step === at ? spike : step % 7]);
        const { steps, values } = all(buckets);
        const { first, second } = values.get('y')!;
        const found = steps[0].findIndex((begin, i) => begin <= at && steps[1][i] >= at);
        expect([first[found], second[found]]).toContain(spike);
      }),
      { numRuns: 4 },
    );
  });

  it('replace repeated steps of a resumed run', () => {
    const buckets = filled([1, 2, 3, 4, 5, 6], 64);
    for (let step = 4; step <= 5; step++) buckets.add(step, 100 + step, [10 * step]);
    const { steps, values } = all(buckets);
    expect([...steps[1]]).toEqual([1, 2, 3, 4, 5]);
    expect([...values.get('y')!.last]).toEqual([1, 2, 3, 40, 50]);
  });

  it('leave NaN out and keep a bucket of nothing else empty', () => {
    const { values } = all(filled([Number.NaN, 1, Number.NaN, 3, 5, Number.POSITIVE_INFINITY], 3));
    const { first, last } = values.get('y')!;
    expect([...first]).toEqual([1, 3, 5]);
    expect([...last]).toEqual([1, 3, 5]);
    expect(all(filled([Number.NaN], 2)).values.get('y')!.last[0]).toBeNaN();
  });

  it('survive the way to the page', () => {
    const data = all(filled([3, 1, 2, 9, 4], 3));
    const bytes = encodeChartData(data);
    const decoded = decodeChartData(bytes.buffer as ArrayBuffer);
    expect(decoded).toEqual(data);
  });
});
