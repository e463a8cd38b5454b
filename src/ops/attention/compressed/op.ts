/** Attention over compressed blocks: token t sees the blocks that end at or before it. Seeing none gives 0. */
import { defineKernels } from '../../../device/device.js';
import type { Tape } from '../../../tensor/tape.js';
import { expectCompressed, type Sequences } from '../../common/sequences.js';
import { type AttentionInputs, type AttentionOutput, headShape, recordAttention } from '../branch.js';
import type { SparseShape } from '../shape.js';
import { launchers } from './cuda.js';

export const signatures = {
  compressed_forward: [
    ...(['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr'] as const),
    ...(['i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64'] as const),
  ],
  compressed_backward: [
    ...(['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr'] as const),
    ...(['i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64'] as const),
  ],
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
  const { heads, groups, dk, dv } = headShape('compressed attention', inputs, sequences, blocks);
  expectCompressed('compressed attention', sequences, blocks, { l, d });
  const { q, k, v } = inputs;
  const { offsets, count } = sequences;
  const kernel = tape.device.kernels(kernels);
  const out = tape.empty([sequences.total, heads, dv], q.dtype);
  const lse = tape.empty([sequences.total, heads]);
  kernel.compressed_forward(q, k, v, offsets, blocks.offsets, out, lse, count, heads, groups, dk, dv, l, d);
  recordAttention(tape, inputs, { out, lse }, [], (dOut, { dq, dk: dKeys, dv: dValues, flags }) =>
    kernel.compressed_backward(
      ...([q, k, v, offsets, blocks.offsets, out, lse, dOut, dq, dKeys, dValues] as const),
      ...([count, heads, groups, dk, dv, ...flags, l, d] as const),
    ),
  );
  return { out, lse };
}
