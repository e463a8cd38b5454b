/**
 * The core of Native Sparse Attention: compressed, selected and window attention over given queries, keys and values,
 * summed by given gates. Projections, positions and the gate itself belong to the attention module (src/model).
 */
import { dispose } from '../../tensor/dispose.js';
import type { Tape } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';
import { expectCompressed, type Sequences } from '../common/sequences.js';
import { combine } from './combine/op.js';
import { compressedAttention } from './compressed/op.js';
import type { AttentionCounters } from './counters.js';
import { type FusedOptions, fusedRefusal, fusedSparseAttention } from './fused/op.js';
import { compareWithReference, referenceSparseAttention } from './parity.js';
import { selectBlocks } from './select/op.js';
import { type SelectedOptions, selectedAttention } from './selected/op.js';
import { type SparseShape, validateShapes } from './shape.js';
import { windowAttention } from './window/op.js';

/**
 * All keys already rotated; shapes as in docs/explain/attention.md: q [T,H,dk], k_cmp [Tc,G,dk], k_sel and k_win
 * [T,G,dk].
 */
export interface SparseInputs {
  readonly q: Tensor;
  readonly kCmp: Tensor;
  readonly vCmp: Tensor;
  readonly kSel: Tensor;
  readonly vSel: Tensor;
  readonly kWin: Tensor;
  readonly vWin: Tensor;
  /** `[T, H, 3]`: weights of the compressed, the selected and the window branch. */
  readonly gates: Tensor;
}

/** Sequence offsets in tokens and in compressed blocks. */
export interface SparseLayout {
  readonly tokens: Sequences;
  readonly blocks: Sequences;
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
}

/** A layout that owns the memory of its `blocks`; `tokens` stay the caller's. */
export interface OwnedSparseLayout extends SparseLayout, Disposable {
  /** Frees the tables of the layout. */
  free(): void;
}

/** The layout of sequences in tokens and in compressed blocks of `l` tokens with stride `d`. */
export function sparseLayout(tokens: Sequences, { l, d }: Pick<SparseShape, 'l' | 'd'>): OwnedSparseLayout {
  const blocks = tokens.compressed(l, d);
  return { tokens, blocks, free: () => blocks.free(), [dispose]: () => blocks[dispose]() };
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
}

/** Native Sparse Attention on given queries, keys, values and gates: three branches and their gated sum. */
export function nativeSparseAttention(
  tape: Tape,
  inputs: SparseInputs,
  layout: SparseLayout,
  sparse: SparseShape,
  options: SparseOptions = {},
): SparseOutputs {
  expectCompressed('nativeSparseAttention', layout.tokens, layout.blocks, sparse);
  if (options.parity) return referenceSparseAttention(tape, inputs, layout, sparse);
  const { q, kSel, vSel } = inputs;
  const heads = { heads: q.shape[1], groups: kSel.shape[1], dk: q.shape[2], dv: vSel.shape[2] };
  validateShapes(heads, sparse);
  const refusal = fusedRefusal({ heads, sparse, dtype: q.dtype, tokens: layout.tokens }, tape.device, options);
  if (refusal !== null) options.counters?.refused(refusal);
  const attend = refusal === null ? fusedSparseAttention : branchByBranch;
  const outputs = attend(tape, inputs, layout, sparse, options);
  options.onCompare?.(compareWithReference(inputs, layout, sparse, outputs));
  return outputs;
}

/** The branch kernels: on the CPU, in fp32, and for shapes that the fused kernels do not support. */
function branchByBranch(
  tape: Tape,
  inputs: SparseInputs,
  { tokens, blocks }: SparseLayout,
  sparse: SparseShape,
  options: SparseOptions,
): SparseOutputs {
  const { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates } = inputs;
  const { out: oCmp, lse } = compressedAttention(tape, { q, k: kCmp, v: vCmp }, tokens, blocks, sparse);
  const selected = selectBlocks(tape, { q, k: kCmp, lse }, tokens, blocks, sparse);
  const oSel = selectedAttention(tape, { q, k: kSel, v: vSel }, selected, tokens, sparse.lSel, options);
  const oWin = windowAttention(tape, { q, k: kWin, v: vWin }, tokens, sparse.w);
  const out = combine(tape, gates, oCmp, oSel, oWin);
  return { out, oCmp, oSel, oWin, selected };
}
