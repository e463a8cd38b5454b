/**
 * The core of Native Sparse Attention: compressed, selected and window attention over given queries, keys and values,
 * summed by given gates. Projections, positions and the gate itself belong to the attention module (src/model).
 */
import { UsageError } from '../../errors.js';
import type { Tape } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';
import type { Sequences } from '../common/sequences.js';
import { combine } from './combine/op.js';
import { startCompressed } from './compressed/op.js';
import type { AttentionCounters } from './counters.js';
import { type FusedOptions, fusedRefusal, fusedSparseAttention } from './fused/op.js';
import { compareWithReference, referenceSparseAttention } from './parity.js';
import { scorerLoss } from './scorer-loss/op.js';
import { selectBlocks } from './select/op.js';
import { attendSelected, type SelectedOptions } from './selected/op.js';
import { type SparseShape, validateShapes } from './shape.js';
import { windowAttention } from './window/op.js';

/**
 * All keys already rotated; shapes as in docs/explain/attention.md: q [T,H,dk], k_cmp [Tc,G,dk], k_sel and k_win
 * [T,G,dk].
 */
export interface SparseInputs {
  readonly q: Tensor;
  /** Queries of the window branch if they are not `q` (`nsa.rope: window`). */
  readonly qWin?: Tensor;
  readonly kCmp: Tensor;
  readonly vCmp: Tensor;
  readonly kSel: Tensor;
  readonly vSel: Tensor;
  readonly kWin: Tensor;
  readonly vWin: Tensor;
  /** `[T, H, 3]`: weights of the compressed, the selected and the window branch. */
  readonly gates: Tensor;
}

/** Results of `nativeSparseAttention`. */
export interface SparseOutputs {
  /** [T, H, dv] */
  readonly out: Tensor;
  readonly oCmp: Tensor;
  readonly oSel: Tensor;
  readonly oWin: Tensor;
  /** i32 [T, G, n_sel], ascending, -1 where fewer blocks exist. */
  readonly selected: Tensor;
  /** [1], with `scorerWeight` only. */
  readonly scorerLoss?: Tensor;
}

/** Which kernels compute sparse attention. */
export interface SparseOptions extends SelectedOptions, FusedOptions {
  /** The float64 reference instead of all kernels. */
  readonly parity?: boolean;
  /** Called after every call with the relative error of the output against the reference. */
  readonly onCompare?: (relativeError: number) => void;
  /** Minimum length of the longest sequence for the fused kernels (CUDA, bf16). `Infinity` disables them. */
  readonly fusedFrom?: number;
  /** Counts which kernels ran (CUDA). */
  readonly counters?: AttentionCounters;
  /** Weight of the scorer loss, whose gradient is added in the backward pass. Default 0: none. */
  readonly scorerWeight?: number;
}

/** Native Sparse Attention on given queries, keys, values and gates: three branches and their gated sum. */
export function nativeSparseAttention(
  tape: Tape,
  inputs: SparseInputs,
  tokens: Sequences,
  sparse: SparseShape,
  options: SparseOptions = {},
): SparseOutputs {
  const isScored = (options.scorerWeight ?? 0) > 0;
  if (isScored && options.parity)
    throw new UsageError('train.scorer_loss: not part of the reference that runtime.reference_kernels uses; set 0');
  if (options.parity) return referenceSparseAttention(tape, inputs, tokens, sparse);
  const { q, kSel, vSel } = inputs;
  const heads = { heads: q.shape[1], groups: kSel.shape[1], dk: q.shape[2], dv: vSel.shape[2] };
  validateShapes(heads, sparse);
  const refusal = fusedRefusal({ heads, sparse, dtype: q.dtype, tokens }, tape.device, options);
  if (refusal !== null) options.counters?.refused(refusal);
  const attend = refusal === null ? fusedSparseAttention : branchByBranch;
  const outputs = attend(tape, inputs, tokens, sparse, options);
  options.onCompare?.(compareWithReference(inputs, tokens, sparse, outputs));
  return outputs;
}

/** The branch kernels: on the CPU, in fp32, and for shapes that the fused kernels do not support. */
function branchByBranch(
  tape: Tape,
  inputs: SparseInputs,
  tokens: Sequences,
  sparse: SparseShape,
  options: SparseOptions,
): SparseOutputs {
  const { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates } = inputs;
  const { scorerWeight = 0 } = options;
  const { out: oCmp, lse: lseCmp, record } = startCompressed(tape, { q, k: kCmp, v: vCmp }, tokens, sparse);
  // Gradients of queries are added up in the reverse order of these calls.
  if (scorerWeight === 0) record();
  const selected = selectBlocks(tape, { q, k: kCmp, lse: lseCmp }, tokens, sparse);
  const mass = scorerWeight === 0 ? null : tape.empty(selected.shape);
  const kernel = mass ? { ...options, mass } : options;
  const { out: oSel } = attendSelected(tape, { q, k: kSel, v: vSel }, selected, tokens, sparse.lSel, kernel);
  const scorer = mass && scorerLoss(tape, { q, kCmp, lseCmp, selected, mass }, tokens, sparse, scorerWeight);
  if (scorer) record(scorer);
  for (const tensor of scorer?.saved ?? []) if (tensor !== selected) tape.drop(tensor);
  const oWin = windowAttention(tape, { q: inputs.qWin ?? q, k: kWin, v: vWin }, tokens, sparse.w);
  const out = combine(tape, gates, oCmp, oSel, oWin);
  return { out, oCmp, oSel, oWin, selected, ...(scorer && { scorerLoss: scorer.loss }) };
}
