/** How attention over selected blocks runs on a GPU. */
import type { CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Kernels } from '../../../device/device.js';
import { PlainAttention } from '../branch-cuda.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const plain = new PlainAttention(cuda, new URL('./cuda.cu', import.meta.url), 'selected');
  return {
    // The last argument, how many tokens share loads, is left out: here always as many as fill a tile.
    selected_forward: (...[q, k, v, selected, offsets, out, lse, sequences, heads, groups, dk, dv, block, count]) => {
      const shape = { sequences, heads, groups, dk, dv };
      plain.forward({ q, k, v, offsets, keyOffsets: offsets, out, lse, ...shape }, selected, block, count);
    },
    selected_backward: (
      ...[q, k, v, selected, offsets, out, lse, dOut, dq, dKeys, dValues, sequences, heads, groups, dk, dv, ...rest]
    ) => {
      const [accumulateQ, accumulateK, accumulateV, block, count] = rest;
      const flags = [accumulateQ, accumulateK, accumulateV] as const;
      const given = { q, k, v, offsets, keyOffsets: offsets, out, lse, dOut, dq, dKeys, dValues };
      plain.backward({ ...given, sequences, heads, groups, dk, dv, flags }, selected, block, count);
    },
  };
}
