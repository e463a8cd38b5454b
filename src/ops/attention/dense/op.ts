/** Dense causal attention with grouped heads: the baseline that sparse attention is measured against. */
import { defineKernels } from '../../../device/device.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import type { Sequences } from '../../common/sequences.js';
import { type AttentionInputs, attendBranch, headShape } from '../branch.js';
import { type DenseOptions, denseRefusal, fusedDenseAttention } from '../fused/dense.js';
import { launchers } from './cuda.js';

export const signatures = {
  dense_forward: ['struct'],
  dense_backward: ['struct'],
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
  const problem = { heads: shape, dtype: inputs.q.dtype, tokens: sequences };
  if (denseRefusal(problem, tape.device, options) === null) return fusedDenseAttention(tape, inputs, sequences);
  const kernel = tape.device.kernels(kernels);
  const { out } = attendBranch(tape, inputs, {
    name: 'dense attention',
    tokens: sequences,
    keys: sequences,
    forward: (given) => kernel.dense_forward(given),
    backward: (given) => kernel.dense_backward(given),
  });
  return out;
}
