import { aligned, byDtype, partialSums, wide } from '../../device/cuda/elements.js';
import { type CudaCode, type CudaRuntime, f32 } from '../../device/cuda/runtime.js';
import type { Addressable, Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

/** Rows that one partial sum of the weight's gradient covers at least; a block of the backward pass makes one. */
export const CUDA_ROWS_PER_PARTIAL = 32;

/** Numbers of a row that one warp holds in its registers; a longer row gets more warps, up to MOST_WARPS. */
const NUMBERS_PER_WARP = 1024;
const MOST_WARPS = 16;
const SMALLEST_BLOCK = 256;
/** Blocks of the smallest size that a multiprocessor runs at once in the backward pass (cuda.cu has the same). */
const RESIDENT = 3;
/** Many more blocks than run at once: the last ones then end close together. */
const MOST_FORWARD_BLOCKS = 64;

interface Variant {
  readonly code: CudaCode;
  /** Threads of a block, and the rows it takes at a time. */
  readonly block: number;
  readonly rows: number;
}

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const source = new URL('./cuda.cu', import.meta.url);
  const variants = new Map<string, (x: Addressable) => CudaCode>();
  const compiled = (x: Addressable, vectors: number, warps: number) => {
    const key = `${vectors} ${warps}`;
    let variant = variants.get(key);
    if (!variant) {
      variant = byDtype(cuda, source, ['DTYPE'], { VECTORS: vectors, WARPS: warps });
      variants.set(key, variant);
    }
    return variant(x);
  };
  const choose = (x: Addressable, dim: number, isAligned: boolean): Variant => {
    const numbers = wide(x);
    if (!isAligned || dim % numbers !== 0 || dim > NUMBERS_PER_WARP * MOST_WARPS)
      return { code: compiled(x, 0, 1), block: SMALLEST_BLOCK, rows: 1 };
    let warps = 1;
    while (dim > NUMBERS_PER_WARP * warps) warps *= 2;
    const code = compiled(x, Math.max(1, Math.ceil(dim / (32 * warps * numbers))), warps);
    const block = Math.max(SMALLEST_BLOCK, 32 * warps);
    return { code, block, rows: block / (32 * warps) };
  };
  return {
    rmsnorm_forward: (x, weight, y, inverseRms, rows, dim, epsilon) => {
      const { code, block, rows: together } = choose(x!, dim, aligned(x, weight, y));
      const grid = Math.min(Math.ceil(rows / together), cuda.multiprocessors * MOST_FORWARD_BLOCKS);
      code.launch('rmsnorm_forward', { grid, block }, x, weight, y, inverseRms, rows, dim, f32(epsilon));
    },
    rmsnorm_backward: (
      ...[x, weight, inverseRms, dy, dx, dWeight, partial, rows, dim, accumulateDx, accumulateWeight]
    ) => {
      const { code, block, rows: together } = choose(x!, dim, aligned(x, weight, dy, dx));
      // One round of blocks with equally many rows, and fewer only where the rows do not do for it.
      const blocks = cuda.multiprocessors * (block > SMALLEST_BLOCK ? 1 : RESIDENT);
      const span = together * Math.ceil(Math.max(CUDA_ROWS_PER_PARTIAL, rows / blocks) / together);
      const partials = Math.ceil(rows / span);
      const sums = dWeight && partial;
      code.launch(
        'rmsnorm_backward',
        { grid: partials, block },
        ...[x, weight, inverseRms, dy, dx, sums, rows, dim, accumulateDx, span],
      );
      if (dWeight) code.launch('rmsnorm_weight', partialSums(dim), partial, partials, dWeight, dim, accumulateWeight);
    },
  };
}
