/** RMSNorm over the last dimension: y = x / sqrt(mean(x²) + epsilon) * weight. */
import { defineKernels } from '../../device/device.js';
import type { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { expectFloats, expectShape } from '../common/shapes.js';
import { type Fp8Input, Fp8Matrix, normScale } from '../linear/fp8.js';
import { CUDA_ROWS_PER_PARTIAL, launchers } from './cuda.js';

export const signatures = {
  rmsnorm_forward: ['ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'f32'],
  rmsnorm_backward: ['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** Rows that one partial sum of the weight's gradient covers. */
const ROWS_PER_PARTIAL = { cpu: 256, cuda: CUDA_ROWS_PER_PARTIAL };

/** `x` [rows, dim], `weight` f32 [dim]. */
export function rmsnorm(tape: Tape, x: Tensor, weight: Tensor, epsilon = 1e-5): Tensor {
  return normalise(tape, x, weight, epsilon).y;
}

/**
 * The same in FP8 alone, on a GPU: the layers of its gradient take it. |y| has a bound, so nothing is read for its largest
 * magnitude. `x` is bf16, its sizes multiples of 16.
 */
export function fp8Rmsnorm(tape: Tape, x: Tensor, weight: Tensor, epsilon = 1e-5): Fp8Input {
  const { y, inverseRms } = normalise(tape, x, weight, epsilon, false);
  const source = { kind: 'Normalised', x, inverseRms, weight } as const;
  const layouts = { straight: true, transposed: tape.recording };
  const codes = new Fp8Matrix(tape.device, source, 'e4m3', layouts, normScale(tape.device, weight));
  tape.drop(y);
  return { y, codes };
}

/** Without `computesResult` y is only allocated. */
function normalise(tape: Tape, x: Tensor, weight: Tensor, epsilon: number, computesResult = true) {
  const [rows, dim] = expectFloats('rmsnorm: x', x, [-1, -1]);
  expectShape('rmsnorm: weight', weight, [dim]);
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty([rows, dim], x.dtype);
  const inverseRms = tape.empty([rows]);
  kernel.rmsnorm_forward(x, weight, computesResult ? y : null, inverseRms, rows, dim, epsilon);
  tape.record([x, weight], [y, inverseRms], [x, weight, inverseRms], () => {
    const dy = tape.gradient(y);
    if (!dy) return;
    const dx = tape.gradientTarget(x);
    const dWeight = tape.gradientTarget(weight);
    const partial = Tensor.empty(tape.device, [Math.ceil(rows / ROWS_PER_PARTIAL[tape.device.kind]), dim]);
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
  return { y, inverseRms };
}
