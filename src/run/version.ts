/** The version of this package, for the files of a run. */
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { readText } from '../files.js';
import { isPlainObject } from '../json-values.js';

/** Looks upward from this file, because sources, the compiled package and bundles lie at different depths. */
export function trefoilVersion(): string {
  for (let folder = dirname(fileURLToPath(import.meta.url)); ; folder = dirname(folder)) {
    const version = versionIn(join(folder, 'package.json'));
    if (version !== undefined) return version;
    if (dirname(folder) === folder) return 'unknown';
  }
}

function versionIn(path: string): string | undefined {
  const parsed: unknown = JSON.parse(readText(path) ?? 'null');
  return isPlainObject(parsed) && parsed['name'] === 'trefoil' ? String(parsed['version']) : undefined;
}
