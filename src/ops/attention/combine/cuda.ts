import { byDtype, strided, wide } from '../../../device/cuda/elements.js';
import type { CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Addressable, Kernels } from '../../../device/device.js';
import type { signatures } from './op.js';

const WARP = 32;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE']);
  const shape = (x: Addressable, count: number) => strided(cuda, Math.ceil(count / wide(x)));
  return {
    combine_forward: (gates, cmp, sel, win, out, rows, size) =>
      variant(cmp!).launch('combine_forward', shape(cmp!, rows * size), ...[gates, cmp, sel, win, out, rows, size]),
    combine_backward_gates: (dOut, cmp, sel, win, dGates, rows, size, accumulate) => {
      let team = 1;
      while (team < WARP && team * wide(dOut!) < size) team *= 2;
      variant(dOut!).launch(
        'combine_backward_gates',
        strided(cuda, rows * team),
        ...[dOut, cmp, sel, win, dGates, rows, size, team, accumulate],
      );
    },
    combine_backward_branch: (dOut, gates, dBranch, b, rows, size, accumulate) =>
      variant(dOut!).launch(
        'combine_backward_branch',
        shape(dOut!, rows * size),
        ...[dOut, gates, dBranch, b, rows, size, accumulate],
      ),
  };
}
