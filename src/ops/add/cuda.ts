import { byDtype, strided, wide } from '../../device/cuda/elements.js';
import type { CudaRuntime } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE', 'DTYPE_R']);
  return {
    add_forward: (x, r, y, count) =>
      variant(x!, r!).launch('add_forward', strided(cuda, Math.ceil(count / wide(x!))), x, r, y, count),
  };
}
