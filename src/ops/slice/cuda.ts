import { byDtype, strided } from '../../device/cuda/elements.js';
import type { CudaRuntime } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE']);
  return {
    slice_forward: (x, y, outer, whole, part, before) =>
      variant(x!).launch('slice_forward', strided(cuda, outer * part), x, y, outer, whole, part, before),
    slice_backward: (dy, dx, outer, whole, part, before, accumulate) =>
      variant(dx!).launch(
        'slice_backward',
        strided(cuda, outer * whole),
        ...[dy, dx, outer, whole, part, before, accumulate],
      ),
  };
}
