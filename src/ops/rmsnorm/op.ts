/** RMSNorm over the last dimension: y = x / sqrt(mean(x²) + epsilon) * weight. */
import { defineKernels } from '../../device/device.js';
import type { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { expectShape } from '../shapes.js';

const kernels = defineKernels(import.meta.url, {
  rmsnorm_forward: ['ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'f32'],
  rmsnorm_backward: ['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64', 'i64'],
});

const ROWS_PER_PARTIAL = 256;

/** `x` [rows, dim], `weight` [dim]. */
export function rmsnorm(tape: Tape, x: Tensor, weight: Tensor, epsilon = 1e-5): Tensor {
  const [rows, dim] = expectShape('rmsnorm: x', x, [-1, -1]);
  expectShape('rmsnorm: weight', weight, [dim]);
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty([rows, dim]);
  const inverseRms = tape.empty([rows]);
  kernel.rmsnorm_forward(x, weight, y, inverseRms, rows, dim, epsilon);
  tape.record([x, weight], [y, inverseRms], [x, weight, inverseRms], () => {
    const dy = tape.gradient(y);
    if (!dy) return;
    const dx = tape.gradientTarget(x);
    const dWeight = tape.gradientTarget(weight);
    const partial = Tensor.empty(tape.device, [Math.ceil(rows / ROWS_PER_PARTIAL), dim]);
    kernel.rmsnorm_backward(
      x,
      weight,
      inverseRms,
      dy,
      dx?.gradient ?? null,
      dWeight?.gradient ?? null,
      partial,
      rows,
      dim,
      Number(dx?.accumulate ?? false),
      Number(dWeight?.accumulate ?? false),
    );
    partial.free();
  });
  return y;
}
