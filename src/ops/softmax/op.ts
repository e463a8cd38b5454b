/** Softmax over the last dimension. */
import { defineKernels } from '../../device/device.js';
import type { Tape } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';
import { expectFloats } from '../common/shapes.js';
import { launchers } from './cuda.js';

export const signatures = {
  softmax_forward: ['ptr', 'ptr', 'i64', 'i64'],
  softmax_backward: ['ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** `x` of any shape; every row of its last dimension sums to 1. */
export function softmax(tape: Tape, x: Tensor): Tensor {
  expectFloats('softmax: x', x, x.shape);
  const width = x.shape.at(-1) ?? 1;
  const rows = width === 0 ? 0 : x.size / width;
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty(x.shape, x.dtype);
  kernel.softmax_forward(x, y, rows, width);
  tape.record([x], [y], [y], () => {
    const dy = tape.gradient(y);
    const dx = dy && tape.gradientTarget(x);
    if (dx) kernel.softmax_backward(y, dy, dx.gradient, rows, width, Number(dx.accumulate));
  });
  return y;
}
