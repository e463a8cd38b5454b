import { describe, expect, it } from 'vitest';
import { UniformSamples } from './uniform.js';

function tokens(index: number, { vocabSize = 1000, seed = 1, part = 'train' as const, length = 500 } = {}): number[] {
  const samples = new UniformSamples(vocabSize, seed, part);
  const window = new Int32Array(length);
  samples.read(samples.locate(index), window);
  return [...window];
}

describe('UniformSamples', () => {
  it('depends on seed, sample, position and part, and on nothing else', () => {
    expect(tokens(7)).toEqual(tokens(7));
    expect(tokens(7, { length: 20 })).toEqual(tokens(7).slice(0, 20));
    const validation = new UniformSamples(1000, 1, 'validation');
    const window = new Int32Array(500);
    validation.read(validation.locate(7), window);
    for (const other of [tokens(8), tokens(7, { seed: 2 }), tokens(7 + 2 ** 32), [...window]]) {
      const equal = other.filter((token, index) => token === tokens(7)[index]).length;
      expect(equal).toBeLessThan(10); // 0.5 expected by chance
    }
  });

  it.each([1, 2, 17, 50257, 2 ** 31 - 1])('stays inside a vocabulary of %i', (vocabSize) => {
    const values = Array.from({ length: 20 }, (_, index) => tokens(index, { vocabSize })).flat();
    expect(values.every((token) => Number.isInteger(token) && token >= 0 && token < vocabSize)).toBe(true);
  });

  it('is uniform, and so are pairs of neighbours', () => {
    const vocabSize = 16;
    const single = new Float64Array(vocabSize);
    const pairs = new Float64Array(vocabSize * vocabSize);
    for (let sample = 0; sample < 200; sample++) {
      const row = tokens(sample, { vocabSize });
      for (let index = 0; index < row.length; index++) {
        single[row[index]]++;
        if (index > 0) pairs[row[index - 1] * vocabSize + row[index]]++;
      }
    }
    const chiSquared = (counts: Float64Array): number => {
      const expected = counts.reduce((sum, count) => sum + count, 0) / counts.length;
      return counts.reduce((sum, count) => sum + (count - expected) ** 2 / expected, 0);
    };
    // Mean k, standard deviation sqrt(2k) for k degrees of freedom; five deviations are allowed.
    expect(chiSquared(single)).toBeLessThan(15 + 5 * Math.sqrt(30));
    expect(chiSquared(pairs)).toBeLessThan(255 + 5 * Math.sqrt(510));
  });
});
