/** Sliding-window attention: token t sees the keys t-w+1 … t, exactly w of them. */
import { defineKernels } from '../../../device/device.js';
import { UsageError } from '../../../errors.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import type { Sequences } from '../../common/sequences.js';
import { type AttentionInputs, headShape, recordAttention } from '../branch.js';
import { launchers } from './cuda.js';

export const signatures = {
  window_forward: ['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64'],
  window_backward: [
    ...(['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr'] as const),
    ...(['i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64'] as const),
  ],
} as const;

const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** `q` [T, H, dk], `k` [T, G, dk], `v` [T, G, dv] → [T, H, dv]. */
export function windowAttention(tape: Tape, inputs: AttentionInputs, sequences: Sequences, w: number): Tensor {
  const { heads, groups, dk, dv } = headShape('window attention', inputs, sequences, sequences);
  if (!Number.isSafeInteger(w) || w < 1) throw new UsageError(`w must be a whole number from 1, not ${w}`);
  const { q, k, v } = inputs;
  const { offsets, count } = sequences;
  const kernel = tape.device.kernels(kernels);
  const out = tape.empty([sequences.total, heads, dv], q.dtype);
  const lse = tape.empty([sequences.total, heads]);
  kernel.window_forward(q, k, v, offsets, out, lse, count, heads, groups, dk, dv, w);
  recordAttention(tape, inputs, { out, lse }, [], (dOut, { dq, dk: dKeys, dv: dValues, flags }) =>
    kernel.window_backward(
      q,
      k,
      v,
      offsets,
      out,
      lse,
      dOut,
      dq,
      dKeys,
      dValues,
      count,
      heads,
      groups,
      dk,
      dv,
      ...flags,
      w,
    ),
  );
  return out;
}
