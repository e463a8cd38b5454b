/** What the launchers of kernels over rows and numbers share (the device side is elements.cuh). */
import type { Addressable } from '../device.js';
import type { CudaCode, CudaRuntime, LaunchShape, Macros } from './runtime.js';

/**
 * The variants of one source file by the dtypes of tensors: with `['DTYPE', 'DTYPE_R']`, `variant(x, r)` is the code
 * compiled with DTYPE = x.dtype and DTYPE_R = r.dtype (a macro called T would meet the T of other headers). The lookup
 * costs next to nothing, so a launcher may make it on every call.
 */
export function byDtype<const Names extends readonly string[]>(
  cuda: CudaRuntime,
  source: URL,
  names: Names,
  macros: Macros = {},
): (...tensors: { [I in keyof Names]: Addressable }) => CudaCode {
  const compiled = new Map<string, CudaCode>();
  return (...tensors) => {
    const dtypes = tensors.map(({ dtype }) => dtype ?? 'f32');
    const key = dtypes.join();
    let code = compiled.get(key);
    if (!code) {
      code = cuda.compile(source, { ...macros, ...Object.fromEntries(names.map((name, i) => [name, dtypes[i]])) });
      compiled.set(key, code);
    }
    return code;
  };
}

/** Threads of the blocks that `strided` gives. */
const THREADS = 256;
/** Blocks of so many threads that a multiprocessor runs at once. */
const RESIDENT = 8;

/** For kernels whose grid walks `count` pieces of work in strides: no more blocks than run at once. */
export function strided(cuda: CudaRuntime, count: number): LaunchShape {
  return { grid: Math.min(Math.ceil(count / THREADS), cuda.multiprocessors * RESIDENT), block: THREADS };
}

/** How many numbers of a tensor's dtype fill 16 bytes. */
export function wide({ dtype }: Addressable): number {
  return dtype === 'bf16' ? 8 : 4;
}

/** Whether 16-byte accesses are possible from the start of every tensor. */
export function aligned(...tensors: readonly (Addressable | null)[]): boolean {
  return tensors.every((tensor) => tensor === null || tensor.pointer % 16n === 0n);
}

/** The shape in which `add_partial_sums` covers `count` columns. */
export function partialSums(count: number): LaunchShape {
  return { grid: Math.ceil(count / 32), block: 1024 };
}
