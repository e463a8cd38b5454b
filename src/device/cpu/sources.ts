/** The sources of the CPU kernels, which lie beside the modules of their operations, in the tree and in the package. */
import { existsSync, readdirSync } from 'node:fs';
import { dirname, join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';

/** The folder of the device's sources and headers. */
export const CPU_FOLDER = dirname(fileURLToPath(import.meta.url));
/** The folder of all sources. */
export const SOURCE_ROOT = join(CPU_FOLDER, '..', '..');

/** The sources of all CPU kernels; none if this file was bundled into another program, away from them. */
export function kernelSources(): string[] {
  return kernelFiles(/(^|[\\/])cpu\.cpp$/);
}

/** The same with all headers. */
export function sourcesAndHeaders(): string[] {
  return kernelFiles(/(^|[\\/])cpu\.cpp$|\.h$/);
}

function kernelFiles(pattern: RegExp): string[] {
  const runtime = join(CPU_FOLDER, 'runtime.cpp');
  if (!existsSync(runtime)) return [];
  const names = readdirSync(SOURCE_ROOT, { recursive: true, encoding: 'utf8' });
  const found = names.filter((name) => pattern.test(name) && !/(^|[\\/])testing[\\/]/.test(name)).sort();
  return [runtime, ...found.map((name) => join(SOURCE_ROOT, name))];
}

/** `ops/rmsnorm` for src/ops/rmsnorm/cpu.cpp. */
export function kernelName(source: string): string {
  const name = relative(SOURCE_ROOT, source);
  return name.startsWith('..') ? source : name.replace(/[\\/]cpu\.cpp$/, '');
}
