/** Creating folders. Not `mkdirSync(path, { recursive: true })`: that loops for ever where a parent refuses (under /proc). */
import { mkdirSync, statSync } from 'node:fs';
import { dirname } from 'node:path';

/** Creates a folder and its parents; true when there was none. Throws the system's error when it cannot. */
export function ensureFolder(path: string): boolean {
  if (isFolder(path)) return false;
  const parent = dirname(path);
  if (parent !== path) ensureFolder(parent);
  try {
    mkdirSync(path);
    return true;
  } catch (error) {
    // Another process may have been faster.
    if ((error as NodeJS.ErrnoException).code === 'EEXIST' && isFolder(path)) return false;
    throw error;
  }
}

function isFolder(path: string): boolean {
  return statSync(path, { throwIfNoEntry: false })?.isDirectory() ?? false;
}
