/** Products, scaling, exponential and logarithm, number by number. */
import { defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import type { Tape } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';
import { expectFloats, expectShape } from '../common/shapes.js';
import { launchers } from './cuda.js';

export const signatures = {
  mul: ['ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64'],
  row_dot: ['ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64'],
  scale: ['ptr', 'ptr', 'i64', 'f32', 'i64'],
  exp_forward: ['ptr', 'ptr', 'i64'],
  log_forward: ['ptr', 'ptr', 'i64'],
  log_backward: ['ptr', 'ptr', 'ptr', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/**
 * `a` times `b`. `b` has the shape of `a`, or its first dimensions: [T, heads] times [T, heads, dv] gives every head of
 * every token its own factor. A `b` of one number is a factor of everything.
 */
export function mul(tape: Tape, a: Tensor, b: Tensor): Tensor {
  expectFloats('mul: a', a, a.shape);
  const isPrefix = b.size === 1 || b.shape.every((size, i) => size === a.shape[i]);
  if (!isPrefix)
    throw new UsageError(
      `mul: b must have the shape of a, its first dimensions, or one number, not [${b.shape.join(', ')}] beside [${a.shape.join(', ')}]`,
    );
  expectShape('mul: b', b, b.shape, a.dtype);
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty(a.shape, a.dtype);
  const inner = b.size === 0 ? 1 : a.size / b.size;
  kernel.mul(a, b, y, a.size, inner, 0);
  tape.record([a, b], [y], [a, b], () => {
    const dy = tape.gradient(y);
    if (!dy) return;
    const da = tape.gradientTarget(a);
    if (da) kernel.mul(dy, b, da.gradient, a.size, inner, Number(da.accumulate));
    const db = tape.gradientTarget(b);
    if (!db) return;
    if (inner === 1) kernel.mul(dy, a, db.gradient, a.size, 1, Number(db.accumulate));
    else kernel.row_dot(dy, a, db.gradient, b.size, inner, Number(db.accumulate));
  });
  return y;
}

/** `x` times a number that is not learned. */
export function scale(tape: Tape, x: Tensor, factor: number): Tensor {
  expectFloats('scale: x', x, x.shape);
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty(x.shape, x.dtype);
  kernel.scale(x, y, x.size, factor, 0);
  tape.record([x], [y], [], () => {
    const dy = tape.gradient(y);
    const dx = dy && tape.gradientTarget(x);
    if (dx) kernel.scale(dy, dx.gradient, x.size, factor, Number(dx.accumulate));
  });
  return y;
}

/** e to the power of every number. */
export function exp(tape: Tape, x: Tensor): Tensor {
  expectFloats('exp: x', x, x.shape);
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty(x.shape, x.dtype);
  kernel.exp_forward(x, y, x.size);
  tape.record([x], [y], [y], () => {
    const dy = tape.gradient(y);
    const dx = dy && tape.gradientTarget(x);
    if (dx) kernel.mul(dy, y, dx.gradient, x.size, 1, Number(dx.accumulate));
  });
  return y;
}

/** The natural logarithm of every number; NaN below 0. */
export function log(tape: Tape, x: Tensor): Tensor {
  expectFloats('log: x', x, x.shape);
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty(x.shape, x.dtype);
  kernel.log_forward(x, y, x.size);
  tape.record([x], [y], [x], () => {
    const dy = tape.gradient(y);
    const dx = dy && tape.gradientTarget(x);
    if (dx) kernel.log_backward(x, dy, dx.gradient, x.size, Number(dx.accumulate));
  });
  return y;
}
