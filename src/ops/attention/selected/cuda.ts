/** How attention over selected blocks runs on a GPU: one kernel per branch, any shape. */
import type { CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Kernels } from '../../../device/device.js';
import type { AttentionArguments } from '../branch.js';
import { BranchKernels } from '../branch-cuda.js';
import { scorerCode, scorerLaunch } from '../scorer-loss/cuda.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const branch = new BranchKernels(cuda, new URL('./cuda.cu', import.meta.url), 'selected');
  return {
    // Without `tile`, the tokens that share loads: here always as many as fill a tile.
    selected_forward: (struct, selected, lSel, nSel, _tile, mass) => {
      branch.forward(struct, selected, lSel, nSel);
      if (!mass) return;
      const { q, k, lse, offsets, sequences, heads, groups, dk } = struct as unknown as AttentionArguments;
      const inputs = [q, k, lse, offsets, selected, mass, sequences, heads, groups, dk, lSel, nSel] as const;
      scorerCode(cuda, q, dk).launch('scorer_mass', scorerLaunch(cuda), ...inputs);
    },
    selected_backward: (given, selected, lSel, nSel) => branch.backward(given, selected, lSel, nSel),
  };
}
