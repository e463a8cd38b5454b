import { byDtype, strided, wide } from '../../device/cuda/elements.js';
import { type CudaRuntime, f32 } from '../../device/cuda/runtime.js';
import type { Addressable, Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

/** Blocks of `row_dot` that run at once on a multiprocessor. */
const RESIDENT = 8;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE']);
  const shape = (x: Addressable, count: number) => strided(cuda, Math.ceil(count / wide(x)));
  return {
    mul: (a, b, y, count, inner, accumulate) =>
      variant(a!).launch('mul', shape(a!, count), a, b, y, count, inner, accumulate),
    row_dot: (a, b, y, rows, inner, accumulate) => {
      const grid = Math.min(rows, cuda.multiprocessors * RESIDENT);
      variant(a!).launch('row_dot', { grid, block: 256 }, a, b, y, rows, inner, accumulate);
    },
    scale: (x, y, count, factor, accumulate) =>
      variant(x!).launch('scale', shape(x!, count), x, y, count, f32(factor), accumulate),
    exp_forward: (x, y, count) => variant(x!).launch('exp_forward', shape(x!, count), x, y, count),
    log_forward: (x, y, count) => variant(x!).launch('log_forward', shape(x!, count), x, y, count),
    log_backward: (x, dy, dx, count, accumulate) =>
      variant(x!).launch('log_backward', shape(x!, count), x, dy, dx, count, accumulate),
  };
}
