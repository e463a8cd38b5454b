/** Which blocks each (token, group) selects, in float64: importance from the compressed attention, then the top. */

import { scores, sequenceOf, softmax } from '../branch-reference.js';
import { finishedBlocks } from '../compressed/reference.js';
import { forcedBlocks, type HeadShape, type SelectionRule, type SparseShape } from '../shape.js';

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
    /** Weight of every compressed block, over the heads of the group. */
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
export function topBlocks(score: ArrayLike<number>, count: number, rule: SelectionRule = {}): number[] {
  const current = score.length - 1;
  const best = contests(current, count, rule).flatMap(({ blocks, room }) =>
    blocks.sort((a, b) => score[b] - score[a] || a - b).slice(0, room),
  );
  return [...forcedOf(current, rule), ...best].sort((a, b) => a - b);
}

/**
 * Whether `selected` (one padded row) is a valid selection for these scores: scores that differ by less than
 * `tolerance` relative may be ranked either way, because they are equal within float32 rounding.
 */
export function isSelection(
  score: ArrayLike<number>,
  selected: ArrayLike<number>,
  tolerance = 1e-6,
  rule: SelectionRule = {},
): boolean {
  const row = Array.from(selected);
  const taken = row.filter((j) => j >= 0);
  const ascending = taken.every((j, i) => j < score.length && (i === 0 || j > taken[i - 1]));
  const padded = row.slice(taken.length).every((j) => j === -1);
  const forced = forcedOf(score.length - 1, rule);
  if (!ascending || !padded || !forced.every((j) => taken.includes(j))) return false;
  return contests(score.length - 1, row.length, rule).every(({ blocks, room }) => {
    const [inside, outside] = [true, false].map((isTaken) => blocks.filter((j) => taken.includes(j) === isTaken));
    const least = Math.min(...inside.map((j) => score[j]), Number.POSITIVE_INFINITY);
    const most = Math.max(...outside.map((j) => score[j]), 0);
    return inside.length === Math.min(room, blocks.length) && least >= most * (1 - tolerance);
  });
}

/** Blocks that compete for `room` slots with each other: all that are not forced, or those of two ranges (`chunked`). */
function contests(current: number, count: number, rule: SelectionRule): { blocks: number[]; room: number }[] {
  const forced = forcedOf(current, rule);
  const others = Array.from({ length: current + 1 }, (_, j) => j).filter((j) => !forced.includes(j));
  if (rule.selection !== 'chunked' || current < count) return [{ blocks: others, room: count - forced.length }];
  const chunk = current - (current % count);
  return [
    { blocks: others.filter((j) => j < chunk), room: count / 2 },
    { blocks: others.filter((j) => j >= chunk), room: count / 2 - 1 },
  ];
}

/** The first blocks and the last ones up to `current`, each once. */
function forcedOf(current: number, rule: SelectionRule): number[] {
  const { initBlocks, localBlocks } = forcedBlocks(rule);
  return Array.from({ length: current + 1 }, (_, j) => j).filter((j) => j < initBlocks || j > current - localBlocks);
}
