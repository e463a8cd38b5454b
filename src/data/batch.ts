/**
 * Samples, and the batches that a model takes, packed from them. The tokens of sample number i of a run are a function of
 * i, the seed and the data alone.
 *
 * A sample is a window of S + 1 tokens: S inputs, and the same shifted by one as targets. Neighbouring windows share
 * one token, so within an epoch no token is a target twice.
 *
 * The stream of N tokens is a ring. An epoch is floor(N / S) windows, one after the other, and the next epoch begins
 * where the last one ended. The fewer than S tokens that do not fill a window at the end of an epoch are therefore the
 * first of the next one: the stream is never padded or cut, and after any number of epochs the numbers of times that two
 * tokens were targets differ by at most one. Window borders move from epoch to epoch.
 *
 * The windows of an epoch are visited in the order of a seeded permutation, a different one for each epoch.
 */
import { createPermutation } from './hash.js';
import type { ShardReader } from './shards/reader.js';

/** A target that does not count for the loss. */
export const IGNORED_TARGET = -100;

/** Token ids, targets and sequence boundaries of one batch, on the host. */
export interface Batch {
  /** [batch * sequence], row after row. */
  readonly inputs: Int32Array;
  /** The token after each input, or IGNORED_TARGET. */
  readonly targets: Int32Array;
  /** Number of targets that count: the weight of this batch in a mean over several. */
  readonly targetCount: number;
  /** Starts of the sequences that attention treats separately: 0, S, 2S … and with document masks each document start. */
  readonly cuSeqlens: Int32Array;
  /** Identifies the data of each row, for diagnosis. */
  readonly sampleIds: number[];
  /** Epoch of the first row. */
  readonly epoch: number;
}

export interface Packing {
  readonly sequenceLength: number;
  /** Documents of a row are masked from each other, and the first token of a document is not a target. */
  readonly documentMask: boolean;
}

/**
 * One row per address. `targetCount` is what counts. Rows from `counted` on are padding: all their targets are ignored, so that every batch has the same
 * shape and no sample counts twice.
 */
export function packBatch(
  samples: Samples,
  addresses: readonly SampleAddress[],
  { sequenceLength, documentMask }: Packing,
  counted = addresses.length,
): Batch {
  const rows = addresses.length;
  const inputs = new Int32Array(rows * sequenceLength);
  const targets = new Int32Array(rows * sequenceLength);
  const window = new Int32Array(sequenceLength + 1);
  const boundaries: number[] = [];
  for (const [row, address] of addresses.entries()) {
    const start = row * sequenceLength;
    samples.read(address, window);
    inputs.set(window.subarray(0, sequenceLength), start);
    targets.set(window.subarray(1), start);
    samples.maskTargets?.(address, targets.subarray(start, start + sequenceLength));
    boundaries.push(start);
    if (!documentMask) continue;
    for (const offset of samples.documentStarts(address)) {
      if (offset === 0) continue;
      if (offset < sequenceLength) boundaries.push(start + offset);
      targets[start + offset - 1] = IGNORED_TARGET;
    }
  }
  targets.fill(IGNORED_TARGET, counted * sequenceLength);
  boundaries.push(rows * sequenceLength);
  let ignored = 0;
  for (const target of targets) if (target === IGNORED_TARGET) ignored++;
  return {
    inputs,
    targets,
    targetCount: rows * sequenceLength - ignored,
    cuSeqlens: Int32Array.from(boundaries),
    sampleIds: addresses.map((address) => address.id),
    epoch: addresses[0].epoch,
  };
}

export interface SampleAddress {
  /** Identifies the data: epoch * samples per epoch + index in the epoch before shuffling. */
  readonly id: number;
  readonly epoch: number;
  /** Start of the window in the stream. */
  readonly position: number;
}

/** Samples that are addressed by number: from a corpus, or generated. */
export interface Samples {
  readonly perEpoch: number;
  /** Sample number `index` in the order of the run. */
  locate(index: number): SampleAddress;
  /** Fills a window of S + 1 tokens. */
  read(address: SampleAddress, window: Int32Array): void;
  /** Starts of documents inside the window of S + 1 tokens. */
  documentStarts(address: SampleAddress): number[];
  /** Sets the targets that do not count to IGNORED_TARGET. */
  maskTargets?(address: SampleAddress, targets: Int32Array): void;
}

export class StreamSamples implements Samples {
  readonly perEpoch: number;
  readonly #stream: RangeStream;
  readonly #sequenceLength: number;
  readonly #seed: number;
  readonly #shuffle: boolean;
  /** The epoch of the cached permutation. */
  #epoch = -1;
  #permute: (index: number) => number = (index) => index;

  constructor(stream: RangeStream, sequenceLength: number, seed: number, shuffle: boolean) {
    this.perEpoch = Math.floor(stream.length / sequenceLength);
    this.#stream = stream;
    this.#sequenceLength = sequenceLength;
    this.#seed = seed;
    this.#shuffle = shuffle;
  }

  locate(index: number): SampleAddress {
    const epoch = Math.floor(index / this.perEpoch);
    if (this.#shuffle && epoch !== this.#epoch) {
      this.#permute = createPermutation(this.perEpoch, this.#seed, epoch);
      this.#epoch = epoch;
    }
    const id = epoch * this.perEpoch + this.#permute(index - epoch * this.perEpoch);
    // Exact up to 2^53 tokens.
    return { id, epoch, position: (id * this.#sequenceLength) % this.#stream.length };
  }

  read(address: SampleAddress, window: Int32Array): void {
    this.#stream.read(address.position, window);
  }

  documentStarts(address: SampleAddress): number[] {
    return this.#stream.documentStarts(address.position, this.#sequenceLength + 1);
  }
}

/** The stream from its beginning to its end: every token but the first is a target once. The last window may be short. */
export class WholeStream implements Samples {
  readonly perEpoch: number;
  readonly #stream: RangeStream;
  readonly #sequenceLength: number;

  constructor(stream: RangeStream, sequenceLength: number) {
    this.perEpoch = Math.ceil((stream.length - 1) / sequenceLength);
    this.#stream = stream;
    this.#sequenceLength = sequenceLength;
  }

  locate(index: number): SampleAddress {
    return { id: index, epoch: 0, position: index * this.#sequenceLength };
  }

  read({ position }: SampleAddress, window: Int32Array): void {
    const present = Math.min(window.length, this.#stream.length - position);
    this.#stream.read(position, window.subarray(0, present));
    window.fill(0, present);
  }

  documentStarts({ position }: SampleAddress): number[] {
    const count = Math.min(this.#sequenceLength + 1, this.#stream.length - position);
    return this.#stream.documentStarts(position, count);
  }

  maskTargets({ position }: SampleAddress, targets: Int32Array): void {
    targets.fill(IGNORED_TARGET, Math.min(targets.length, this.#stream.length - position - 1));
  }
}

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

/** Index of the first element of an ascending array that is at least `value`; the length of the array if all are smaller. */
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
