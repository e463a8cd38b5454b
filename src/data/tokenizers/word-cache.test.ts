import { describe, expect, it } from 'vitest';
import { WordCache } from './word-cache.js';

const units = (word: string): Uint16Array => Uint16Array.from(word, (letter) => letter.charCodeAt(0));

/** The ids of a word after adding it, if it was not there. */
function remembered(cache: WordCache, word: string, ids: readonly number[]): { isNew: boolean; ids: number[] } {
  // Inside a longer text.
  const text = units(`<${word}>`);
  const found = cache.find(text, 1, 1 + word.length);
  const at = found < 0 ? cache.add(text, 1, 1 + word.length, ids) : found;
  return { isNew: found < 0, ids: [...cache.ids.subarray(at, at + cache.count)] };
}

describe('the word cache', () => {
  it('has the ids of words that were added, and of no others', () => {
    const cache = new WordCache();
    const words = ['a', 'b', 'ab', 'ba', 'aa', ' a', '\uffff', '\ud83d\ude00', 'x'.repeat(40), `${'x'.repeat(39)}y`];
    for (const [index, word] of words.entries())
      expect(remembered(cache, word, [index, 65535])).toEqual({ isNew: true, ids: [index, 65535] });
    for (const [index, word] of words.entries())
      expect(remembered(cache, word, [])).toEqual({ isNew: false, ids: [index, 65535] });
    expect(cache.find(units('xyz'), 0, 3)).toBe(-1);
  });

  it('is right when it has been full of words, or of long words', () => {
    const cache = new WordCache();
    const wrong: string[] = [];
    const check = (word: string, ids: readonly number[]): boolean => {
      const { isNew, ids: found } = remembered(cache, word, ids);
      if (found.join() !== ids.join()) wrong.push(word);
      return isNew;
    };
    let added = 0;
    for (let round = 0; round < 2; round++) {
      for (let index = 0; index < 150_000; index++)
        if (check(`w${index.toString(36)}`, [index & 0xffff, index >>> 16])) added++;
      for (let index = 0; index < 40_000; index++)
        if (
          check(
            `${index}`.padStart(40, 'z'),
            Array.from({ length: 40 }, () => index),
          )
        )
          added++;
    }
    expect(wrong).toEqual([]);
    // The first words were forgotten before they came again.
    expect(added).toBeGreaterThan(190_000);
  });
});
