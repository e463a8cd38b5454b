/**
 * The tokens of sample number i of a run: a function of i, the seed and the data alone.
 *
 * A sample is a window of S + 1 tokens: S inputs, and the same shifted by one as targets. Neighbouring windows share
 * one token, so within an epoch no token is a target twice.
 *
 * The stream of N tokens is a ring. An epoch is floor(N / S) windows, one after the other, and the next epoch begins
 * where the last one ended. The fewer than S tokens that do not fill a window at the end of an epoch are therefore the
 * first of the next one: nothing is padded or left out, and after any number of epochs the numbers of times that two
 * tokens were targets differ by at most one. Window borders move from epoch to epoch.
 *
 * The windows of an epoch are visited in the order of a seeded permutation, a different one for each epoch.
 */

import { IGNORED_TARGET } from '../batch.js';
import { createPermutation } from '../permutation.js';
import type { RangeStream } from './ranges.js';

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
