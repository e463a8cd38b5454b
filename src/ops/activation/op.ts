/** SiLU, x * sigmoid(x), and SwiGLU, silu(gate) * up. Both keep their input only and compute the sigmoid again. */
import { defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import type { Tape } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';
import { expectFloats } from '../common/shapes.js';
import { launchers } from './cuda.js';

export const signatures = {
  silu_forward: ['ptr', 'ptr', 'i64'],
  silu_backward: ['ptr', 'ptr', 'ptr', 'i64', 'i64'],
  swiglu_forward: ['ptr', 'ptr', 'i64', 'i64'],
  swiglu_backward: ['ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** `x` of any shape. */
export function silu(tape: Tape, x: Tensor): Tensor {
  expectFloats('silu: x', x, x.shape);
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty(x.shape, x.dtype);
  kernel.silu_forward(x, y, x.size);
  tape.record([x], [y], [x], () => {
    const dy = tape.gradient(y);
    const dx = dy && tape.gradientTarget(x);
    if (dx) kernel.silu_backward(x, dy, dx.gradient, x.size, Number(dx.accumulate));
  });
  return y;
}

/** `x` [rows, 2 * hidden], each row the gate and then the up projection -> [rows, hidden]. */
export function swiglu(tape: Tape, x: Tensor): Tensor {
  const [rows, width] = expectFloats('swiglu: x', x, [-1, -1]);
  if (width % 2 !== 0) throw new UsageError(`swiglu: x must have an even number of columns (gate | up), not ${width}`);
  const hidden = width / 2;
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty([rows, hidden], x.dtype);
  kernel.swiglu_forward(x, y, rows, hidden);
  tape.record([x], [y], [x], () => {
    const dy = tape.gradient(y);
    const dx = dy && tape.gradientTarget(x);
    if (dx) kernel.swiglu_backward(x, dy, dx.gradient, rows, hidden, Number(dx.accumulate));
  });
  return y;
}
