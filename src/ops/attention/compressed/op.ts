/** Attention over compressed blocks: token t sees the blocks that end at or before it. Seeing none gives 0. */
import { defineKernels } from '../../../device/device.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Sequences } from '../../common/sequences.js';
import { type AttentionInputs, type AttentionOutput, startBranch, type UnrecordedBranch } from '../branch.js';
import type { SparseShape } from '../shape.js';
import { launchers } from './cuda.js';

export const signatures = {
  compressed_forward: ['struct', 'i64', 'i64'],
  compressed_backward: ['struct', 'i64', 'i64'],
} as const;

const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/**
 * `q` [T, H, dk], `k` [Tc, G, dk] and `v` [Tc, G, dv] of the compressed blocks, whose layout is
 * `tokens.compressed({ l, d })`. The LSE (-inf where no block is visible) is what `select` needs.
 */
export function compressedAttention(
  tape: Tape,
  inputs: AttentionInputs,
  tokens: Sequences,
  sparse: Pick<SparseShape, 'l' | 'd'>,
): AttentionOutput {
  const { out, lse, record } = startCompressed(tape, inputs, tokens, sparse);
  record();
  return { out, lse };
}

/** `compressedAttention` whose backward rule the caller records, with what adds to its gradients. */
export function startCompressed(
  tape: Tape,
  inputs: AttentionInputs,
  tokens: Sequences,
  { l, d }: Pick<SparseShape, 'l' | 'd'>,
): UnrecordedBranch {
  const kernel = tape.device.kernels(kernels);
  return startBranch(tape, inputs, {
    name: 'compressed attention',
    tokens,
    keys: tokens.compressed({ l, d }),
    forward: (given) => kernel.compressed_forward(given, l, d),
    backward: (given) => kernel.compressed_backward(given, l, d),
  });
}
