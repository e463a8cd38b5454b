/** How the selection of blocks runs on a GPU: one kernel, any shape. */
import type { CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Kernels } from '../../../device/device.js';
import { branchCode, branchLaunch, TILE } from '../branch-cuda.js';
import type { signatures } from './op.js';

/** Blocks for each multiprocessor: every one holds the lists of a tile of tokens. */
const BLOCKS = 4;
const ENTRY_BYTES = 8;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  return {
    select_forward: (q, k, lse, offsets, keyOffsets, selected, sequences, heads, groups, dk, ...sparse) => {
      const [, , , count, init, local] = sparse;
      const shape = branchLaunch(cuda, { blocks: BLOCKS });
      const tokens = Math.floor(TILE / (heads / groups));
      const listBytes = cuda.multiprocessors * BLOCKS * tokens * (count - init - local) * ENTRY_BYTES;
      cuda.withScratch(listBytes, (lists) =>
        branchCode(cuda, new URL('./cuda.cu', import.meta.url), q, dk, dk).launch(
          'select_forward',
          shape,
          ...[q, k, lse, offsets, keyOffsets, selected, lists],
          ...[sequences, heads, groups, dk, ...sparse],
        ),
      );
    },
  };
}
