/** A token stream that is composed of ranges of the corpus: the training part, or the validation part. */

import type { ShardReader } from './reader.js';

/** Ranges in ascending order. Two numbers per range, so a split of millions of documents stays small. */
export interface TokenRanges {
  /** Start of each range in the corpus. */
  readonly starts: Float64Array;
  /** Start of each range in the stream, and as a last entry the length of the stream. */
  readonly offsets: Float64Array;
}

/** The part of a shard reader that a stream uses. */
export type Corpus = Pick<ShardReader, 'readInto' | 'documentStarts'>;

export function rangesLength(ranges: TokenRanges): number {
  return ranges.offsets[ranges.offsets.length - 1];
}

/** One range of the corpus. */
export function singleRange(start: number, end: number): TokenRanges {
  return { starts: Float64Array.of(start), offsets: Float64Array.of(0, end - start) };
}

export class RangeStream {
  readonly length: number;
  readonly #corpus: Corpus;
  readonly #ranges: TokenRanges;

  constructor(corpus: Corpus, ranges: TokenRanges) {
    this.#corpus = corpus;
    this.#ranges = ranges;
    this.length = rangesLength(ranges);
  }

  /** Copies tokens from `position` on, wrapping around at the end. */
  read(position: number, target: Int32Array): void {
    this.#forEachPart(position, target.length, (start, count, done) => {
      this.#corpus.readInto(start, count, target, done);
    });
  }

  /** Starts of documents among the `count` tokens from `position` on, as offsets from there. */
  documentStarts(position: number, count: number): number[] {
    const found: number[] = [];
    const all = this.#corpus.documentStarts;
    this.#forEachPart(position, count, (start, length, done) => {
      for (let index = firstAtLeast(all, start); index < all.length && all[index] < start + length; index++) {
        found.push(all[index] - start + done);
      }
    });
    return found;
  }

  /** Calls `visit` for each piece inside one range: its start in the corpus, its length, and the tokens before it. */
  #forEachPart(position: number, count: number, visit: (start: number, length: number, done: number) => void): void {
    const { starts, offsets } = this.#ranges;
    let range = firstAtLeast(offsets, position + 1) - 1;
    let inside = position - offsets[range];
    for (let done = 0; done < count; ) {
      const length = Math.min(count - done, offsets[range + 1] - offsets[range] - inside);
      visit(starts[range] + inside, length, done);
      done += length;
      inside = 0;
      range = (range + 1) % starts.length;
    }
  }
}

/** Index of the first element of an ascending array that is not below `value`; its length if there is none. */
export function firstAtLeast(ascending: Float64Array, value: number): number {
  let low = 0;
  let high = ascending.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (ascending[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
