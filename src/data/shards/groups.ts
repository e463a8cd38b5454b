/**
 * Groups of shards: stretches of a corpus that are tokenised without knowing what comes before them. Their borders depend on
 * the sizes of the files alone, so any number of machines makes the same shards. A group begins a shard, and the positions
 * of its documents count from its first token (`base` in the index).
 */

import { createHash } from 'node:crypto';
import { isSplittable, pieceCount } from '../sources/corpus.js';
import { corpusIdentity } from '../sources/order.js';
import type { CorpusSpec } from '../sources/spec.js';

/** About a shard of 2^27 tokens for text of four bytes a token. */
export const GROUP_BYTES = 2 ** 29;

/** The first unit of every group, and as a last entry the number of units. The corpus is opened with the same `groupBytes`. */
export function groupBorders({ files }: CorpusSpec, groupBytes: number): number[] {
  const borders = [0];
  let [unit, bytes] = [0, 0];
  for (const file of files) {
    const pieces = isSplittable(file) ? pieceCount(file.size, groupBytes) : 1;
    for (let piece = 0; piece < pieces; piece++) {
      if (bytes >= groupBytes) {
        borders.push(unit);
        bytes = 0;
      }
      unit += file.parts / pieces;
      bytes += file.size / pieces;
    }
  }
  return [...borders, unit];
}

/** The groups of part `index` of `count`, counted from 1, as [first, end). */
export function groupsOfPart(groups: number, { index, count }: PartNumber): [first: number, end: number] {
  return [Math.floor(((index - 1) * groups) / count), Math.floor((index * groups) / count)];
}

/** `--part 3/8`. */
export interface PartNumber {
  readonly index: number;
  readonly count: number;
}

/** Equal on all machines that prepare the same corpus with the same borders, however they read the files. */
export function planOf(spec: CorpusSpec, tokenizerIdentity: string, groupBytes: number): string {
  const files = spec.files.map((file) => ({ ...file, parts: 1 }));
  const identity = corpusIdentity({ ...spec, lanes: 1, files }, tokenizerIdentity);
  return createHash('sha256')
    .update(JSON.stringify([1, identity, groupBytes]))
    .digest('hex');
}
