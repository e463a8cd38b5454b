/**
 * Which tokens make up sample number i of a run: a function of i, the seed and the data, and of nothing else.
 *
 * A sample is a window of S + 1 tokens: S inputs, and the same shifted by one as targets. Neighbouring windows share
 * one token, so within an epoch no token is a target twice.
 *
 * The stream of N tokens is a ring. An epoch is floor(N / S) windows, one after the other, and the next epoch begins
 * where the last one ended. The fewer than S tokens that do not fill a window at the end of an epoch are therefore the
 * first of the next one: nothing is padded, nothing is ever left out, and after any number of epochs two tokens differ
 * by at most one in how often they were targets. (It also moves the window borders from epoch to epoch.)
 *
 * Inside an epoch the windows come in the order of a seeded permutation, another one for each epoch.
 */

import { IGNORED_TARGET } from './batch.js';
import { createPermutation } from './permutation.js';
import type { RangeStream } from './ranges.js';

export interface SampleAddress {
  /** Names the data: epoch * samples per epoch + place in the epoch before shuffling. */
  readonly id: number;
  readonly epoch: number;
  /** Where the window begins in the stream. */
  readonly position: number;
}

/** Numbered samples: from a corpus, or made up. */
export interface Samples {
  readonly perEpoch: number;
  /** Sample number `index` in the order of the run. */
  locate(index: number): SampleAddress;
  /** Fills a window of S + 1 tokens. */
  read(address: SampleAddress, window: Int32Array): void;
  /** Where documents begin inside the window of S + 1 tokens. */
  documentStarts(address: SampleAddress): number[];
  /** Of a task with answers: sets the targets that do not count to IGNORED_TARGET. */
  maskTargets?(address: SampleAddress, targets: Int32Array): void;
}

export class StreamSamples implements Samples {
  readonly perEpoch: number;
  readonly #stream: RangeStream;
  readonly #sequenceLength: number;
  readonly #seed: number;
  readonly #shuffle: boolean;
  /** The permutation of the epoch asked for last. */
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
    // Exact: a run would need 2^53 tokens, nine thousand trillion, before this product could round.
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
