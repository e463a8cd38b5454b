import { byDtype } from '../../device/cuda/elements.js';
import type { CudaRuntime } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const code = byDtype(cuda, new URL('./cuda.cu', import.meta.url), []);
  return {
    gradnorm_sums: (records, pieces, partials, sums, tensors, pieceCount) => {
      code().launch('gradnorm_pieces', { grid: pieceCount, block: 256 }, records, pieces, partials);
      code().launch('gradnorm_sums', { grid: 1, block: 1024 }, records, partials, sums, tensors);
    },
  };
}
