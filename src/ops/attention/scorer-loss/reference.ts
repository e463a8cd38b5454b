/**
 * The scorer loss in float64: how far the scorer's distribution over the blocks a token chose is from the attention that
 * the selected branch gave them, and its gradient. docs/explain/attention.md, "A gradient for the selection".
 */
import { range, scores, sequenceOf, softmax } from '../branch-reference.js';
import { finishedBlocks } from '../compressed/reference.js';
import { overlap } from '../select/reference.js';
import { blockMasses } from '../selected/reference.js';
import { forcedBlocks, type HeadShape, type SparseShape } from '../shape.js';

/** `q` [T,H,dk], `kCmp` [Tc,G,dk], `kSel` [T,G,dk]; `selected` [T,G,nSel] with -1 for none. */
export interface ScorerInputs {
  readonly q: Float64Array;
  readonly kCmp: Float64Array;
  readonly kSel: Float64Array;
  readonly selected: ArrayLike<number>;
}

/** cu_seqlens of the tokens and of the compressed blocks, and the sizes. */
export interface ScorerLayout {
  readonly starts: ArrayLike<number>;
  readonly cmpStarts: ArrayLike<number>;
  readonly heads: HeadShape;
  readonly sparse: SparseShape;
}

/** The loss, its gradients, and the (token, group) pairs it is the mean of. */
export interface ScorerResult {
  readonly loss: number;
  readonly pairs: number;
  readonly dq: Float64Array;
  readonly dkCmp: Float64Array;
}

/**
 * `targets` replaces the shares of the selected branch's attention, [T,G,nSel], 0 for blocks that were not chosen: they
 * are constants of the loss, which finite differences must hold fixed.
 */
export function scorerLoss(inputs: ScorerInputs, layout: ScorerLayout, targets?: Float64Array): ScorerResult {
  const { q, kCmp, selected } = inputs;
  const { starts, cmpStarts, heads, sparse } = layout;
  const [sequence, visible] = [sequenceOf(starts), finishedBlocks(starts, cmpStarts, sparse)];
  const [perGroup, scale] = [heads.heads / heads.groups, 1 / Math.sqrt(heads.dk)];
  const wanted = targets ?? attentionShares(inputs, layout);
  const [dq, dkCmp] = [new Float64Array(q.length), new Float64Array(kCmp.length)];
  let [total, pairs] = [0, 0];
  for (let token = 0; token < starts[starts.length - 1]; token++)
    for (let group = 0; group < heads.groups; group++) {
      const at = (token * heads.groups + group) * sparse.nSel;
      const chosen = chosenSlots(selected, at, token - starts[sequence[token]], sparse);
      if (chosen.length < 2) continue;
      pairs += 1;
      const keys = visible(token, group);
      const rows = range(0, perGroup).map((i) => token * heads.heads + group * perGroup + i);
      const probabilities = rows.map((row) => softmax(scores(q, kCmp, heads, row, group, keys)).probabilities);
      const importance = chosen.map((slot) =>
        keys.reduce((sum, _, i) => {
          const weight = overlap(i, selected[at + slot], sparse);
          return sum + weight * probabilities.reduce((p, row) => p + row[i], 0);
        }, 0),
      );
      const all = importance.reduce((a, b) => a + b);
      chosen.forEach((slot, i) => {
        const target = wanted[at + slot];
        if (target > 0) total += target * (Math.log(target) - Math.log(importance[i] / all));
      });
      const dImportance = chosen.map((slot, i) => 1 / all - wanted[at + slot] / importance[i]);
      const dProbability = keys.map((_, i) =>
        chosen.reduce((sum, slot, c) => sum + overlap(i, selected[at + slot], sparse) * dImportance[c], 0),
      );
      rows.forEach((row, r) => {
        const mean = dProbability.reduce((sum, value, i) => sum + value * probabilities[r][i], 0);
        keys.forEach((key, i) => {
          const dScore = probabilities[r][i] * (dProbability[i] - mean) * scale;
          for (let c = 0; c < heads.dk; c++) {
            dq[row * heads.dk + c] += dScore * kCmp[(key * heads.groups + group) * heads.dk + c];
            dkCmp[(key * heads.groups + group) * heads.dk + c] += dScore * q[row * heads.dk + c];
          }
        });
      });
    }
  const factor = pairs === 0 ? 0 : 1 / pairs;
  return { loss: total * factor, pairs, dq: dq.map((x) => x * factor), dkCmp: dkCmp.map((x) => x * factor) };
}

/** The share of each chosen block in the selected branch's attention to the chosen blocks: [T,G,nSel], elsewhere 0. */
export function attentionShares(
  { q, kSel, selected }: Pick<ScorerInputs, 'q' | 'kSel' | 'selected'>,
  { starts, heads, sparse }: Pick<ScorerLayout, 'starts' | 'heads' | 'sparse'>,
): Float64Array {
  const sequence = sequenceOf(starts);
  const masses = blockMasses(q, kSel, selected, starts, heads, sparse);
  const shares = new Float64Array(masses.length);
  for (let token = 0; token < sequence.length; token++)
    for (let group = 0; group < heads.groups; group++) {
      const at = (token * heads.groups + group) * sparse.nSel;
      const chosen = chosenSlots(selected, at, token - starts[sequence[token]], sparse);
      const all = chosen.reduce((sum, slot) => sum + masses[at + slot], 0);
      for (const slot of chosen) shares[at + slot] = masses[at + slot] / all;
    }
  return shares;
}

/** Slots of the blocks that were chosen by score: not forced, not empty. */
function chosenSlots(selected: ArrayLike<number>, at: number, position: number, sparse: SparseShape): number[] {
  const { initBlocks, localBlocks } = forcedBlocks(sparse);
  const current = Math.floor(position / sparse.lSel);
  return range(0, sparse.nSel).filter((slot) => {
    const block = selected[at + slot];
    return block >= initBlocks && block <= current - localBlocks;
  });
}
