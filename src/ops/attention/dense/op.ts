/** Dense causal attention with grouped heads: the baseline that sparse attention is measured against. */
import { defineKernels } from '../../../device/device.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import type { Sequences } from '../../common/sequences.js';
import { type AttentionInputs, headShape, recordAttention } from '../branch.js';
import { type DenseOptions, denseRefusal, fusedDenseAttention } from '../fused/dense.js';
import { launchers } from './cuda.js';

export const signatures = {
  dense_forward: ['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64', 'i64', 'i64'],
  dense_backward: [
    ...(['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr'] as const),
    ...(['i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64'] as const),
  ],
} as const;

const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** `q` [T, H, dk], `k` [T, G, dk], `v` [T, G, dv] → [T, H, dv]. */
export function denseAttention(
  tape: Tape,
  inputs: AttentionInputs,
  sequences: Sequences,
  options: DenseOptions = {},
): Tensor {
  const shape = headShape('dense attention', inputs, sequences, sequences);
  const { heads, groups, dk, dv } = shape;
  const { q, k, v } = inputs;
  if (denseRefusal({ heads: shape, dtype: q.dtype, tokens: sequences }, tape.device, options) === null)
    return fusedDenseAttention(tape, inputs, sequences);
  const { offsets, count } = sequences;
  const kernel = tape.device.kernels(kernels);
  const out = tape.empty([sequences.total, heads, dv], q.dtype);
  const lse = tape.empty([sequences.total, heads]);
  kernel.dense_forward(q, k, v, offsets, out, lse, count, heads, groups, dk, dv);
  recordAttention(tape, inputs, { out, lse }, [], (dOut, { dq, dk: dKeys, dv: dValues, flags }) =>
    kernel.dense_backward(q, k, v, offsets, out, lse, dOut, dq, dKeys, dValues, count, heads, groups, dk, dv, ...flags),
  );
  return out;
}
