import { describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { cpuMs } from '../../testing/cpu-time.js';
import fc from '../../testing/properties.js';
import { rangesLength, type TokenRanges } from '../batch.js';
import { type Split, type SplitRequest, splitCorpus } from './split.js';

function request(lengths: number[], valFraction: number, sequenceLength = 8, seed = 1): SplitRequest {
  const starts: number[] = [];
  let tokens = 0;
  for (const length of lengths) {
    starts.push(tokens);
    tokens += length;
  }
  return { name: 'corpus', tokens, documentStarts: Float64Array.from(starts), valFraction, seed, sequenceLength };
}

function positions(ranges: TokenRanges): number[] {
  return Array.from(ranges.starts).flatMap((start, range) =>
    Array.from({ length: ranges.offsets[range + 1] - ranges.offsets[range] }, (_, index) => start + index),
  );
}

function expectPartition({ train, validation }: Split, tokens: number): void {
  const all = [...positions(train), ...(validation === undefined ? [] : positions(validation))];
  expect(all.length).toBe(tokens);
  expect(new Set(all).size).toBe(tokens);
}

describe('splitCorpus', () => {
  it('puts every token on exactly one side, each with a sample, for any documents', () => {
    const lengths = fc.array(fc.integer({ min: 2, max: 30 }), { minLength: 20, maxLength: 200 });
    const fraction = fc.double({ min: 0.001, max: 0.5, noNaN: true });
    fc.assert(
      fc.property(lengths, fraction, fc.maxSafeNat(), (documents, valFraction, seed) => {
        const asked = request(documents, valFraction, 8, seed);
        const split = splitCorpus(asked);
        expectPartition(split, asked.tokens);
        expect(rangesLength(split.train)).toBeGreaterThan(8);
        expect(rangesLength(split.validation!)).toBeGreaterThan(8);
      }),
    );
  });

  it('sets whole documents aside, near the fraction, spread over the corpus', () => {
    const asked = request(new Array(5000).fill(100), 0.1);
    const split = splitCorpus(asked);
    expect(split.method).toBe('documents');
    const chosen = Array.from(split.validation!.starts);
    expect(chosen.every((start) => start % 100 === 0)).toBe(true);
    expect(Math.abs(rangesLength(split.validation!) / asked.tokens - 0.1)).toBeLessThan(0.02);
    expect(chosen.filter((start) => start < asked.tokens / 2).length / chosen.length).toBeGreaterThan(0.4);
    expectPartition(split, asked.tokens);
  });

  it('joins neighbours: the ranges are as few as the changes of side', () => {
    const split = splitCorpus(request(new Array(5000).fill(100), 0.01));
    expect(split.train.starts.length).toBeLessThan(120);
  });

  it('depends on the seed, and on nothing that changes between runs', () => {
    const of = (seed: number): number[] => [
      ...splitCorpus(request(new Array(500).fill(50), 0.1, 8, seed)).validation!.starts,
    ];
    expect(of(1)).toEqual(of(1));
    expect(of(1)).not.toEqual(of(2));
  });

  it('takes the end of the stream when documents are few', () => {
    const split = splitCorpus(request([500, 500], 0.1));
    expect(split.method).toBe('tail');
    // 1000 - 100 = 900: the last sample of training that fits ends with token 896 (112 * 8), so the cut is at 897.
    expect([rangesLength(split.train), split.validation!.starts[0], rangesLength(split.validation!)]).toEqual([
      897, 897, 103,
    ]);
  });

  it('takes the end when one chosen document would hold most of the corpus', () => {
    const base = new Array(100).fill(20);
    const first = [...splitCorpus(request(base, 0.1)).validation!.starts][0] / 20;
    const uneven = base.map((length, document) => (document === first ? 5000 : length));
    expect(splitCorpus(request(base, 0.1)).method).toBe('documents');
    expect(splitCorpus(request(uneven, 0.1)).method).toBe('tail');
  });

  it('raises a tiny fraction to one sample, and keeps none for 0', () => {
    expect(rangesLength(splitCorpus(request([1000], 0.0001)).validation!)).toBeGreaterThanOrEqual(9);
    expect(splitCorpus(request([1000], 0))).toMatchObject({ method: 'none', validation: undefined });
  });

  it('refuses a corpus that is too short, with the remedy', () => {
    expect(() => splitCorpus(request([8], 0))).toThrow(UsageError);
    expect(() => splitCorpus(request([8], 0))).toThrow(
      'corpus has 8 tokens, fewer than one sample of 9; add text or lower train.seq_len (--seq-len)',
    );
    expect(() => splitCorpus(request([17], 0.1))).toThrow('or set data.val_fraction to 0');
    expect(splitCorpus(request([18], 0.1)).method).toBe('tail');
    expect(splitCorpus(request([9], 0)).method).toBe('none');
  });

  it('is quick and small for a million documents', () => {
    const starts = Float64Array.from({ length: 1_000_000 }, (_, document) => document * 1000);
    const asked = { ...request([], 0.01), tokens: 1e9, documentStarts: starts };
    expect(cpuMs(() => splitCorpus(asked))).toBeLessThan(10_000);
    const split = splitCorpus(asked);
    expect(split.train.starts.length).toBeLessThan(12_000);
    expect(rangesLength(split.train) + rangesLength(split.validation!)).toBe(1e9);
  });
});
