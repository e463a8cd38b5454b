/** Folders that appear whole: built under another name, then renamed. */

import { randomBytes } from 'node:crypto';
import { readdirSync, renameSync, rmSync, statSync } from 'node:fs';
import { unlink } from 'node:fs/promises';
import { hostname } from 'node:os';
import { dirname, join } from 'node:path';
import { TrefoilError } from '../../errors.js';
import { ensureFolder, errorCode, fsyncDir } from '../../files.js';
import { pidExists } from '../../process-identity.js';

/** A partial folder whose owner is gone is kept this long: another machine may have the same host name. */
const ABANDONED_AFTER_MS = 10 * 60_000;

/** A name beside `target` that identifies the machine and process that build it. */
export function partialName(target: string): string {
  return `${target}.partial-${hostname()}-${process.pid}-${randomBytes(4).toString('hex')}`;
}

export function isPartialName(name: string): boolean {
  return /\.partial-.+-\d+-[0-9a-f]{8}$/.test(name);
}

/** Runs `build` in a new partial folder beside `target`, which the caller renames. Removes the folder on failure. */
export async function buildAside(target: string, build: (folder: string) => Promise<void>): Promise<string> {
  const folder = partialName(target);
  try {
    ensureFolder(folder);
  } catch (error) {
    throw cannotWrite(folder, error as Error);
  }
  try {
    await build(folder);
    return folder;
  } catch (error) {
    rmSync(folder, { recursive: true, force: true });
    // Errors of reading carry their own message; one with a bare code comes from writing here.
    const isOwn = error instanceof TrefoilError || (error as NodeJS.ErrnoException).code === undefined;
    throw isOwn ? error : cannotWrite(folder, error as Error);
  }
}

function cannotWrite(folder: string, cause: Error): TrefoilError {
  const remedy = 'free space, or choose another place (TREFOIL_CACHE moves the cache)';
  return new TrefoilError(`cannot write ${folder}: ${cause.message}; ${remedy}`, undefined, { cause });
}

/** Renames a finished folder and forces its files' names and the new name to disk. */
export function renameDurably(from: string, to: string): void {
  fsyncDir(from);
  renameSync(from, to);
  fsyncDir(dirname(to));
}

/** Removes a folder; its files several at a time, because it takes a while to free what memory holds of a large file. */
export async function removeFolder(folder: string): Promise<void> {
  const files = readdirSync(folder, { withFileTypes: true }).filter((entry) => entry.isFile());
  await Promise.all(files.map(({ name }) => unlink(join(folder, name))));
  rmSync(folder, { recursive: true, force: true });
}

/** Removes partial folders in `root` that dead processes of this machine left. */
export function removeAbandoned(root: string): void {
  for (const name of listFolder(root)) {
    const owner = /\.partial-(.+)-(\d+)-[0-9a-f]{8}$/.exec(name);
    if (owner === null || owner[1] !== hostname() || pidExists(Number(owner[2]))) continue;
    const folder = join(root, name);
    if (Date.now() - lastChange(folder) > ABANDONED_AFTER_MS) discard(folder);
  }
}

/** Removes a folder after renaming it: of several processes that try, the rename lets one through. */
export function discard(folder: string): void {
  const aside = partialName(join(dirname(folder), 'removed'));
  try {
    renameSync(folder, aside);
  } catch (error) {
    if (errorCode(error) === 'ENOENT') return;
    throw error;
  }
  rmSync(aside, { recursive: true, force: true });
}

/** The newest change in a folder; now, if it is being removed. */
function lastChange(folder: string): number {
  const paths = [folder, ...listFolder(folder).map((name) => join(folder, name))];
  return Math.max(...paths.map((path) => statSync(path, { throwIfNoEntry: false })?.mtimeMs ?? Date.now()));
}

/** The names in a folder; none if it does not exist. */
export function listFolder(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch (error) {
    if (['ENOENT', 'ENOTDIR'].includes(errorCode(error) ?? '')) return [];
    throw error;
  }
}
