import { describe, expect, it } from 'vitest';
import { cpuMs } from '../../testing/cpu-time.js';
import fc from '../../testing/properties.js';
import { createMerger, mergeBytePairs, type Ranks } from './merge.js';

/** The definition: merge the leftmost pair of the lowest rank until there is none. */
function obviousMerge(word: string, ranks: Ranks): number[] {
  const parts = [...word];
  for (;;) {
    let best = -1;
    let bestRank = Number.POSITIVE_INFINITY;
    for (let index = 0; index + 1 < parts.length; index++) {
      const rank = ranks.get(parts[index] + parts[index + 1]) ?? Number.POSITIVE_INFINITY;
      if (rank < bestRank) [best, bestRank] = [index, rank];
    }
    if (best < 0) return parts.map((part) => ranks.get(part)!);
    parts.splice(best, 2, parts[best] + parts[best + 1]);
  }
}

const letters = fc.constantFrom('a', 'b', 'c');
const vocabulary = fc
  .uniqueArray(
    fc.array(letters, { minLength: 2, maxLength: 5 }).map((parts) => parts.join('')),
    { maxLength: 30 },
  )
  .map((tokens) => new Map(['a', 'b', 'c', ...tokens].map((token, rank) => [token, rank])));

describe('mergeBytePairs', () => {
  it('does what the definition says, for any ranks', () => {
    fc.assert(
      fc.property(vocabulary, fc.array(letters, { maxLength: 40 }), (ranks, word) => {
        expect(mergeBytePairs(word.join(''), ranks)).toEqual(obviousMerge(word.join(''), ranks));
      }),
      { numRuns: 1000 },
    );
  });

  it('is what a merger does, for short and long words', () => {
    fc.assert(
      fc.property(vocabulary, fc.array(fc.array(letters, { maxLength: 100 }), { maxLength: 8 }), (ranks, words) => {
        const merge = createMerger(ranks);
        for (const word of words) expect(merge(word.join(''))).toEqual(obviousMerge(word.join(''), ranks));
      }),
      { numRuns: 300 },
    );
  });

  it('is what a merger does with more pairs than its cache has slots', () => {
    const letter = (index: number): string => String.fromCharCode(index);
    const pairs = Array.from({ length: 256 * 256 }, (_, index) => letter(index >> 8) + letter(index & 255));
    const tokens = [...Array.from({ length: 256 }, (_, byte) => letter(byte)), ...pairs.filter((_, n) => n % 3 === 0)];
    const ranks = new Map(tokens.map((token, rank) => [token, rank]));
    const merge = createMerger(ranks);
    const wrong = [...pairs, ...pairs].filter((pair) => merge(pair).length !== (ranks.has(pair) ? 1 : 2));
    expect(wrong).toEqual([]);
  });

  it('merges a million equal letters in a moment', () => {
    const ranks: Ranks = new Map([
      ['a', 0],
      ['aa', 1],
      ['aaaa', 2],
    ]);
    let ids: ReturnType<typeof mergeBytePairs> = [];
    const ms = cpuMs(() => {
      ids = mergeBytePairs('a'.repeat(1_000_003), ranks);
    });
    expect(ms).toBeLessThan(20_000);
    expect(ids.length).toBe(250_002);
    expect(ids.slice(-3)).toEqual([2, 1, 0]);
  });
});
