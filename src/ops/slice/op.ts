/** A part of one dimension, copied; tensors are contiguous. */
import { defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import type { Tape } from '../../tensor/tape.js';
import { elements, type Tensor } from '../../tensor/tensor.js';
import { expectFloats } from '../common/shapes.js';
import { launchers } from './cuda.js';

export const signatures = {
  slice_forward: ['ptr', 'ptr', 'i64', 'i64', 'i64', 'i64'],
  slice_backward: ['ptr', 'ptr', 'i64', 'i64', 'i64', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** `start` to `end` (exclusive) of dimension `axis` of `x`. */
export function slice(tape: Tape, x: Tensor, axis: number, start: number, end: number): Tensor {
  expectFloats('slice: x', x, x.shape);
  const size = x.shape[axis];
  if (size === undefined)
    throw new UsageError(`slice: x has ${x.shape.length} dimensions, numbered from 0, and no ${axis}`);
  if (!(Number.isInteger(start) && Number.isInteger(end) && 0 <= start && start <= end && end <= size))
    throw new UsageError(`slice: ${start} to ${end} is not inside dimension ${axis} of [${x.shape.join(', ')}]`);
  const inner = elements(x.shape.slice(axis + 1));
  const outer = elements(x.shape.slice(0, axis));
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty(x.shape.with(axis, end - start), x.dtype);
  // Numbers of a run that lies together in memory: of x, of y, and before y begins in x.
  const [whole, part, before] = [size * inner, (end - start) * inner, start * inner];
  kernel.slice_forward(x, y, outer, whole, part, before);
  tape.record([x], [y], [], () => {
    const dy = tape.gradient(y);
    const dx = dy && tape.gradientTarget(x);
    if (dx) kernel.slice_backward(dy, dx.gradient, outer, whole, part, before, Number(dx.accumulate));
  });
  return y;
}
