import { strided } from '../../device/cuda/elements.js';
import type { CudaRuntime } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

const BYTES_PER_THREAD = 128;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const code = cuda.compile(new URL('./cuda.cu', import.meta.url));
  return {
    checksum_add: (from, bytes, sum) =>
      code.launch('checksum_add', strided(cuda, Math.ceil((bytes + 1) / BYTES_PER_THREAD)), from, bytes, sum),
  };
}
