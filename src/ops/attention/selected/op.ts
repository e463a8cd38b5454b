/**
 * Attention over the selected blocks: token t sees the tokens s <= t of the blocks its group selected.
 *
 * Kernels: `v1` goes query by query; `v2` lets neighbouring queries share the loads of the union of their blocks;
 * `adaptive` takes v2 from a length on; `reference` is the float64 loop, for debugging.
 */
import { defineKernels } from '../../../device/device.js';
import { UsageError } from '../../../errors.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import type { Sequences } from '../../common/sequences.js';
import { expectShape } from '../../common/shapes.js';
import { type AttentionInputs, type AttentionOutput, attendBranch, headShape, recordAttention } from '../branch.js';
import type { HeadShape, SparseShape } from '../shape.js';
import { launchers } from './cuda.js';
import { blockMasses, selectedBackward, selectedForward } from './reference.js';

export const signatures = {
  selected_forward: ['struct', 'ptr', 'i64', 'i64', 'i64', 'ptr'],
  selected_backward: ['struct', 'ptr', 'i64', 'i64'],
} as const;

const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

export const SELECTION_KERNELS = ['adaptive', 'v1', 'v2', 'reference'] as const;
/** Kernels of the selected branch. */
export type SelectionKernel = (typeof SELECTION_KERNELS)[number];

/** Which kernel computes the selected branch. */
export interface SelectedOptions {
  readonly kernel?: SelectionKernel;
  /** `adaptive` takes v2 for batches whose longest sequence has at least this many tokens. */
  readonly sharedFrom?: number;
  /** f32 [T, G, n_sel], filled with the share of each block in a token's attention, summed over the heads of the group. */
  readonly mass?: Tensor;
}

const DEFAULT_SHARED_FROM = 1024;
/** Rows (token, head) that share loads in v2. */
const SHARED_ROWS = 192;

/** The kernel that will run. */
export function chooseSelectionKernel(
  longest: number,
  options: SelectedOptions = {},
): Exclude<SelectionKernel, 'adaptive'> {
  const { kernel = 'adaptive', sharedFrom = DEFAULT_SHARED_FROM } = options;
  if (kernel !== 'adaptive') return kernel;
  return longest >= sharedFrom ? 'v2' : 'v1';
}

/**
 * `q` [T, H, dk], `k` [T, G, dk], `v` [T, G, dv], `selected` i32 [T, G, n_sel] → `out` [T, H, dv]. A row of `selected` holds
 * block numbers within the sequence, ascending and distinct, then -1 in the slots that are left. The CPU refuses other rows;
 * a GPU does not read them back, and their result is undefined.
 */
export function selectedAttention(
  tape: Tape,
  inputs: AttentionInputs,
  selected: Tensor,
  sequences: Sequences,
  lSel: number,
  options: SelectedOptions = {},
): AttentionOutput {
  if (tape.device.kind === 'cpu') expectDistinct(selected);
  return attendSelected(tape, inputs, selected, sequences, lSel, options);
}

/** Kernels give each block of a row its own slot: one named twice would leave memory unwritten. */
function expectDistinct(selected: Tensor): void {
  const [, groups, nSel] = expectShape('selected attention: selected', selected, [-1, -1, -1], 'i32');
  const blocks = selected.read();
  for (let i = 0; i < blocks.length; i++) {
    const isFirst = i % nSel === 0;
    const isPadded = !isFirst && blocks[i - 1] === -1;
    if (blocks[i] === -1 || (!isPadded && blocks[i] > (isFirst ? -1 : blocks[i - 1]))) continue;
    const row = Math.floor(i / nSel);
    const values = blocks.subarray(row * nSel, (row + 1) * nSel).join(', ');
    throw new UsageError(
      `selected attention: row [${Math.floor(row / groups)}, ${row % groups}] of selected is [${values}]: the blocks of a row ` +
        'must be ascending and distinct, with -1 in the slots after them',
    );
  }
}

/** `selectedAttention` for blocks that `selectBlocks` chose, whose rows need no check. */
export function attendSelected(
  tape: Tape,
  inputs: AttentionInputs,
  selected: Tensor,
  sequences: Sequences,
  lSel: number,
  options: SelectedOptions = {},
): AttentionOutput {
  const { mass = null } = options;
  const shape = headShape('selected attention', inputs, sequences, sequences);
  const { heads, groups } = shape;
  const [, , nSel] = expectShape('selected attention: selected', selected, [sequences.total, groups, -1], 'i32');
  if (mass) expectShape('selected attention: mass', mass, [sequences.total, groups, nSel]);
  const choice = chooseSelectionKernel(sequences.longest, options);
  if (choice === 'reference') return reference(tape, inputs, selected, sequences, shape, { lSel, nSel }, mass);
  const kernel = tape.device.kernels(kernels);
  const tile = choice === 'v1' ? 1 : Math.max(1, Math.floor((SHARED_ROWS * groups) / heads));
  return attendBranch(tape, inputs, {
    name: 'selected attention',
    tokens: sequences,
    keys: sequences,
    saved: [selected],
    forward: (given) => kernel.selected_forward(given, selected, lSel, nSel, tile, mass),
    backward: (given) => kernel.selected_backward(given, selected, lSel, nSel),
  });
}

function reference(
  tape: Tape,
  inputs: AttentionInputs,
  selected: Tensor,
  sequences: Sequences,
  shape: HeadShape,
  selection: Pick<SparseShape, 'lSel' | 'nSel'>,
  mass: Tensor | null,
): AttentionOutput {
  const values = [inputs.q, inputs.k, inputs.v].map((tensor) => Float64Array.from(tensor.read())) as Values;
  const blocks = selected.read();
  const { out: result, lse: logSums } = selectedForward(...values, blocks, sequences.starts, shape, selection);
  mass?.write(blockMasses(values[0], values[1], blocks, sequences.starts, shape, selection));
  const out = tape.from(result, [sequences.total, shape.heads, shape.dv], inputs.q.dtype);
  const lse = tape.from(logSums, [sequences.total, shape.heads]);
  recordAttention(tape, inputs, { out, lse }, [], (dOut, { dq, dk, dv, flags }) => {
    const gradients = selectedBackward(
      ...values,
      blocks,
      sequences.starts,
      shape,
      selection,
      Float64Array.from(dOut.read()),
    );
    [dq, dk, dv].forEach((into, i) => {
      const computed = [gradients.dq, gradients.dk, gradients.dv][i];
      const held = flags[i] ? into.read() : null;
      into.write(held ? computed.map((value, j) => value + held[j]) : computed);
    });
  });
  return { out, lse };
}

type Values = [Float64Array, Float64Array, Float64Array];
