/** How the scorer loss runs on a GPU: kernels for any shape, and the backward kernels of the compressed branch twice. */
import { type CudaRuntime, f64 } from '../../../device/cuda/runtime.js';
import type { Addressable, Kernels, StructArgument } from '../../../device/device.js';
import type { AttentionArguments } from '../branch.js';
import { BranchKernels, branchCode } from '../branch-cuda.js';
import type { signatures } from './op.js';

const SOURCE = new URL('./cuda.cu', import.meta.url);
const THREADS = 256;
/** Blocks for each multiprocessor. */
const BLOCKS = 16;
/** Value columns of the pass that `scorer_shared` prepares. */
const COLUMNS = 4;

export function scorerCode(cuda: CudaRuntime, q: Addressable | null, dk: number) {
  return branchCode(cuda, SOURCE, q, dk, dk);
}

export function scorerLaunch(cuda: CudaRuntime) {
  return { grid: cuda.multiprocessors * BLOCKS, block: THREADS };
}

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const compressed = new BranchKernels(cuda, new URL('../compressed/cuda.cu', import.meta.url), 'compressed');
  const shape = scorerLaunch(cuda);
  return {
    scorer_loss_forward: (q, kCmp, lse, mass, offsets, keyOffsets, selected, dImportance, mean, loss, ...rest) => {
      const [losses, sequences, heads, groups, dk, pairs, l, d, block, count, init, local] = rest;
      const code = scorerCode(cuda, q, dk);
      code.launch(
        'scorer_forward',
        shape,
        ...[q, kCmp, lse, mass, offsets, keyOffsets, selected, dImportance, mean, losses],
        ...[sequences, heads, groups, dk, l, d, block, count, init, local],
      );
      code.launch('scorer_mean', { grid: 1, block: THREADS }, losses, offsets, loss, sequences, groups, f64(pairs));
    },
    compressed_backward_scored: (struct, selected, dImportance, mean, shared, tokens, blocks, factor, ...sparse) => {
      const [l, d, block, count, init, local] = sparse;
      const given = struct as unknown as AttentionArguments;
      const { q, k, lse, offsets, keyOffsets, dq, dKeys, sequences, heads, groups, dk } = given;
      compressed.backward(struct, l, d);
      const code = scorerCode(cuda, q, dk);
      const [rows, keys] = [tokens * heads, blocks * groups];
      const bytes = q?.dtype === 'bf16' ? 2 : 4;
      const part = (index: number) => place(shared!, COLUMNS * bytes * index, q?.dtype);
      const [v, dValues, out, dOut] = [part(0), part(keys), part(2 * keys), part(2 * keys + rows)];
      code.launch('scorer_shared', shape, mean, v, out, dOut, rows, keys, f64(factor));
      const pass = { ...given, v, dValues, out, dOut, dv: COLUMNS, accumulateQ: 1, accumulateK: 1, accumulateV: 0 };
      compressed.backward(pass as unknown as StructArgument, l, d);
      const inputs = [q, k, lse, offsets, keyOffsets, selected, dImportance] as const;
      const sizes = [sequences, heads, groups, dk, f64(factor), l, d, block, count, init, local] as const;
      code.launch('scorer_queries', shape, ...inputs, dq, ...sizes);
      code.launch('scorer_keys', shape, ...inputs, dKeys, ...sizes);
    },
  };
}

function place({ pointer }: Addressable, bytes: number, dtype: string | undefined): Addressable {
  return { pointer: pointer + BigInt(bytes), ...(dtype !== undefined && { dtype }) };
}
