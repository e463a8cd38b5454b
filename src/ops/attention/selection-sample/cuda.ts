import type { CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Kernels } from '../../../device/device.js';
import type { signatures } from './op.js';

const THREADS = 256;

export const launchers = (cuda: CudaRuntime): Kernels<typeof signatures> => ({
  selection_sample(selected, sample, tokens, width, pairs) {
    const shape = { grid: Math.ceil((2 * pairs * width) / THREADS), block: THREADS };
    cuda
      .compile(new URL('./cuda.cu', import.meta.url))
      .launch('selection_sample', shape, selected, sample, tokens, width, pairs);
  },
});
