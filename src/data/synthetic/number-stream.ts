/** The random numbers behind generated samples. */
import { absorb } from '../hash.js';

/** Random numbers (sfc32, which is fast) that depend only on a seed and the number of a sequence. */
export class NumberStream {
  #a: number;
  #b: number;
  #c: number;
  #counter = 1;

  constructor(seedHash: number, id: number) {
    this.#a = absorb(seedHash, id);
    this.#b = absorb(this.#a, id);
    this.#c = absorb(this.#b, id);
    for (let round = 0; round < 4; round++) this.#next();
  }

  /** A whole number from 0 to limit - 1. */
  below(limit: number): number {
    return Math.floor(this.#next() * (limit / 2 ** 32));
  }

  #next(): number {
    const result = (this.#a + this.#b + this.#counter) | 0;
    this.#counter = (this.#counter + 1) | 0;
    this.#a = this.#b ^ (this.#b >>> 9);
    this.#b = (this.#c + (this.#c << 3)) | 0;
    this.#c = (((this.#c << 21) | (this.#c >>> 11)) + result) | 0;
    return result >>> 0;
  }
}
