/** How attention over selected blocks runs on a GPU: one kernel per branch, any shape. */
import type { CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Kernels } from '../../../device/device.js';
import { BranchKernels } from '../branch-cuda.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const branch = new BranchKernels(cuda, new URL('./cuda.cu', import.meta.url), 'selected');
  return {
    // Without `tile`, the tokens that share loads: here always as many as fill a tile.
    selected_forward: (given, selected, lSel, nSel) => branch.forward(given, selected, lSel, nSel),
    selected_backward: (given, selected, lSel, nSel) => branch.backward(given, selected, lSel, nSel),
  };
}
