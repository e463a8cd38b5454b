/** Pairs of symbols with their counts, in typed arrays: a Map of objects would take some hundred bytes for each. */

import { enlarged } from './enlarged.js';

const FIRST_PAIRS = 1 << 15;
const NONE = -1;

export class PairTable {
  size = 0;
  left = new Int32Array(FIRST_PAIRS);
  right = new Int32Array(FIRST_PAIRS);
  counts = new Float64Array(FIRST_PAIRS);
  /** The first place of each pair (merges.ts); -1: none. */
  heads = new Int32Array(FIRST_PAIRS).fill(NONE);
  /** By slot: the number of its pair plus 1; 0: empty. */
  #slots = new Int32Array(2 * FIRST_PAIRS);

  /** The number of a pair; a new one has no places. */
  find(left: number, right: number): number {
    const mask = this.#slots.length - 1;
    let slot = hashOf(left, right) & mask;
    for (; this.#slots[slot] !== 0; slot = (slot + 1) & mask) {
      const pair = this.#slots[slot] - 1;
      if (this.left[pair] === left && this.right[pair] === right) return pair;
    }
    if (this.size === this.left.length) {
      this.#grow();
      return this.find(left, right);
    }
    const pair = this.size++;
    this.left[pair] = left;
    this.right[pair] = right;
    this.#slots[slot] = pair + 1;
    return pair;
  }

  #grow(): void {
    const pairs = 2 * this.left.length;
    this.left = enlarged(new Int32Array(pairs), this.left);
    this.right = enlarged(new Int32Array(pairs), this.right);
    this.counts = enlarged(new Float64Array(pairs), this.counts);
    this.heads = enlarged(new Int32Array(pairs).fill(NONE), this.heads);
    this.#slots = new Int32Array(2 * pairs);
    const mask = this.#slots.length - 1;
    for (let pair = 0; pair < this.size; pair++) {
      let slot = hashOf(this.left[pair], this.right[pair]) & mask;
      while (this.#slots[slot] !== 0) slot = (slot + 1) & mask;
      this.#slots[slot] = pair + 1;
    }
  }
}

function hashOf(left: number, right: number): number {
  const bits = Math.imul(left, 0x9e3779b1) ^ Math.imul(right, 0x85ebca6b);
  return bits ^ (bits >>> 15);
}

/**
 * The pairs by their counts, the most frequent first; of equal ones that of lower symbols. Counts only fall while a pair is in
 * the heap: an entry that is too high is put back with its present count when it comes out.
 */
export class PairHeap {
  readonly #table: PairTable;
  readonly #pairs: number[] = [];
  readonly #counts: number[] = [];

  constructor(table: PairTable) {
    this.#table = table;
  }

  push(pair: number): void {
    const [pairs, counts] = [this.#pairs, this.#counts];
    const count = this.#table.counts[pair];
    let child = pairs.length;
    pairs.push(pair);
    counts.push(count);
    while (child > 0) {
      const parent = (child - 1) >> 1;
      if (!this.#isBefore(count, pair, counts[parent], pairs[parent])) break;
      pairs[child] = pairs[parent];
      counts[child] = counts[parent];
      child = parent;
    }
    pairs[child] = pair;
    counts[child] = count;
  }

  /** The most frequent pair that occurs at least twice; -1 if none does. */
  pop(): number {
    while (this.#pairs.length > 0) {
      const [pair, count] = [this.#pairs[0], this.#counts[0]];
      this.#removeFirst();
      const present = this.#table.counts[pair];
      if (present === count) return pair;
      if (present >= 2) this.push(pair);
    }
    return NONE;
  }

  #isBefore(count: number, pair: number, otherCount: number, other: number): boolean {
    if (count !== otherCount) return count > otherCount;
    const { left, right } = this.#table;
    return left[pair] !== left[other] ? left[pair] < left[other] : right[pair] < right[other];
  }

  #removeFirst(): void {
    const [pairs, counts] = [this.#pairs, this.#counts];
    const [pair, count] = [pairs.pop()!, counts.pop()!];
    const size = pairs.length;
    if (size === 0) return;
    let parent = 0;
    for (;;) {
      let child = 2 * parent + 1;
      if (child >= size) break;
      if (child + 1 < size && this.#isBefore(counts[child + 1], pairs[child + 1], counts[child], pairs[child])) child++;
      if (!this.#isBefore(counts[child], pairs[child], count, pair)) break;
      pairs[parent] = pairs[child];
      counts[parent] = counts[child];
      parent = child;
    }
    pairs[parent] = pair;
    counts[parent] = count;
  }
}
