import { aligned, byDtype, partialSums, wide } from '../../device/cuda/elements.js';
import { type CudaCode, type CudaRuntime, f32 } from '../../device/cuda/runtime.js';
import type { Addressable, Kernels } from '../../device/device.js';
import type { Fp8Matrix } from '../linear/fp8.js';
import type { signatures } from './op.js';

/** Rows that one partial sum of the weight's gradient covers at least; a block of the backward pass makes one. */
export const CUDA_ROWS_PER_PARTIAL = 32;

/** Numbers of a row that one warp holds in its registers; a longer row gets more warps, up to MAX_WARPS. */
const NUMBERS_PER_WARP = 1024;
const MAX_WARPS = 16;
const SMALLEST_BLOCK = 256;
/** Registers of a thread for what it holds of a row in the backward pass with which three blocks still run at once. */
const REGISTERS_FOR_THREE = 60;
/** Many more blocks than run at once: the last ones then end close together. */
const MAX_FORWARD_BLOCKS = 64;

/** The longest rows whose codes are written as they are normalised: four of them are in a warp's registers. */
export const MAX_CODED_COLUMNS = 2048;
/** Rows of a block by the length of rows: their codes are in shared memory. */
const codedRows = (columns: number) => (columns <= 1024 ? 64 : 32);

interface Variant {
  readonly code: CudaCode;
  /** Threads of a block, and the rows it takes at a time. */
  readonly block: number;
  readonly rows: number;
  /** Blocks of the backward pass that a multiprocessor runs at once. */
  readonly resident: number;
}

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const source = new URL('./cuda.cu', import.meta.url);
  const variants = new Map<string, (x: Addressable) => CudaCode>();
  const compiled = (x: Addressable, vectors: number, warps: number, resident: number) => {
    const key = `${vectors} ${warps} ${resident}`;
    let variant = variants.get(key);
    if (!variant) {
      variant = byDtype(cuda, source, ['DTYPE'], { VECTORS: vectors, WARPS: warps, RESIDENT: resident });
      variants.set(key, variant);
    }
    return variant(x);
  };
  const choose = (x: Addressable, dim: number, isAligned: boolean): Variant => {
    const numbers = wide(x);
    if (!isAligned || dim % numbers !== 0 || dim > NUMBERS_PER_WARP * MAX_WARPS)
      return { code: compiled(x, 0, 1, 1), block: SMALLEST_BLOCK, rows: 1, resident: 3 };
    let warps = 1;
    while (dim > NUMBERS_PER_WARP * warps) warps *= 2;
    const vectors = Math.max(1, Math.ceil(dim / (32 * warps * numbers)));
    const block = Math.max(SMALLEST_BLOCK, 32 * warps);
    // Three rows as they lie in memory, and sums for the weight.
    const registers = vectors * (3 * 4 + numbers);
    const resident = block > SMALLEST_BLOCK ? 1 : registers <= REGISTERS_FOR_THREE ? 3 : 2;
    return { code: compiled(x, vectors, warps, resident), block, rows: block / (32 * warps), resident };
  };
  return {
    rmsnorm_forward: (x, weight, y, inverseRms, rows, dim, epsilon) => {
      const { code, block, rows: together } = choose(x!, dim, aligned(x, weight, y));
      const grid = Math.min(Math.ceil(rows / together), cuda.multiprocessors * MAX_FORWARD_BLOCKS);
      code.launch('rmsnorm_forward', { grid, block }, x, weight, y, inverseRms, rows, dim, f32(epsilon));
    },
    rmsnorm_backward: (
      ...[x, weight, inverseRms, dy, dx, dWeight, partial, rows, dim, accumulateDx, accumulateWeight]
    ) => {
      const { code, block, rows: together, resident } = choose(x!, dim, aligned(x, weight, dy, dx));
      // One round of blocks with equally many rows, and fewer only where the rows do not do for it.
      const blocks = cuda.multiprocessors * resident;
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

/** The normalised rows of x bf16 in codes (fp8.cu), and their `inverseRms`; a bound is in the scale. */
export function writeNormCodes(
  cuda: CudaRuntime,
  { x, weight, inverseRms }: Record<'x' | 'weight' | 'inverseRms', Addressable>,
  matrix: Fp8Matrix,
  epsilon: number,
): void {
  const { rows, columns, scale } = matrix;
  const together = codedRows(columns);
  const macros = { VECTORS: Math.ceil(columns / 256), ROWS: together };
  const shape = { grid: Math.ceil(rows / together), block: 256, shared: columns * together };
  const into = [matrix.straight && matrix.rowMajor, matrix.transposed && matrix.columnMajor];
  cuda
    .compile(new URL('./fp8.cu', import.meta.url), macros)
    .launch('rmsnorm_codes', shape, x, weight, scale, inverseRms, ...into, rows, columns, f32(epsilon));
}
