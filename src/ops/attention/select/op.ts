/**
 * Which selection blocks each (token, group) attends to: the forced blocks (by default block 0, the current block and
 * the one before it), and the blocks of highest importance under the compressed attention's probabilities, of all or by
 * chunks (`SparseShape.selection`). No gradient flows through it.
 */
import { defineKernels } from '../../../device/device.js';
import { UsageError } from '../../../errors.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import type { Sequences } from '../../common/sequences.js';
import { expectFloats, expectShape } from '../../common/shapes.js';
import { forcedBlocks, type SparseShape, validateShapes } from '../shape.js';
import { launchers } from './cuda.js';

/** Types of `selectionArguments`. */
export const SELECTION_SIGNATURE = ['i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64'] as const;

/** The argument of kernels that select blocks: the fields of `Sparse` in selection.h, in its order. */
export function selectionArguments(sparse: SparseShape) {
  const { initBlocks, localBlocks } = forcedBlocks(sparse);
  const [isMax, isChunked] = [Number(sparse.scorePool === 'max'), Number(sparse.selection === 'chunked')];
  return [sparse.l, sparse.d, sparse.lSel, sparse.nSel, initBlocks, localBlocks, isMax, isChunked] as const;
}

export const signatures = {
  select_forward: [
    ...(['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr'] as const),
    ...(['i64', 'i64', 'i64', 'i64'] as const),
    ...SELECTION_SIGNATURE,
  ],
} as const;

const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/**
 * Maximum size of the CPU kernel's table of weights: compressed blocks that overlap one selection block, l/d - 1 +
 * l_sel/d.
 */
const MAX_WEIGHTS = 1024;

/** Inputs of `selectBlocks`. */
export interface SelectInputs {
  /** [T, H, dk] */
  readonly q: Tensor;
  /** Compressed keys [Tc, G, dk]. */
  readonly k: Tensor;
  /** LSE of the compressed attention [T, H]. */
  readonly lse: Tensor;
}

/** Returns i32 [T, G, n_sel], ascending, -1 where fewer blocks exist. */
export function selectBlocks(tape: Tape, inputs: SelectInputs, tokens: Sequences, sparse: SparseShape): Tensor {
  const { q, k, lse } = inputs;
  const blocks = tokens.compressed(sparse);
  const [, heads, dk] = expectFloats('select: q', q, [tokens.total, -1, -1]);
  const [, groups] = expectShape('select: k', k, [blocks.total, -1, dk], q.dtype);
  expectShape('select: lse', lse, [tokens.total, heads]);
  validateShapes({ heads, groups, dk, dv: dk }, sparse);
  const { l, d, lSel, nSel } = sparse;
  if (l / d + lSel / d > MAX_WEIGHTS)
    throw new UsageError(
      `d must be at least (l + l_sel)/${MAX_WEIGHTS}: ${d} is too small for l = ${l}, l_sel = ${lSel}`,
    );
  const selected = tape.empty([tokens.total, groups, nSel], 'i32');
  tape.device
    .kernels(kernels)
    .select_forward(
      q,
      k,
      lse,
      tokens.offsets,
      blocks.offsets,
      selected,
      tokens.count,
      heads,
      groups,
      dk,
      ...selectionArguments(sparse),
    );
  return selected;
}
