/** Sliding-window attention: token t sees the keys t-w+1 … t, exactly w of them. */
import { defineKernels } from '../../../device/device.js';
import { UsageError } from '../../../errors.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import type { Sequences } from '../../common/sequences.js';
import { type AttentionInputs, attendBranch, headShape } from '../branch.js';
import { type DenseOptions, denseRefusal, fusedDenseAttention } from '../fused/dense.js';
import { launchers } from './cuda.js';

export const signatures = {
  window_forward: ['struct', 'i64'],
  window_backward: ['struct', 'i64'],
} as const;

const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/**
 * `q` [T, H, dk], `k` [T, G, dk], `v` [T, G, dv] → [T, H, dv]. With `options` the fused kernels compute it where they
 * can: for layers that have only this branch.
 */
export function windowAttention(
  tape: Tape,
  inputs: AttentionInputs,
  sequences: Sequences,
  w: number,
  options: DenseOptions = { fusedFrom: Number.POSITIVE_INFINITY },
): Tensor {
  if (!Number.isSafeInteger(w) || w < 1) throw new UsageError(`w must be a whole number from 1, not ${w}`);
  const heads = headShape('window attention', inputs, sequences, sequences);
  const problem = { heads, dtype: inputs.q.dtype, tokens: sequences };
  if (denseRefusal(problem, tape.device, options) === null) return fusedDenseAttention(tape, inputs, sequences, w);
  const kernel = tape.device.kernels(kernels);
  const { out } = attendBranch(tape, inputs, {
    name: 'window attention',
    tokens: sequences,
    keys: sequences,
    forward: (given) => kernel.window_forward(given, w),
    backward: (given) => kernel.window_backward(given, w),
  });
  return out;
}
