/** Attention over compressed blocks: token t sees the blocks that end at or before it. Seeing none gives 0. */
import { defineKernels } from '../../../device/device.js';
import type { Tape } from '../../../tensor/tape.js';
import { expectCompressed, type Sequences } from '../../common/sequences.js';
import { type AttentionInputs, type AttentionOutput, attendBranch } from '../branch.js';
import type { SparseShape } from '../shape.js';
import { launchers } from './cuda.js';

export const signatures = {
  compressed_forward: ['struct', 'i64', 'i64'],
  compressed_backward: ['struct', 'i64', 'i64'],
} as const;

const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/**
 * `q` [T, H, dk], `k` [Tc, G, dk] and `v` [Tc, G, dv] of the compressed blocks, whose layout is
 * `sequences.compressed(l, d)`. The LSE (-inf where no block is visible) is what `select` needs.
 */
export function compressedAttention(
  tape: Tape,
  inputs: AttentionInputs,
  sequences: Sequences,
  blocks: Sequences,
  { l, d }: Pick<SparseShape, 'l' | 'd'>,
): AttentionOutput {
  expectCompressed('compressed attention', sequences, blocks, { l, d });
  const kernel = tape.device.kernels(kernels);
  return attendBranch(tape, inputs, {
    name: 'compressed attention',
    tokens: sequences,
    keys: blocks,
    forward: (given) => kernel.compressed_forward(given, l, d),
    backward: (given) => kernel.compressed_backward(given, l, d),
  });
}
