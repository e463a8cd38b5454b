/** How window attention runs on a GPU. */
import type { CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Kernels } from '../../../device/device.js';
import { PlainAttention } from '../branch-cuda.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const plain = new PlainAttention(cuda, new URL('./cuda.cu', import.meta.url), 'window');
  return {
    window_forward: (q, k, v, offsets, out, lse, sequences, heads, groups, dk, dv, w) =>
      plain.forward({ q, k, v, offsets, keyOffsets: offsets, out, lse, sequences, heads, groups, dk, dv }, w),
    window_backward: (
      ...[q, k, v, offsets, out, lse, dOut, dq, dKeys, dValues, sequences, heads, groups, dk, dv, ...rest]
    ) => {
      const [accumulateQ, accumulateK, accumulateV, w] = rest;
      const flags = [accumulateQ, accumulateK, accumulateV] as const;
      const shape = { sequences, heads, groups, dk, dv };
      plain.backward({ q, k, v, offsets, keyOffsets: offsets, out, lse, dOut, dq, dKeys, dValues, ...shape, flags }, w);
    },
  };
}
