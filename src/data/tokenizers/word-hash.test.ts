import { expect, it } from 'vitest';
import { randomNumbers } from '../../testing/random.js';
import { WordCounter } from './train/word-counter.js';
import { hashOfUnits } from './word-hash.js';

const LEVELS = 12;
const KNOWN_SEED = 0;
const random = randomNumbers(1);
/** One of 20,000 letters, so that two make enough different hashes. */
const letter = () => 0x4e00 + Math.floor(20_000 * random());

/** Two stretches of two letters for each level that lead to the same hash: 2 ** LEVELS words of one hash. */
function collidingWords(): Uint16Array[] {
  const levels: [number[], number[]][] = [];
  const start: number[] = [];
  while (levels.length < LEVELS) {
    const seen = new Map<number, number[]>();
    for (;;) {
      const pair = [letter(), letter()];
      // The length is part of a hash, so the beginning is seen as one of the whole word.
      const units = Uint16Array.from([...start, ...pair]);
      const hash = hashOfUnits(units, 0, units.length, KNOWN_SEED ^ units.length ^ (2 * LEVELS));
      const other = seen.get(hash);
      if (other && other.join() !== pair.join()) {
        levels.push([other, pair]);
        start.push(...pair);
        break;
      }
      seen.set(hash, pair);
    }
  }
  return Array.from({ length: 2 ** LEVELS }, (_, i) =>
    Uint16Array.from(levels.flatMap((pairs, level) => pairs[(i >> level) & 1])),
  );
}

it('words that were made to have one hash have many, as a stranger does not know the seed', () => {
  const words = collidingWords();
  const hashes = (...seed: [] | [number]) =>
    new Set(words.map((word) => hashOfUnits(word, 0, word.length, ...seed))).size;
  expect(hashes(KNOWN_SEED)).toBe(1);
  expect(hashes()).toBeGreaterThan(0.9 * words.length);
  const counter = new WordCounter();
  for (const word of [...words, ...words]) counter.add(word, 0, word.length, 1);
  expect(counter.words).toBe(words.length);
  expect(new Set(counter.result().counts)).toEqual(new Set([2]));
});
