/** The residual sum y = x + r, whose gradient is passed on without a copy, and the sum in place. */
import { type Device, defineKernels } from '../../device/device.js';
import type { Tape } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';
import { expectFloats, expectShape } from '../common/shapes.js';
import { launchers } from './cuda.js';

export const signatures = {
  add_forward: ['ptr', 'ptr', 'ptr', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** `x` and `r` of one shape and dtype. */
export function add(tape: Tape, x: Tensor, r: Tensor): Tensor {
  expectFloats('add: x', x, x.shape);
  expectShape('add: r', r, x.shape, x.dtype);
  const y = tape.empty(x.shape, x.dtype);
  tape.device.kernels(kernels).add_forward(x, r, y, x.size);
  tape.record([x, r], [y], [], () => {
    const accumulate = (into: Tensor, value: Tensor) => addInto(tape.device, into, value);
    tape.passGradient(y, x, accumulate);
    tape.passGradient(y, r, accumulate);
  });
  return y;
}

/** into += value, number by number; the shapes may differ as long as the sizes agree, and so may the dtypes. */
export function addInto(device: Device, into: Tensor, value: Tensor): void {
  expectFloats('addInto: into', into, into.shape);
  expectFloats('addInto: value', value.reshape(into.shape), into.shape);
  device.kernels(kernels).add_forward(into, value, into, into.size);
}
