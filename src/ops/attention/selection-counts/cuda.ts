import type { CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Kernels } from '../../../device/device.js';
import type { signatures } from './op.js';

const ROWS_PER_BLOCK = 4096;

export const launchers = (cuda: CudaRuntime): Kernels<typeof signatures> => ({
  selection_counts(selected, counts, rows, slots) {
    const shape = { grid: Math.ceil(rows / ROWS_PER_BLOCK), block: 256, shared: 4 * (slots + 1) };
    const code = cuda.compile(new URL('./cuda.cu', import.meta.url));
    code.launch('selection_counts', shape, selected, counts, rows, slots, ROWS_PER_BLOCK);
  },
});
