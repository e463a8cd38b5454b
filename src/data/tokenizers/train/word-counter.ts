/** Counts the words of texts: a hash table in typed arrays, which counts a known word without making a string for it. */

import { hashOfUnits } from '../word-hash.js';
import { enlarged } from './enlarged.js';

/** Distinct words with their counts: word i has the UTF-16 units `begins[i]` to `begins[i + 1]` of `units`. */
export interface WordCounts {
  readonly units: Uint16Array;
  readonly begins: Int32Array;
  readonly counts: Float64Array;
}

const FIRST_SLOTS = 1 << 16;

export class WordCounter {
  #units = new Uint16Array(1 << 18);
  #begins = new Int32Array(FIRST_SLOTS / 2 + 1);
  #counts = new Float64Array(FIRST_SLOTS / 2);
  #hashes = new Int32Array(FIRST_SLOTS / 2);
  /** By slot: the number of its word plus 1; 0: empty. */
  #slots = new Int32Array(FIRST_SLOTS);
  #words = 0;

  /** Number of distinct words. */
  get words(): number {
    return this.#words;
  }

  /** Counts units [from, to) as a word that occurs `count` times more. */
  add(units: Uint16Array, from: number, to: number, count: number): void {
    const hash = hashOfUnits(units, from, to);
    const mask = this.#slots.length - 1;
    let slot = hash & mask;
    for (; this.#slots[slot] !== 0; slot = (slot + 1) & mask) {
      const word = this.#slots[slot] - 1;
      if (this.#hashes[word] !== hash || !this.#isSame(word, units, from, to)) continue;
      this.#counts[word] += count;
      return;
    }
    this.#slots[slot] = this.#append(units, from, to, hash, count) + 1;
    if (2 * this.#words >= this.#slots.length) this.#grow();
  }

  /** Adds the words of another counter. */
  merge({ units, begins, counts }: WordCounts): void {
    for (let word = 0; word < counts.length; word++) this.add(units, begins[word], begins[word + 1], counts[word]);
  }

  /** Copies that can be sent to another thread. */
  result(): WordCounts {
    const words = this.#words;
    return {
      units: this.#units.slice(0, this.#begins[words]),
      begins: this.#begins.slice(0, words + 1),
      counts: this.#counts.slice(0, words),
    };
  }

  #isSame(word: number, units: Uint16Array, from: number, to: number): boolean {
    const begin = this.#begins[word];
    if (this.#begins[word + 1] - begin !== to - from) return false;
    for (let index = from; index < to; index++) if (this.#units[begin + index - from] !== units[index]) return false;
    return true;
  }

  #append(units: Uint16Array, from: number, to: number, hash: number, count: number): number {
    const word = this.#words++;
    const begin = this.#begins[word];
    const end = begin + to - from;
    if (end > this.#units.length)
      this.#units = enlarged(new Uint16Array(Math.max(end, 2 * this.#units.length)), this.#units);
    this.#units.set(units.subarray(from, to), begin);
    this.#begins[word + 1] = end;
    this.#counts[word] = count;
    this.#hashes[word] = hash;
    return word;
  }

  /** Doubles the table. The words keep their numbers. */
  #grow(): void {
    const slots = new Int32Array(2 * this.#slots.length);
    const mask = slots.length - 1;
    this.#begins = enlarged(new Int32Array(slots.length / 2 + 1), this.#begins);
    this.#counts = enlarged(new Float64Array(slots.length / 2), this.#counts);
    this.#hashes = enlarged(new Int32Array(slots.length / 2), this.#hashes);
    for (let word = 0; word < this.#words; word++) {
      let slot = this.#hashes[word] & mask;
      while (slots[slot] !== 0) slot = (slot + 1) & mask;
      slots[slot] = word + 1;
    }
    this.#slots = slots;
  }
}
