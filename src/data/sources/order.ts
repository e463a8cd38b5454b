/**
 * The one order of all documents, a function of the files and the seed and of nothing else.
 *
 * Files are cut into parts, all of about the same size; an epoch visits all parts in the order of a seeded permutation, and
 * epochs follow each other without end. That sequence of parts is dealt out to a fixed number of lanes, like cards: lane l
 * gets the parts l, l + L, l + 2L … A lane is a stream of its own with its own tokens; sample k of a run is the next one
 * of lane k mod L. So neighbouring samples come from different files, and a rank that takes every W-th sample needs only
 * every W-th lane (when W divides L): it reads and tokenises nothing in vain, and the order is the same for any W.
 *
 * Inside a block (a row group, some megabytes of lines) documents are permuted again. Without shuffling there is one lane,
 * and everything comes in the order in which it is written.
 */

import { createHash } from 'node:crypto';
import { absorb, Purpose } from '../hash.js';
import { createPermutation } from '../permutation.js';
import type { CorpusFile, CorpusSpec } from './spec.js';

/** Every usual number of ranks divides the first of these. */
const LANE_CHOICES = [24, 12, 8, 6, 4, 3, 2, 1];
/** What the blocks of all lanes may take in memory together. */
const BLOCK_MEMORY = 512 << 20;

/** A part of a file, and when it is read. */
export interface Unit {
  readonly file: CorpusFile;
  readonly part: number;
  /** Its number among all parts, in the order of the files: names it whatever the seed is. */
  readonly index: number;
  readonly epoch: number;
}

/** How many lanes a corpus gets: as many as keep at least two parts each, while their blocks fit in memory. */
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

  /** Whether a document is set aside for validation: by its place, so in every epoch the same ones. */
  isValidation(unit: Unit, position: number, row: number): boolean {
    if (this.spec.valFraction === 0) return false;
    const start = absorb(absorb(0, Purpose.split), this.spec.seed);
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

/** Equal for equal files and an equal way of reading them; where they lie does not matter. */
export function corpusIdentity(spec: CorpusSpec, tokenizerIdentity: string): string {
  const files = spec.files.map(({ kind, name, size, identity, parts }) => [kind, name, size, identity, parts]);
  return createHash('sha256')
    .update(JSON.stringify([1, tokenizerIdentity, spec.textField, spec.lanes, files]))
    .digest('hex');
}
