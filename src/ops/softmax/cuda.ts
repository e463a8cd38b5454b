import { byDtype } from '../../device/cuda/elements.js';
import type { CudaRuntime } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

/** Blocks that run at once on a multiprocessor. */
const RESIDENT = 8;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE']);
  const shape = (rows: number) => ({ grid: Math.min(rows, cuda.multiprocessors * RESIDENT), block: 256 });
  return {
    softmax_forward: (x, y, rows, width) => variant(x!).launch('softmax_forward', shape(rows), x, y, rows, width),
    softmax_backward: (y, dy, dx, rows, width, accumulate) =>
      variant(y!).launch('softmax_backward', shape(rows), y, dy, dx, rows, width, accumulate),
  };
}
