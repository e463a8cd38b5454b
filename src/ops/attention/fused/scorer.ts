/** The scorer loss beside the fused kernels: the launches of scorer.cu. */
import { type CudaRuntime, f32, f64 } from '../../../device/cuda/runtime.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import type { Sequences } from '../../common/sequences.js';
import type { SparseInputs } from '../nsa.js';
import { scorerCode } from '../scorer-loss/cuda.js';
import { tokensWithChoice } from '../scorer-loss/op.js';
import type { SparseShape } from '../shape.js';
import type { FusedBatch } from './code.js';
import type { ForwardResults } from './forward.js';
import { overlapping } from './plan.js';

/** As in scorer.cu. */
const WARPS = 4;
/** Compressed keys that may overlap a block: `scorer_gradients` keeps the sums of all in registers. */
const MAX_WIDTH = 32;

/** Why the scorer loss does not run beside the fused kernels, as a sentence; null if it does. */
export function scorerRefusal(sparse: SparseShape): string | null {
  const width = overlapping(sparse);
  return width > MAX_WIDTH
    ? `train.scorer_loss: ${width} compressed keys overlap a block, and the fused kernels take at most ${MAX_WIDTH}`
    : null;
}

/** The scorer loss of one layer. Requires that `scorerRefusal` returns null. */
export class FusedScorer {
  /** [1], the mean over the (token, group) pairs that chose at least two blocks by score; 0 without such pairs. */
  readonly loss: Tensor;
  /** Read by the backward pass: the gradient of the importances [T, G, n], and for each head their mean [T, H]. */
  readonly saved: readonly [dImportance: Tensor, mean: Tensor];
  readonly #batch: FusedBatch;
  readonly #inputs: SparseInputs;
  readonly #results: ForwardResults;
  readonly #pairs: number;
  readonly #factor: number;

  /** Computes the loss; the lists of `results` are complete. `weight`: of its gradient. */
  constructor(
    tape: Tape,
    cuda: CudaRuntime,
    batch: FusedBatch,
    inputs: SparseInputs,
    results: ForwardResults,
    tokens: Sequences,
    weight: number,
  ) {
    const { heads, sparse } = batch.shape;
    const { total } = tokens;
    this.#batch = batch;
    this.#inputs = inputs;
    this.#results = results;
    this.#pairs = heads.groups * tokensWithChoice(tokens, sparse);
    this.#factor = this.#pairs === 0 ? 0 : weight / this.#pairs;
    this.loss = tape.zeros([1]);
    this.saved = [tape.empty([total, heads.groups, sparse.nSel]), tape.empty([total, heads.heads])];
    if (this.#pairs === 0) return;
    const masses = tape.empty([total, heads.heads, sparse.nSel, 2]);
    const losses = tape.empty([total, heads.groups]);
    this.#launchItems('scorer_masses', ...[inputs.q, inputs.kSel, inputs.kCmp, results.lseSel, results.lseCmp, masses]);
    batch.launch(
      ...(['scorer', 'scorer_losses', { grid: Math.ceil((total * heads.groups) / 8), block: 256 }] as const),
      ...[results.selected, masses, ...this.saved, losses, batch.tokenStarts, batch.sequences],
    );
    scorerCode(cuda, null, heads.dk).launch(
      ...(['scorer_mean', { grid: 1, block: 256 }, losses, batch.tokenStarts, this.loss] as const),
      ...[batch.sequences, heads.groups, f64(this.#pairs)],
    );
    for (const tensor of [masses, losses]) tape.drop(tensor);
  }

  /** Adds to the delta of the compressed branch [T, H] before its backward pass reads it. */
  addToDelta(delta: Tensor): void {
    const { rows } = this.#batch;
    if (this.#pairs === 0) return;
    this.#batch.launch(
      ...(['scorer', 'scorer_delta', { grid: Math.ceil(rows / 256), block: 256 }] as const),
      ...[delta, this.saved[1], this.#inputs.gates, f32(this.#factor), rows],
    );
  }

  /**
   * Adds to the selected branch's shares of the queries' gradient, and to the gradient of the compressed keys: in fp32
   * sums, or in bf16 if these are null. `parts`: memory for `partRows` rows of dk numbers.
   */
  addGradients(shares: Tensor, parts: Tensor, sums: Tensor | null, dKeys: Tensor): void {
    const batch = this.#batch;
    const { plan, groups, shape } = batch;
    if (this.#pairs === 0) return;
    const given = [this.#inputs.q, this.#inputs.kCmp, this.#results.lseCmp, this.saved[0], this.#inputs.gates] as const;
    this.#launchItems('scorer_gradients', ...given, f32(this.#factor), shares, parts);
    batch.launch(
      ...([
        'scorer',
        'scorer_key_sums',
        { grid: Math.ceil((plan.compressed * groups * shape.heads.dk) / 256), block: 256 },
      ] as const),
      ...[parts, sums, dKeys, this.#results.offsets, batch.tokenStarts, batch.compressedStarts, batch.blockStarts],
      batch.sequences,
    );
  }

  /** A block for every work item of the selected branch's backward pass. */
  #launchItems(name: 'scorer_masses' | 'scorer_gradients', ...values: Parameters<FusedBatch['launch']>[3][]): void {
    const batch = this.#batch;
    const { backwardItems, offsets, lists } = this.#results;
    batch.launch(
      'scorer',
      name,
      { grid: batch.plan.backwardItems, block: WARPS * 32, shared: batch.constant('scorer', `${name}_shared`) },
      ...[...values, backwardItems, offsets, lists, batch.tokenStarts, batch.compressedStarts, batch.blockStarts],
      batch.sequences,
    );
  }
}

/** Rows of the parts of the compressed keys' gradient. */
export function partRows({ plan, shape }: Pick<FusedBatch, 'plan' | 'shape'>): number {
  return plan.backwardItems * overlapping(shape.sparse);
}
