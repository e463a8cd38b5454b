/** Where the kernels of the processor come from: compiled on this machine, or in WebAssembly. */
import { UsageError } from '../errors.js';
import { defaultCompilerOptions, KernelCompiler } from './cpu/compile.js';
import { koffiAbsence } from './koffi.js';

export type KernelWish = 'auto' | 'native' | 'wasm';
const WISHES: readonly string[] = ['auto', 'native', 'wasm'];

export interface KernelChoice {
  readonly kind: 'native' | 'wasm';
  /** One line with a remedy if native kernels were preferred and cannot be had; else null. */
  readonly warning: string | null;
}

const native: KernelChoice = { kind: 'native', warning: null };

/**
 * By TREFOIL_KERNELS. `auto` takes native kernels where there is a compiler, or a cache that holds all of them, and else
 * WebAssembly. `compiler` is asked about both.
 */
export function chooseKernels(
  environment: Readonly<Record<string, string | undefined>>,
  compiler?: KernelCompiler,
): KernelChoice {
  const wish = environment['TREFOIL_KERNELS'] || 'auto';
  if (!WISHES.includes(wish))
    throw new UsageError(`TREFOIL_KERNELS: expected ${WISHES.join(', ')}, not ${JSON.stringify(wish)}`);
  if (wish === 'wasm') return { kind: 'wasm', warning: null };
  if (wish === 'native') return native;
  const reason = nativeAbsence(compiler ?? new KernelCompiler(defaultCompilerOptions(environment)));
  if (reason === null) return native;
  return {
    kind: 'wasm',
    warning: `kernels run in WebAssembly, at about half the speed: ${reason}; TREFOIL_KERNELS=wasm silences this line`,
  };
}

function nativeAbsence(compiler: KernelCompiler): string | null {
  const koffi = koffiAbsence();
  if (koffi !== null) return koffi;
  if (compiler.hasCompiler) return null;
  const { cached, total } = compiler.stock;
  if (total > 0 && cached === total) return null;
  return 'there is no C++ compiler (Debian: apt-get install g++; macOS: xcode-select --install; or name one in CXX)';
}
