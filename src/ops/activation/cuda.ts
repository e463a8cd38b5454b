import { byDtype, strided, wide } from '../../device/cuda/elements.js';
import type { CudaRuntime } from '../../device/cuda/runtime.js';
import type { Addressable, Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE']);
  const shape = (x: Addressable, count: number) => strided(cuda, Math.ceil(count / wide(x)));
  return {
    silu_forward: (x, y, count) => variant(x!).launch('silu_forward', shape(x!, count), x, y, count),
    silu_backward: (x, dy, dx, count, accumulate) =>
      variant(x!).launch('silu_backward', shape(x!, count), x, dy, dx, count, accumulate),
    swiglu_forward: (x, y, rows, hidden) =>
      variant(x!).launch('swiglu_forward', shape(x!, rows * hidden), x, y, rows, hidden),
    swiglu_backward: (x, dy, dx, rows, hidden, accumulate) =>
      variant(x!).launch('swiglu_backward', shape(x!, rows * hidden), x, dy, dx, rows, hidden, accumulate),
  };
}
