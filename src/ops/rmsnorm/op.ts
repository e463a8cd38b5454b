/** RMSNorm over the last dimension: y = x / sqrt(mean(x²) + epsilon) * weight. */
import { cudaRuntime } from '../../device/cuda/runtime.js';
import { defineKernels } from '../../device/device.js';
import type { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { expectFloats, expectShape } from '../common/shapes.js';
import { Fp8Matrix, Fp8Tensor, type Fp8Writer, normScale } from '../linear/fp8.js';
import { CUDA_ROWS_PER_PARTIAL, launchers, MAX_CODED_COLUMNS, writeNormCodes } from './cuda.js';

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
export function fp8Rmsnorm(tape: Tape, x: Tensor, weight: Tensor, epsilon = 1e-5): Fp8Tensor {
  const { device } = tape;
  const [rows, columns] = x.shape;
  const isLong = columns > MAX_CODED_COLUMNS;
  const { y, inverseRms } = normalise(tape, x, weight, epsilon, isLong);
  const writer: Fp8Writer = {
    rows,
    columns,
    scale: () => normScale(device, weight),
    write: (matrix) => writeNormCodes(cudaRuntime(device)!, { x, weight, inverseRms }, matrix, epsilon),
  };
  const layouts = { straight: true, transposed: tape.recording };
  const codes = isLong
    ? new Fp8Matrix(device, y, 'e4m3', layouts, writer.scale())
    : new Fp8Matrix(device, writer, 'e4m3', layouts);
  return new Fp8Tensor(tape, y, codes);
}

/** Without `computesResult` results are only allocated. */
function normalise(tape: Tape, x: Tensor, weight: Tensor, epsilon: number, computesResult = true) {
  const [rows, dim] = expectFloats('rmsnorm: x', x, [-1, -1]);
  expectShape('rmsnorm: weight', weight, [dim]);
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty([rows, dim], x.dtype);
  const inverseRms = tape.empty([rows]);
  if (computesResult) kernel.rmsnorm_forward(x, weight, y, inverseRms, rows, dim, epsilon);
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
