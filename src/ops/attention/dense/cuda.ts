/** How dense attention runs on a GPU: one kernel per branch, any shape. */
import type { CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Kernels } from '../../../device/device.js';
import { BranchKernels } from '../branch-cuda.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const branch = new BranchKernels(cuda, new URL('./cuda.cu', import.meta.url), 'dense');
  return {
    dense_forward: (given) => branch.forward(given),
    dense_backward: (given) => branch.backward(given),
  };
}
