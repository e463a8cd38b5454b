import { describe, expect, it } from 'vitest';
import fc from '../../testing/properties.js';
import { type Corpus, firstAtLeast, RangeStream, singleRange, type TokenRanges } from '../batch.js';

/** A corpus whose token at position p is p. */
function countingCorpus(documentStarts: number[]): Corpus {
  return {
    documentStarts: Float64Array.from(documentStarts),
    readInto(from, count, target, at) {
      for (let index = 0; index < count; index++) target[at + index] = from + index;
    },
  };
}

function toRanges(pairs: [number, number][]): TokenRanges {
  const offsets = [0];
  for (const [start, end] of pairs) offsets.push(offsets.at(-1)! + end - start);
  return { starts: Float64Array.from(pairs, ([start]) => start), offsets: Float64Array.from(offsets) };
}

const pairs = fc
  .uniqueArray(fc.nat(200), { minLength: 2, maxLength: 20 })
  .map((points) => points.sort((first, second) => first - second))
  .map((points) =>
    Array.from({ length: points.length >> 1 }, (_, i): [number, number] => [points[2 * i], points[2 * i + 1]]),
  );

describe('RangeStream', () => {
  it('reads and finds documents as a plain list would, around the ring', () => {
    const starts = [0, 5, 6, 50, 51, 120, 199];
    fc.assert(
      fc.property(pairs, fc.nat(), fc.nat(40), (ranges, at, count) => {
        const list = ranges.flatMap(([start, end]) => Array.from({ length: end - start }, (_, i) => start + i));
        const stream = new RangeStream(countingCorpus(starts), toRanges(ranges));
        expect(stream.length).toBe(list.length);
        const position = at % list.length;
        const expected = Array.from({ length: count }, (_, index) => list[(position + index) % list.length]);
        const window = new Int32Array(count);
        stream.read(position, window);
        expect([...window]).toEqual(expected);
        const documents = expected.flatMap((token, index) => (starts.includes(token) ? [index] : []));
        expect(stream.documentStarts(position, count)).toEqual(documents);
      }),
      { numRuns: 500 },
    );
  });

  it('takes one range', () => {
    const stream = new RangeStream(countingCorpus([]), singleRange(10, 14));
    const window = new Int32Array(6);
    stream.read(3, window);
    expect([...window]).toEqual([13, 10, 11, 12, 13, 10]);
  });
});

describe('firstAtLeast', () => {
  it('finds the place by halving', () => {
    const values = Float64Array.of(1, 3, 3, 9);
    expect([0, 1, 2, 3, 4, 9, 10].map((value) => firstAtLeast(values, value))).toEqual([0, 0, 1, 1, 3, 3, 4]);
  });
});
