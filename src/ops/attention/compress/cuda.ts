import { aligned, byDtype, partialSums, strided, wide } from '../../../device/cuda/elements.js';
import type { CudaCode, CudaRuntime } from '../../../device/cuda/runtime.js';
import type { Addressable, Kernels } from '../../../device/device.js';
import type { signatures } from './op.js';

/** Blocks whose weight gradients one partial sum covers (cuda.cu has the same). */
export const CUDA_BLOCKS_PER_PARTIAL = 16;

const THREADS = 256;
/** Threads of the forward pass, which has few rows: smaller blocks reach more multiprocessors. */
const FORWARD_THREADS = 128;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const source = new URL('./cuda.cu', import.meta.url);
  const single = byDtype(cuda, source, ['DTYPE'], { VECTOR: 1 });
  const wideF32 = byDtype(cuda, source, ['DTYPE'], { VECTOR: 4 });
  const wideBf16 = byDtype(cuda, source, ['DTYPE'], { VECTOR: 8 });
  /** The variant for rows of `columns` numbers of these tensors, and how many numbers it moves at a time. */
  const choose = (columns: number, x: Addressable, ...others: (Addressable | null)[]) => {
    const vector = wide(x);
    if (columns % vector !== 0 || !aligned(x, ...others)) return { code: single(x), vector: 1 };
    return { code: (vector === 8 ? wideBf16 : wideF32)(x), vector };
  };
  const addPartials = (
    code: CudaCode,
    ...[partial, blocks, total, count, accumulate]: [Addressable, number, Addressable, number, number]
  ) => {
    const partials = Math.ceil(blocks / CUDA_BLOCKS_PER_PARTIAL);
    code.launch('add_partials', partialSums(count), partial, partials, total, count, accumulate);
  };
  const overBlocks = (blocks: number, pieces: number) => ({
    grid: [Math.ceil(pieces / THREADS), Math.ceil(blocks / CUDA_BLOCKS_PER_PARTIAL)] as const,
    block: THREADS,
  });
  return {
    compress_forward: (x, weight, y, ...layout) => {
      const [, , , , blocks, , , width] = layout;
      const { code, vector } = choose(width, x!, weight, y);
      const grid = Math.ceil((blocks * width) / vector / FORWARD_THREADS);
      code.launch('compress_forward', { grid, block: FORWARD_THREADS }, x, weight, y, ...layout);
    },
    compress_backward_input: (dy, weight, dx, ...rest) => {
      const [, , , tokens, , , , width] = rest;
      const { code, vector } = choose(width, dy!, weight, dx);
      code.launch('compress_backward_input', strided(cuda, (tokens * width) / vector), dy, weight, dx, ...rest);
    },
    compress_backward_weight: (dy, x, dWeight, partial, ...rest) => {
      const [offsets, blockOffsets, sequences, tokens, blocks, l, d, width, accumulate] = rest;
      const { code, vector } = choose(width, dy!, x, partial);
      const layout = [offsets, blockOffsets, sequences, tokens, blocks, l, d, width] as const;
      code.launch('compress_partial', overBlocks(blocks, (l * width) / vector), dy, x, partial, ...layout);
      addPartials(code, partial!, blocks, dWeight!, l * width, accumulate);
    },
    unfold_forward: (x, position, out, ...rest) => {
      const [, , , , blocks, , , width, groups] = rest;
      const { code } = choose(width / groups, x!, position, out);
      const grid = Math.min(blocks, cuda.multiprocessors * 8);
      code.launch('unfold_forward', { grid, block: THREADS }, x, position, out, ...rest);
    },
    unfold_backward_input: (dOut, dx, ...rest) => {
      const [, , , tokens, , , , width, groups] = rest;
      const { code, vector } = choose(width / groups, dOut!, dx);
      code.launch('unfold_backward_input', strided(cuda, (tokens * width) / vector), dOut, dx, ...rest);
    },
    unfold_backward_position: (dOut, dPosition, partial, ...rest) => {
      const [, , , , blocks, l, , width, groups, accumulate] = rest;
      const { code, vector } = choose(width / groups, dOut!, partial);
      const shape = overBlocks(blocks, (l * width) / vector);
      code.launch('unfold_partial', shape, dOut, partial, blocks, l, width, groups);
      addPartials(code, partial!, blocks, dPosition!, l * width, accumulate);
    },
  };
}
