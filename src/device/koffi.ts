/** koffi (FFI), loaded on first use: programs whose kernels run in WebAssembly need no native code. */
import { createRequire } from 'node:module';
import type koffiModule from 'koffi';
import { UsageError } from '../errors.js';

type Koffi = typeof koffiModule;

let loaded: Koffi | null = null;

function load(): Koffi {
  try {
    loaded = createRequire(import.meta.url)('koffi') as Koffi;
    return loaded;
  } catch (cause) {
    const reason = (cause as Error).message.split('\n')[0];
    throw new UsageError(
      `native kernels and libraries cannot be called (koffi: ${reason}): install the package again with its optional ` +
        'dependencies, or set TREFOIL_KERNELS=wasm',
      { cause },
    );
  }
}

/** Why native code cannot be called; null when it can. */
export function koffiAbsence(): string | null {
  try {
    if (!loaded) load();
    return null;
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    return error.message;
  }
}

export default new Proxy({} as Koffi, { get: (_, name: keyof Koffi) => (loaded ?? load())[name] });
