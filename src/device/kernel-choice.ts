/** Where the kernels of the processor come from: compiled on this machine, compiled before, or in WebAssembly. */
import { UsageError } from '../errors.js';
import { type CompilerOptions, defaultCompilerOptions, KernelCompiler } from './cpu/compile.js';
import { findPrebuilt } from './cpu/prebuilt.js';
import type { KernelSource } from './device.js';
import { koffiAbsence } from './koffi.js';

export type KernelWish = 'auto' | KernelSource['kind'];
const WISHES: readonly string[] = ['auto', 'native', 'prebuilt', 'wasm'] satisfies KernelWish[];

export interface KernelChoice {
  readonly kind: KernelSource['kind'];
  /** One line with a remedy if native code was preferred and cannot be had; else null. */
  readonly warning: string | null;
  /** Makes the kernels, or knows the prebuilt ones; for `wasm` it makes none. */
  readonly compiler: KernelCompiler;
}

/**
 * By TREFOIL_KERNELS. `auto` takes compiled kernels where the cache holds all of them, then the package of the platform, then a
 * compiler, and else WebAssembly. Kernels of two libraries are never mixed: their threads would be two pools.
 */
export function chooseKernels(
  environment: Readonly<Record<string, string | undefined>>,
  options: CompilerOptions = defaultCompilerOptions(environment),
): KernelChoice {
  const wish = environment['TREFOIL_KERNELS'] || 'auto';
  if (!WISHES.includes(wish))
    throw new UsageError(`TREFOIL_KERNELS: expected ${WISHES.join(', ')}, not ${JSON.stringify(wish)}`);
  const compiler = new KernelCompiler(options);
  if (wish === 'wasm' || wish === 'native') return { kind: wish, warning: null, compiler };
  const koffi = koffiAbsence();
  const found = koffi === null ? findPrebuilt(wish === 'prebuilt') : { absence: koffi, isFound: true };
  const isPrebuilt = 'path' in found;
  if (wish === 'prebuilt' && !isPrebuilt)
    throw new UsageError(
      `TREFOIL_KERNELS=prebuilt: ${found.absence}; install that of this version, or set TREFOIL_KERNELS=auto`,
    );
  if (wish === 'auto' && koffi === null && isNative(compiler, isPrebuilt))
    return { kind: 'native', warning: null, compiler };
  if (isPrebuilt)
    return { kind: 'prebuilt', warning: null, compiler: new KernelCompiler({ ...options, prebuilt: found }) };
  const ignored = found.isFound ? `${found.absence}, and ` : '';
  const reason = koffi ?? `${ignored}${NO_COMPILER}; TREFOIL_KERNELS=wasm silences this line`;
  const warning = `kernels run in WebAssembly, at about half the speed: ${reason}`;
  return { kind: 'wasm', warning, compiler };
}

const NO_COMPILER =
  'there is no C++ compiler (Debian: apt-get install g++; macOS: xcode-select --install; or name one in CXX)';

/** Whether kernels are compiled here. Beside a prebuilt library only for a full cache; an empty one is seen without looking for a compiler, which takes time. */
function isNative(compiler: KernelCompiler, isPrebuilt: boolean): boolean {
  if (!isPrebuilt && compiler.hasCompiler) return true;
  if (compiler.isCold) return false;
  const { cached, total } = compiler.stock;
  return total > 0 && cached === total;
}
