/** Token ids of words that were seen before. Nearly all words of natural text are found here. */
import { hashOfUnits } from './word-hash.js';

/** Slots of the hash table; half of them are used. */
const SLOTS = 1 << 18;
const MAX_WORDS = SLOTS / 2;
/** A word of natural text takes 12 numbers on average: its ids, its units and two counts. */
const NUMBERS = 12 * MAX_WORDS;

/**
 * A hash table without deletion, in typed arrays: a Map takes a string as key, which has to be made and hashed for every
 * word of a text, and its values are objects that the garbage collector visits. The table is emptied when it is full, which
 * costs less than tracking use. Ids must be less than 2^16; words are shorter than 256 units and have fewer than 256 ids.
 */
export class WordCache {
  /** The ids of the words, with other numbers between them. */
  readonly ids = new Uint16Array(NUMBERS);
  /** Number of ids of the word that was found or added last. */
  count = 0;
  /** By slot: where its word begins in `ids`; 0: the slot is empty. */
  readonly #begins = new Int32Array(SLOTS);
  readonly #hashes = new Int32Array(SLOTS);
  #words = 0;
  #used = 1;
  /** Hash of the word that was looked for last, and the slot where the search ended. */
  #hash = 0;
  #slot = 0;

  /** Index of the first of the `count` ids of units [from, to); -1 if the word is not here. */
  find(units: Uint16Array, from: number, to: number): number {
    const { ids } = this;
    const begins = this.#begins;
    const hashes = this.#hashes;
    const length = to - from;
    const hash = hashOfUnits(units, from, to);
    let slot = hash & (SLOTS - 1);
    for (; begins[slot] !== 0; slot = (slot + 1) & (SLOTS - 1)) {
      if (hashes[slot] !== hash) continue;
      // A word: length << 8 | number of ids, the units, the ids.
      const begin = begins[slot];
      if (ids[begin] >>> 8 !== length) continue;
      let index = from;
      for (let at = begin + 1; index < to && ids[at] === units[index]; at++) index++;
      if (index < to) continue;
      this.count = ids[begin] & 0xff;
      return begin + 1 + length;
    }
    this.#hash = hash;
    this.#slot = slot;
    return -1;
  }

  /** Adds the word that `find` has just not found. Returns the index of the first of its `count` ids. */
  add(units: Uint16Array, from: number, to: number, word: readonly number[]): number {
    const size = 1 + to - from + word.length;
    if (this.#words === MAX_WORDS || this.#used + size > NUMBERS) {
      this.#begins.fill(0);
      this.#words = 0;
      this.#used = 1;
      this.#slot = this.#hash & (SLOTS - 1);
    }
    this.#begins[this.#slot] = this.#used;
    this.#hashes[this.#slot] = this.#hash;
    this.#words++;
    this.ids[this.#used++] = ((to - from) << 8) | word.length;
    for (let index = from; index < to; index++) this.ids[this.#used++] = units[index];
    for (const id of word) this.ids[this.#used++] = id;
    this.count = word.length;
    return this.#used - word.length;
  }
}
