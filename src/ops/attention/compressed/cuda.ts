/** How attention over compressed blocks runs on a GPU: one kernel per branch, any shape. */
import type { CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Kernels } from '../../../device/device.js';
import { BranchKernels } from '../branch-cuda.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const branch = new BranchKernels(cuda, new URL('./cuda.cu', import.meta.url), 'compressed');
  return {
    compressed_forward: (given, l, d) => branch.forward(given, l, d),
    compressed_backward: (given, l, d) => branch.backward(given, l, d),
  };
}
