/** The cache folder, and creating folders. */
import { mkdirSync, statSync } from 'node:fs';
import { homedir } from 'node:os';
import { dirname, join } from 'node:path';

/**
 * Creates a folder and its parents; returns true if it did not exist. Throws the system's error. Not
 * `mkdirSync(path, { recursive: true })`, which never returns where a parent refuses (under /proc).
 */
export function ensureFolder(path: string): boolean {
  if (isFolder(path)) return false;
  const parent = dirname(path);
  if (parent !== path) ensureFolder(parent);
  try {
    mkdirSync(path);
    return true;
  } catch (error) {
    // Another process may have created it in between.
    if ((error as NodeJS.ErrnoException).code === 'EEXIST' && isFolder(path)) return false;
    throw error;
  }
}

function isFolder(path: string): boolean {
  return statSync(path, { throwIfNoEntry: false })?.isDirectory() ?? false;
}

/** The folder of everything Trefoil keeps between runs: TREFOIL_CACHE, or `trefoil` in the user's cache folder. */
export function cacheFolder(environment: Readonly<Record<string, string | undefined>>): string {
  // An empty variable counts as unset: a relative folder would follow the working directory.
  return environment['TREFOIL_CACHE'] || join(environment['XDG_CACHE_HOME'] || join(homedir(), '.cache'), 'trefoil');
}
