/**
 * A gradient for the selection (`train.scorer_loss`). Blocks are ranked by the compressed branch, but whether the right
 * ones were chosen never reaches it: a choice has no gradient. This loss is the KL divergence from the attention that the
 * selected branch gave the chosen blocks to the importance they were chosen by, both as shares among these blocks. The
 * attention is a constant of the loss, so only queries and compressed keys learn from it.
 */
import { defineKernels } from '../../../device/device.js';
import { UsageError } from '../../../errors.js';
import type { Tape } from '../../../tensor/tape.js';
import { Tensor } from '../../../tensor/tensor.js';
import type { Sequences } from '../../common/sequences.js';
import { expectFloats, expectShape } from '../../common/shapes.js';
import type { ExtendedBackward } from '../branch.js';
import { SELECTION_SIGNATURE, selectionArguments } from '../select/op.js';
import { forcedBlocks, type SparseShape } from '../shape.js';
import { launchers } from './cuda.js';

export const signatures = {
  scorer_loss_forward: [
    ...(['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr'] as const),
    ...(['i64', 'i64', 'i64', 'i64', 'f64'] as const),
    ...SELECTION_SIGNATURE,
  ],
  compressed_backward_scored: [
    ...(['struct', 'ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'f64'] as const),
    ...SELECTION_SIGNATURE,
  ],
} as const;

const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** Inputs of the scorer loss. */
export interface ScorerInputs {
  /** [T, H, dk] */
  readonly q: Tensor;
  /** Compressed keys [Tc, G, dk]. */
  readonly kCmp: Tensor;
  /** Logarithms of the softmax sums of the compressed branch [T, H]. */
  readonly lseCmp: Tensor;
  /** i32 [T, G, nSel] */
  readonly selected: Tensor;
  /** f32 [T, G, nSel], as `selectedAttention` returns it. */
  readonly mass: Tensor;
}

/** The loss of one layer, and the backward kernel of the compressed branch that adds its gradient. */
export interface ScorerLoss extends ExtendedBackward {
  /** [1], the mean over the (token, group) pairs that chose at least two blocks by score; 0 without such pairs. */
  readonly loss: Tensor;
}

/** The scorer loss of a layer; `weight` is that of its gradient. Drops `mass`. */
export function scorerLoss(
  tape: Tape,
  inputs: ScorerInputs,
  tokens: Sequences,
  sparse: SparseShape,
  weight: number,
): ScorerLoss {
  const { q, kCmp, lseCmp, selected, mass } = inputs;
  const blocks = tokens.compressed(sparse);
  const [, heads, dk] = expectFloats('scorer loss: q', q, [tokens.total, -1, -1]);
  const [, groups] = expectShape('scorer loss: k_cmp', kCmp, [blocks.total, -1, dk], q.dtype);
  expectShape('scorer loss: lse_cmp', lseCmp, [tokens.total, heads]);
  expectShape('scorer loss: selected', selected, [tokens.total, groups, sparse.nSel], 'i32');
  expectShape('scorer loss: mass', mass, [tokens.total, groups, sparse.nSel]);
  if (sparse.scorePool === 'max')
    throw new UsageError('train.scorer_loss adds the scores of a block: it needs nsa.score_pool sum, not max');
  const kernel = tape.device.kernels(kernels);
  const pairs = groups * tokensWithChoice(tokens, sparse);
  const loss = tape.empty([1]);
  const dImportance = tape.empty([tokens.total, groups, sparse.nSel]);
  const mean = tape.empty([tokens.total, heads]);
  const selection = selectionArguments(sparse);
  // On a GPU the losses of all pairs, and inputs of a second pass of the compressed branch's backward kernels.
  const isCuda = tape.device.kind === 'cuda';
  const losses = isCuda ? tape.empty([tokens.total, groups]) : null;
  kernel.scorer_loss_forward(
    ...([q, kCmp, lseCmp, mass, tokens.offsets, blocks.offsets, selected, dImportance, mean, loss, losses] as const),
    ...([tokens.count, heads, groups, dk, pairs] as const),
    ...selection,
  );
  tape.drop(mass);
  if (losses) tape.drop(losses);
  const sharedSize = 8 * (tokens.total * heads + blocks.total * groups);
  const factor = pairs === 0 ? 0 : weight / pairs;
  return {
    loss,
    saved: [selected, dImportance, mean],
    backward: (given) => {
      const shared = isCuda ? Tensor.empty(tape.device, [sharedSize], q.dtype) : null;
      const sizes = [tokens.total, blocks.total, factor, ...selection] as const;
      kernel.compressed_backward_scored(given, selected, dImportance, mean, shared, ...sizes);
      shared?.free();
    },
  };
}

/** Tokens that choose at least two blocks by score. It depends on their positions alone. */
export function tokensWithChoice({ starts }: Pick<Sequences, 'starts'>, sparse: SparseShape): number {
  const { initBlocks, localBlocks } = forcedBlocks(sparse);
  // The first block whose tokens have two blocks before the local ones, and two slots for them.
  if (sparse.nSel < initBlocks + localBlocks + 2) return 0;
  const first = (initBlocks + localBlocks + 1) * sparse.lSel;
  let count = 0;
  for (let s = 0; s + 1 < starts.length; s++) count += Math.max(0, starts[s + 1] - starts[s] - first);
  return count;
}
