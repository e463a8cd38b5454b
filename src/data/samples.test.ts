import { describe, expect, it } from 'vitest';
import fc from '../testing/properties.js';
import { RangeStream, StreamSamples, singleRange } from './batch.js';

/** Samples over a stream whose token at position p is p. */
function samplesOf(length: number, sequenceLength: number, shuffle = true, seed = 3): StreamSamples {
  const corpus = {
    documentStarts: Float64Array.of(0, 2),
    readInto(from: number, count: number, target: Int32Array, at: number): void {
      for (let index = 0; index < count; index++) target[at + index] = from + index;
    },
  };
  return new StreamSamples(new RangeStream(corpus, singleRange(0, length)), sequenceLength, seed, shuffle);
}

function windowOf(samples: StreamSamples, index: number, sequenceLength: number): number[] {
  const window = new Int32Array(sequenceLength + 1);
  samples.read(samples.locate(index), window);
  return [...window];
}

describe('StreamSamples', () => {
  it('goes through the ring in order without shuffling, the rest of an epoch first in the next', () => {
    const samples = samplesOf(11, 4, false);
    expect(samples.perEpoch).toBe(2);
    expect([0, 1, 2, 3].map((index) => windowOf(samples, index, 4))).toEqual([
      [0, 1, 2, 3, 4],
      [4, 5, 6, 7, 8],
      [8, 9, 10, 0, 1],
      [1, 2, 3, 4, 5],
    ]);
    expect([0, 1, 2, 3].map((index) => samples.locate(index).epoch)).toEqual([0, 0, 1, 1]);
  });

  it('accounts for every token: a target at most once per epoch, and equally often over the epochs, but for one', () => {
    const shape = fc.integer({ min: 1, max: 12 }).chain((sequenceLength) =>
      fc.record({
        sequenceLength: fc.constant(sequenceLength),
        length: fc.integer({ min: sequenceLength + 1, max: 90 }),
        shuffle: fc.boolean(),
        seed: fc.maxSafeNat(),
      }),
    );
    fc.assert(
      fc.property(shape, ({ sequenceLength, length, shuffle, seed }) => {
        const samples = samplesOf(length, sequenceLength, shuffle, seed);
        const total = new Array<number>(length).fill(0);
        for (let epoch = 0; epoch < 7; epoch++) {
          const targets: number[] = [];
          for (let index = 0; index < samples.perEpoch; index++) {
            targets.push(...windowOf(samples, epoch * samples.perEpoch + index, sequenceLength).slice(1));
          }
          expect(new Set(targets).size).toBe(targets.length);
          expect(length - targets.length).toBeLessThan(sequenceLength);
          for (const target of targets) total[target]++;
          expect(Math.max(...total) - Math.min(...total)).toBeLessThanOrEqual(1);
        }
      }),
    );
  });

  it('makes every token a target exactly once per epoch where the length fits', () => {
    const samples = samplesOf(60, 5);
    const targets = Array.from({ length: 12 }, (_, index) => windowOf(samples, index, 5).slice(1)).flat();
    expect(targets.sort((first, second) => first - second)).toEqual(Array.from({ length: 60 }, (_, token) => token));
  });

  it('gives each sample of an epoch one place in the order, another in each epoch', () => {
    const samples = samplesOf(1000, 10);
    const epochs = [0, 1].map((epoch) =>
      Array.from({ length: 100 }, (_, index) => samples.locate(epoch * 100 + index).id - epoch * 100),
    );
    for (const ids of epochs)
      expect([...ids].sort((a, b) => a - b)).toEqual(Array.from({ length: 100 }, (_, id) => id));
    expect(epochs[0]).not.toEqual(epochs[1]);
  });

  it('locates any sample without those before it', () => {
    const far = 10 ** 12 + 17;
    const fresh = samplesOf(1000, 10).locate(far);
    const used = samplesOf(1000, 10);
    for (const index of [0, 5, 99, 100, 12_345]) used.locate(index);
    expect(used.locate(far)).toEqual(fresh);
    expect(fresh.epoch).toBe(10 ** 10);
  });

  it('says where documents begin in the window, its last target included', () => {
    const samples = samplesOf(6, 2, false);
    expect(samples.documentStarts(samples.locate(0))).toEqual([0, 2]);
    expect(samples.documentStarts(samples.locate(1))).toEqual([0]);
    expect(samples.documentStarts(samples.locate(2))).toEqual([2]);
  });
});
