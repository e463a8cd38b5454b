/**
 * The order of all documents of a streamed corpus: a function of the files and the seed alone.
 *
 * Files are cut into parts of about the same size. An epoch visits all parts in the order of a seeded permutation. The
 * sequence of parts of all epochs is dealt to L lanes: lane l reads the parts l, l + L, l + 2L … A lane is a token stream of
 * its own, and sample k of a run is the next sample of lane k mod L. So neighbouring samples come from different files, and
 * if W divides L, a rank that takes every W-th sample reads only every W-th lane. The order is the same for any W.
 *
 * Inside a block (a row group, some megabytes of lines) documents are permuted again. Without shuffling there is one lane,
 * and documents come in the order in which they are written.
 */

import { createHash } from 'node:crypto';
import { absorb, createPermutation, Purpose } from '../hash.js';
import type { CorpusFile, CorpusSpec } from './spec.js';

/** Common numbers of ranks divide the first of these. */
const LANE_CHOICES = [24, 12, 8, 6, 4, 3, 2, 1];
/** Memory limit for the blocks of all lanes together. */
const BLOCK_MEMORY = 512 << 20;

/** A part of a file in a given epoch. */
export interface Unit {
  readonly file: CorpusFile;
  readonly part: number;
  /** Its number among all parts in the order of the files. Independent of the seed. */
  readonly index: number;
  readonly epoch: number;
}

/** The largest number of lanes with at least two parts each whose blocks fit in memory. */
export function laneCount(units: number, largestBlock: number, shuffle: boolean): number {
  if (!shuffle) return 1;
  return LANE_CHOICES.find((lanes) => 2 * lanes <= units && lanes * largestBlock <= BLOCK_MEMORY) ?? 1;
}

export function countUnits(files: readonly CorpusFile[]): number {
  return files.reduce((sum, file) => sum + file.parts, 0);
}

export class CorpusOrder {
  readonly spec: CorpusSpec;
  readonly unitsPerEpoch: number;
  readonly #firstUnit: number[];
  #epoch = -1;
  #permute: (index: number) => number = (index) => index;

  constructor(spec: CorpusSpec) {
    this.spec = spec;
    let count = 0;
    this.#firstUnit = spec.files.map((file) => {
      const first = count;
      count += file.parts;
      return first;
    });
    this.unitsPerEpoch = count;
  }

  /** The `turn`-th part that a lane reads. */
  unit(lane: number, turn: number): Unit {
    const place = turn * this.spec.lanes + lane;
    const epoch = Math.floor(place / this.unitsPerEpoch);
    const inEpoch = place - epoch * this.unitsPerEpoch;
    if (!this.spec.shuffle) return this.#describe(inEpoch, epoch);
    if (epoch !== this.#epoch) {
      const seed = absorb(absorb(0, Purpose.units), this.spec.seed);
      this.#permute = createPermutation(this.unitsPerEpoch, seed, epoch);
      this.#epoch = epoch;
    }
    return this.#describe(this.#permute(inEpoch), epoch);
  }

  /** The parts in the order in which they are written. */
  plainUnit(index: number): Unit {
    return this.#describe(index, 0);
  }

  /** The order of the documents of a block. */
  blockOrder(unit: Unit, position: number, size: number): (index: number) => number {
    if (!this.spec.shuffle) return (index) => index;
    const seed = absorb(absorb(absorb(absorb(0, Purpose.block), this.spec.seed), unit.index), position);
    return createPermutation(size, seed, unit.epoch);
  }

  /** Whether a document belongs to validation. Depends on its place only, so it is the same in every epoch. */
  isValidation(unit: Unit, position: number, row: number): boolean {
    if (this.spec.valFraction === 0) return false;
    const start = absorb(absorb(0, Purpose.split), this.spec.splitSeed);
    return absorb(absorb(absorb(start, unit.index), position), row) < this.spec.valFraction * 2 ** 32;
  }

  #describe(index: number, epoch: number): Unit {
    let low = 0;
    let high = this.#firstUnit.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >>> 1;
      if (this.#firstUnit[middle] <= index) low = middle;
      else high = middle - 1;
    }
    return { file: this.spec.files[low], part: index - this.#firstUnit[low], index, epoch };
  }
}

/** Equal for equal files that are read in the same way, independent of their folder. */
export function corpusIdentity(spec: CorpusSpec, tokenizerIdentity: string): string {
  const files = spec.files.map(({ kind, name, size, identity, parts }) => [kind, name, size, identity, parts]);
  return createHash('sha256')
    .update(JSON.stringify([1, tokenizerIdentity, spec.textField, spec.lanes, files]))
    .digest('hex');
}
