/**
 * Learns the merges of a byte-pair encoding: again and again the most frequent pair of neighbouring symbols becomes a symbol.
 *
 * Counting all pairs anew for every merge (`reference.ts`) would take hours. Here all words lie in one array of symbols, every
 * place knows its neighbours, and the places of each pair form a list: a merge visits only the places of its pair and updates
 * the pairs around them. So the work is in proportion to the text of the distinct words, also where it is one long word.
 */

import { BYTE_CHARACTERS } from '../huggingface/pre-tokenizers.js';
import { PairHeap, PairTable } from './pairs.js';
import type { WordCounts } from './word-counter.js';

/** A pair that occurs only once is no pattern of the language. */
export const MIN_COUNT = 2;

/** Symbols of bytes: their ranks in the order of the characters that stand for them, as in vocabularies of Hugging Face. */
export const SYMBOL_OF_BYTE: Int32Array = (() => {
  const order = BYTE_CHARACTERS.map((character, byte) => ({ point: character.codePointAt(0)!, byte })).sort(
    (a, b) => a.point - b.point,
  );
  const symbols = new Int32Array(256);
  for (const [symbol, { byte }] of order.entries()) symbols[byte] = symbol;
  return symbols;
})();

/** The pairs that were merged, in order: merge i makes symbol 256 + i from `left[i]` and `right[i]`. */
export interface Merges {
  readonly left: Int32Array;
  readonly right: Int32Array;
}

const NONE = -1;
const PROGRESS_EVERY = 256;

/** At most `count` merges; fewer if no pair is left that occurs twice. Of equally frequent pairs the one of lower symbols comes first. */
export function learnMerges(words: WordCounts, count: number, onProgress: (merges: number) => void = () => {}): Merges {
  const places = new Places(words);
  const { table } = places;
  const heap = new PairHeap(table);
  for (let pair = 0; pair < table.size; pair++) if (table.counts[pair] >= MIN_COUNT) heap.push(pair);
  const left: number[] = [];
  const right: number[] = [];
  while (left.length < count) {
    const pair = heap.pop();
    if (pair === NONE) break;
    left.push(table.left[pair]);
    right.push(table.right[pair]);
    for (const changed of places.merge(pair, 255 + left.length))
      if (table.counts[changed] >= MIN_COUNT) heap.push(changed);
    if (left.length % PROGRESS_EVERY === 0) onProgress(left.length);
  }
  onProgress(left.length);
  return { left: Int32Array.from(left), right: Int32Array.from(right) };
}

/** The symbols of all words, and for each pair where it is. A place belongs to the pair of its symbol and the next one. */
class Places {
  readonly table = new PairTable();
  readonly #symbols: Int32Array;
  /** The places of the neighbouring symbols of the word. */
  readonly #next: Int32Array;
  readonly #previous: Int32Array;
  /** Occurrences of the word of a place. */
  readonly #weights: Float64Array;
  /** The pair of a place, and the places before and after it in the list of that pair. */
  readonly #pairs: Int32Array;
  readonly #nextOfPair: Int32Array;
  readonly #previousOfPair: Int32Array;

  constructor({ units, begins, counts }: WordCounts) {
    const { bytes, ends } = encodeWords(units, begins);
    const { length } = bytes;
    this.#symbols = Int32Array.from(bytes, (byte) => SYMBOL_OF_BYTE[byte]);
    this.#next = new Int32Array(length);
    this.#previous = new Int32Array(length);
    this.#weights = new Float64Array(length);
    this.#pairs = new Int32Array(length).fill(NONE);
    this.#nextOfPair = new Int32Array(length);
    this.#previousOfPair = new Int32Array(length);
    for (let word = 0, place = 0; word < counts.length; word++) {
      const begin = place;
      for (; place < ends[word]; place++) {
        this.#next[place] = place + 1 < ends[word] ? place + 1 : NONE;
        this.#previous[place] = place > begin ? place - 1 : NONE;
        this.#weights[place] = counts[word];
      }
    }
    for (let place = 0; place < length; place++) if (this.#next[place] !== NONE) this.#enter(place);
  }

  /** Replaces every occurrence of a pair, in a run of equal symbols the first ones. Returns the pairs that this has made. */
  merge(pair: number, symbol: number): Iterable<number> {
    const made = new Set<number>();
    const [next, previous] = [this.#next, this.#previous];
    for (const place of this.#placesOf(pair)) {
      // In a run of equal symbols the place before has taken this one's.
      if (this.#pairs[place] !== pair) continue;
      const absorbed = next[place];
      const before = previous[place];
      const after = next[absorbed];
      if (before !== NONE) this.#leave(before);
      this.#leave(place);
      if (after !== NONE) this.#leave(absorbed);
      this.#symbols[place] = symbol;
      next[place] = after;
      if (after !== NONE) previous[after] = place;
      if (before !== NONE) made.add(this.#enter(before));
      if (after !== NONE) made.add(this.#enter(place));
    }
    return made;
  }

  /** Ascending, as a pair of equal symbols may overlap itself. */
  #placesOf(pair: number): Int32Array {
    const places: number[] = [];
    for (let place = this.table.heads[pair]; place !== NONE; place = this.#nextOfPair[place]) places.push(place);
    const found = Int32Array.from(places);
    return this.table.left[pair] === this.table.right[pair] ? found.sort() : found;
  }

  /** Puts a place into the list of its pair. */
  #enter(place: number): number {
    const { table } = this;
    const pair = table.find(this.#symbols[place], this.#symbols[this.#next[place]]);
    const head = table.heads[pair];
    this.#pairs[place] = pair;
    this.#nextOfPair[place] = head;
    this.#previousOfPair[place] = NONE;
    if (head !== NONE) this.#previousOfPair[head] = place;
    table.heads[pair] = place;
    table.counts[pair] += this.#weights[place];
    return pair;
  }

  #leave(place: number): void {
    const { table } = this;
    const pair = this.#pairs[place];
    const [before, after] = [this.#previousOfPair[place], this.#nextOfPair[place]];
    if (before === NONE) table.heads[pair] = after;
    else this.#nextOfPair[before] = after;
    if (after !== NONE) this.#previousOfPair[after] = before;
    table.counts[pair] -= this.#weights[place];
    this.#pairs[place] = NONE;
  }
}

/** The UTF-8 bytes of all words, and where each ends. A lone surrogate becomes U+FFFD. */
function encodeWords(units: Uint16Array, begins: Int32Array): { bytes: Uint8Array; ends: Int32Array } {
  const encoder = new TextEncoder();
  const source = Buffer.from(units.buffer, units.byteOffset, units.byteLength);
  const words = begins.length - 1;
  const ends = new Int32Array(words);
  // A UTF-16 unit takes at most 3 bytes.
  const bytes = new Uint8Array(3 * units.length);
  let length = 0;
  for (let word = 0; word < words; word++) {
    const text = source.toString('utf16le', 2 * begins[word], 2 * begins[word + 1]);
    length += encoder.encodeInto(text, bytes.subarray(length)).written;
    ends[word] = length;
  }
  return { bytes: bytes.subarray(0, length), ends };
}
