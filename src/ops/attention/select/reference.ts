/** Which blocks each (token, group) selects, in float64: importance from the compressed attention, then the top. */

import { scores, sequenceOf, softmax } from '../branch-reference.js';
import { finishedBlocks } from '../compressed/reference.js';
import { type ForcedBlocks, forcedBlocks, type HeadShape, type SparseShape } from '../shape.js';

/**
 * `q` [T,H,dk], `kCmp` [Tc,G,dk] -> a function that gives the scores I of one (token, group): one for each selection
 * block up to the current one.
 */
export function importance(
  q: Float64Array,
  kCmp: Float64Array,
  starts: ArrayLike<number>,
  cmpStarts: ArrayLike<number>,
  shape: HeadShape,
  sparse: SparseShape,
): (token: number, group: number) => Float64Array {
  const sequence = sequenceOf(starts);
  const visible = finishedBlocks(starts, cmpStarts, sparse);
  const perGroup = shape.heads / shape.groups;
  return (token, group) => {
    const position = token - starts[sequence[token]];
    const total = new Float64Array(Math.floor(position / sparse.lSel) + 1);
    const keys = visible(token, group);
    /** Of every compressed block, over the heads of the group. */
    const weight = new Float64Array(keys.length);
    for (let i = 0; i < perGroup; i++) {
      const row = token * shape.heads + group * perGroup + i;
      const { probabilities } = softmax(scores(q, kCmp, shape, row, group, keys));
      for (let block = 0; block < keys.length; block++) weight[block] += probabilities[block];
    }
    for (let block = 0; block < keys.length; block++) {
      const first = Math.floor((block * sparse.d) / sparse.lSel);
      for (let j = first; j < total.length && j * sparse.lSel < block * sparse.d + sparse.l; j++)
        total[j] =
          sparse.scorePool === 'max'
            ? Math.max(total[j], weight[block])
            : total[j] + overlap(block, j, sparse) * weight[block];
    }
    return total;
  };
}

/** Tokens that compressed block i and selection block j share, in strides: 1,2,2,2,1 around 4j+1 for 32/16/64. */
export function overlap(i: number, j: number, { l, d, lSel }: SparseShape): number {
  return Math.max(0, Math.min(i * d + l, (j + 1) * lSel) - Math.max(i * d, j * lSel)) / d;
}

/** [T,G,nSel] block numbers inside the token's sequence, ascending, -1 at the end where fewer exist. */
export function selectBlocks(
  q: Float64Array,
  kCmp: Float64Array,
  starts: ArrayLike<number>,
  cmpStarts: ArrayLike<number>,
  shape: HeadShape,
  sparse: SparseShape,
): Int32Array {
  const score = importance(q, kCmp, starts, cmpStarts, shape, sparse);
  const tokens = starts[starts.length - 1];
  const selected = new Int32Array(tokens * shape.groups * sparse.nSel).fill(-1);
  for (let token = 0; token < tokens; token++)
    for (let group = 0; group < shape.groups; group++)
      selected.set(topBlocks(score(token, group), sparse.nSel, sparse), (token * shape.groups + group) * sparse.nSel);
  return selected;
}

/** The forced blocks, then the others of highest score; equal scores: the lower index. Ascending. */
export function topBlocks(score: ArrayLike<number>, count: number, rule: ForcedBlocks = {}): number[] {
  const forced = forcedOf(score.length - 1, rule);
  const others = Array.from(score, (_, j) => j).filter((j) => !forced.includes(j));
  others.sort((a, b) => score[b] - score[a] || a - b);
  return [...forced, ...others.slice(0, count - forced.length)].sort((a, b) => a - b);
}

/**
 * Whether `selected` (one padded row) is a valid selection for these scores: scores that differ by less than
 * `tolerance` relative may be ranked either way, because they are equal within float32 rounding.
 */
export function isSelection(
  score: ArrayLike<number>,
  selected: ArrayLike<number>,
  tolerance = 1e-6,
  rule: ForcedBlocks = {},
): boolean {
  const row = Array.from(selected);
  const blocks = row.filter((j) => j >= 0);
  const ascending = blocks.every((j, i) => j < score.length && (i === 0 || j > blocks[i - 1]));
  const padded = row.slice(blocks.length).every((j) => j === -1);
  const complete = blocks.length === Math.min(row.length, score.length);
  const forced = forcedOf(score.length - 1, rule);
  if (!ascending || !padded || !complete || !forced.every((j) => blocks.includes(j))) return false;
  const taken = blocks.filter((j) => !forced.includes(j)).map((j) => score[j]);
  const left = Array.from(score).filter((_, j) => !blocks.includes(j));
  return Math.min(...taken, Number.POSITIVE_INFINITY) >= Math.max(...left, 0) * (1 - tolerance);
}

/** The first blocks and the last ones up to `current`, each once. */
function forcedOf(current: number, rule: ForcedBlocks): number[] {
  const { initBlocks, localBlocks } = forcedBlocks(rule);
  return Array.from({ length: current + 1 }, (_, j) => j).filter((j) => j < initBlocks || j > current - localBlocks);
}
