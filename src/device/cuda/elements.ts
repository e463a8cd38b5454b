/** Helpers for launching elementwise and row-wise kernels (the device side is elements.cuh). */
import type { Addressable } from '../device.js';
import type { CudaCode, CudaRuntime, KernelMacros, LaunchShape } from './runtime.js';

/**
 * Variants of one source file by the dtypes of tensors: with `['DTYPE', 'DTYPE_R']`, `variant(x, r)` is the code compiled
 * with DTYPE = x.dtype and DTYPE_R = r.dtype (a macro named T would clash with other headers). The lookup is cheap enough
 * for every call.
 */
export function byDtype<const Names extends readonly string[]>(
  cuda: CudaRuntime,
  source: URL,
  names: Names,
  macros: KernelMacros = {},
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

/** Threads per block of `strided`. */
const THREADS = 256;
/** Blocks of this size that one multiprocessor runs concurrently. */
const RESIDENT = 8;

/** Launch shape of a grid-stride kernel over `count` items: at most as many blocks as run concurrently. */
export function strided(cuda: CudaRuntime, count: number): LaunchShape {
  return { grid: Math.min(Math.ceil(count / THREADS), cuda.multiprocessors * RESIDENT), block: THREADS };
}

/** Number of elements of a tensor's dtype in 16 bytes. */
export function wide({ dtype }: Addressable): number {
  return dtype === 'bf16' ? 8 : 4;
}

/** Whether every tensor is aligned to 16 bytes. */
export function aligned(...tensors: readonly (Addressable | null)[]): boolean {
  return tensors.every((tensor) => tensor === null || tensor.pointer % 16n === 0n);
}

/** Launch shape of `add_partial_sums` for `count` columns. */
export function partialSums(count: number): LaunchShape {
  return { grid: Math.ceil(count / 32), block: 1024 };
}
