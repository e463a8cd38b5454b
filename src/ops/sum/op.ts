/** Sum and mean, over all numbers or over the last dimension. */
import { defineKernels } from '../../device/device.js';
import type { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { expectFloats } from '../common/shapes.js';
import { launchers } from './cuda.js';

export const signatures = {
  sum_rows: ['ptr', 'ptr', 'i64', 'i64', 'f32'],
  sum_spread: ['ptr', 'ptr', 'i64', 'i64', 'f32', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** The numbers that are summed: all numbers, or each row of the last dimension. */
export type SumOver = 'all' | 'last';

/** Numbers of a partial sum over all: fixed, so that the order of the additions is. */
const PARTIAL = 4096;

/** Over all numbers: f32 [1], as a loss is. Over the last dimension: the other dimensions, in the dtype of `x`. */
export function sum(tape: Tape, x: Tensor, over: SumOver = 'all'): Tensor {
  return sums('sum', tape, x, over, 1);
}

/** Like `sum`, divided by the number of addends. */
export function mean(tape: Tape, x: Tensor, over: SumOver = 'all'): Tensor {
  return sums('mean', tape, x, over, 1 / (over === 'all' ? x.size : (x.shape.at(-1) ?? 1)));
}

function sums(name: string, tape: Tape, x: Tensor, over: SumOver, factor: number): Tensor {
  expectFloats(`${name}: x`, x, x.shape);
  const { device } = tape;
  const kernel = device.kernels(kernels);
  const width = over === 'all' ? x.size : (x.shape.at(-1) ?? 1);
  const y = over === 'all' ? tape.empty([1]) : tape.empty(x.shape.slice(0, -1), x.dtype);
  if (width === 0) y.zero();
  else if (over === 'all') {
    const partial = Tensor.empty(device, [Math.ceil(x.size / PARTIAL)]);
    kernel.sum_rows(x, partial, x.size, PARTIAL, 1);
    kernel.sum_rows(partial, y, partial.size, partial.size, factor);
    partial.free();
  } else kernel.sum_rows(x, y, x.size, width, factor);
  tape.record([x], [y], [], () => {
    const dy = tape.gradient(y);
    const dx = dy && tape.gradientTarget(x);
    if (dx) kernel.sum_spread(dy, dx.gradient, x.size, width, factor, Number(dx.accumulate));
  });
  return y;
}
