import { byDtype, strided } from '../../device/cuda/elements.js';
import { type CudaRuntime, f32 } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

/** Blocks that run at once on a multiprocessor. */
const RESIDENT = 8;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE', 'DTYPE_SUM']);
  return {
    sum_rows: (x, y, count, width, factor) => {
      const grid = Math.min(Math.ceil(count / width), cuda.multiprocessors * RESIDENT);
      variant(x!, y!).launch('sum_rows', { grid, block: 256 }, x, y, count, width, f32(factor));
    },
    sum_spread: (dy, dx, count, width, factor, accumulate) =>
      variant(dx!, dy!).launch('sum_spread', strided(cuda, count), dy, dx, count, width, f32(factor), accumulate),
  };
}
