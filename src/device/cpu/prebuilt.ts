/**
 * Kernels of the processor that were compiled before: one library for a platform, in a package of its own that npm installs
 * beside this one (packages/). Its kernels.json holds the key of the sources that it was made from. A library of other
 * sources is never loaded: its functions may take other arguments.
 */
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { kernelKey } from '../kernel-cache.js';
import koffi from '../koffi.js';
import { CODE_FLAGS, missingSets } from './compile.js';
import { kernelName, SOURCE_ROOT, sourcesAndHeaders } from './sources.js';

/**
 * A library that fits these sources and this processor.
 *
 * @opaque
 */
export interface PrebuiltKernels {
  readonly path: string;
  /** Name of the package. */
  readonly name: string;
  readonly compiler: string;
  readonly key: string;
  /** Paths of the sources whose kernels it holds. */
  readonly sources: ReadonlySet<string>;
}

/** kernels.json beside the library. */
export interface PrebuiltManifest {
  /** The hash of the sources and flags. */
  readonly key: string;
  readonly compiler: string;
  /** The hash of the library: a damaged one is not loaded. */
  readonly sha256: string;
}

interface Platform {
  /** Name of the target for zig's clang: the oldest glibc that has all that is needed. */
  readonly target: string;
  readonly processor: string;
  /** Name of the level in `missingSets`. */
  readonly level: string;
}

/** Platforms with a package, by the name of its folder. */
export const PLATFORMS: Readonly<Record<string, Platform>> = {
  'linux-x64': { target: 'x86_64-linux-gnu.2.17', processor: 'x86_64_v3', level: 'x86-64-v3' },
  'linux-arm64': { target: 'aarch64-linux-gnu.2.17', processor: 'baseline', level: 'neon' },
};

/** Flags for `zig c++`. Its libc++ is linked into the library, so that it needs glibc only. */
export function prebuiltFlags(platform: string): string[] {
  const { target, processor } = PLATFORMS[platform];
  // nodelete: as compilerFlags says. zig would add checks of undefined behaviour.
  const own = ['-fno-sanitize=all', '-s', '-Wl,-z,nodelete', '-w'];
  return ['-target', target, `-mcpu=${processor}`, ...CODE_FLAGS, ...own];
}

/** The hash of all that determines the library of a platform, except the compiler. */
export function prebuiltKey(platform: string, files = sourcesAndHeaders()): string {
  const texts = files.flatMap((path) => [kernelName(path), readFileSync(path, 'utf8')]);
  return kernelKey([...prebuiltFlags(platform), ...texts]);
}

/** The library for this machine, or the reason why it cannot be used. `isWished`: packages/ of a checkout counts too. */
export function findPrebuilt(
  isWished: boolean,
): PrebuiltKernels | { readonly absence: string; readonly isFound: boolean } {
  const platform = `${process.platform}-${process.arch}`;
  const name = `@trefoil/${platform}`;
  if (!(platform in PLATFORMS)) return { absence: `there are none for ${platform}`, isFound: false };
  const manifestPath = locate(name, isWished ? join(SOURCE_ROOT, '..', 'packages', platform) : null);
  if (manifestPath === null) return { absence: `the package ${name} is not installed`, isFound: false };
  const refuse = (reason: string) => ({ absence: `the package ${name} is ignored: ${reason}`, isFound: true });
  const path = join(dirname(manifestPath), 'kernels.so');
  const files = sourcesAndHeaders();
  const key = prebuiltKey(platform, files);
  try {
    const manifest = JSON.parse(readFileSync(manifestPath, 'utf8')) as PrebuiltManifest;
    if (manifest.key !== key) return refuse(`it was made from other sources (${manifest.key}, not ${key})`);
    const hash = createHash('sha256').update(readFileSync(path)).digest('hex');
    if (hash !== manifest.sha256) return refuse('kernels.so is damaged');
    const missing = missingSets(PLATFORMS[platform].level);
    if (missing.length > 0) return refuse(`this processor lacks ${missing.join(', ')}`);
    koffi.load(path); // fails with another libc, or where programs may not run
    return { path, name, compiler: manifest.compiler, key, sources: new Set(files) };
  } catch (error) {
    return refuse((error as Error).message.split('\n')[0]);
  }
}

/** The path of kernels.json of a package, or of a folder; null if there is neither. */
function locate(name: string, folder: string | null): string | null {
  const { resolve } = createRequire(import.meta.url);
  for (const request of [`${name}/kernels.json`, ...(folder === null ? [] : [join(folder, 'kernels.json')])])
    try {
      return resolve(request);
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== 'MODULE_NOT_FOUND') throw error;
    }
  return null;
}
