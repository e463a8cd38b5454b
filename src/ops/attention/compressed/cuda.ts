/** How attention over compressed blocks runs on a GPU. */
import type { CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Kernels } from '../../../device/device.js';
import { PlainAttention } from '../branch-cuda.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const plain = new PlainAttention(cuda, new URL('./cuda.cu', import.meta.url), 'compressed');
  return {
    compressed_forward: (q, k, v, offsets, keyOffsets, out, lse, sequences, heads, groups, dk, dv, l, d) =>
      plain.forward({ q, k, v, offsets, keyOffsets, out, lse, sequences, heads, groups, dk, dv }, l, d),
    compressed_backward: (
      ...[q, k, v, offsets, keyOffsets, out, lse, dOut, dq, dKeys, dValues, sequences, heads, groups, dk, dv, ...rest]
    ) => {
      const [accumulateQ, accumulateK, accumulateV, l, d] = rest;
      const flags = [accumulateQ, accumulateK, accumulateV] as const;
      const shape = { sequences, heads, groups, dk, dv };
      plain.backward({ q, k, v, offsets, keyOffsets, out, lse, dOut, dq, dKeys, dValues, ...shape, flags }, l, d);
    },
  };
}
