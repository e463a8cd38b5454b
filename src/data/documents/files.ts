/** From paths, folders and patterns to the list of files to read, in an order that does not depend on the machine. */

import { type BigIntStats, existsSync } from 'node:fs';
import { realpath, stat } from 'node:fs/promises';
import { resolve } from 'node:path';
import { glob, isDynamicPattern } from 'tinyglobby';
import { UsageError } from '../../errors.js';

export interface SourceFile {
  readonly path: string;
  readonly size: number;
  /** Nanoseconds, as text: with the size, the sign that a file is still the one that was tokenised. */
  readonly modified: string;
}

/**
 * The files behind `paths`: in the order given, sorted inside each folder or pattern, each file once however many
 * links lead to it. Names that begin with a dot are left out (so .git is), unless named themselves.
 * `accept` filters what a folder holds; a file named by the user is always taken.
 */
export async function resolveFiles(
  paths: string | readonly string[],
  accept: (path: string) => boolean = () => true,
): Promise<SourceFile[]> {
  const files: SourceFile[] = [];
  const seen = new Set<string>();
  for (const given of typeof paths === 'string' ? [paths] : paths) {
    const expanded = await expand(given, accept);
    if (expanded.length === 0) {
      throw new UsageError(`data.path: ${given} holds no file to read; check the folder or pattern and the file names`);
    }
    for (const path of expanded) {
      const { real, found } = await inspect(path);
      if (seen.has(real) || !found.isFile()) continue;
      seen.add(real);
      files.push(describeFile(path, found));
    }
  }
  return files;
}

/** Says which file is no longer what it was when it was listed. Undefined when all are. */
export async function findChangedFile(files: readonly SourceFile[]): Promise<string | undefined> {
  for (const file of files) {
    if (!existsSync(file.path)) return file.path;
    const now = describeFile(file.path, await stat(file.path, { bigint: true }));
    if (now.size !== file.size || now.modified !== file.modified) return file.path;
  }
  return undefined;
}

async function expand(given: string, accept: (path: string) => boolean): Promise<string[]> {
  const absolute = resolve(given);
  // A file may really be called "notes[1].txt": what exists is never taken as a pattern.
  if (existsSync(absolute)) {
    if (!(await stat(absolute)).isDirectory()) return [absolute];
    const inside = await glob('**/*', { cwd: absolute, absolute: true, expandDirectories: false });
    return inside.filter(accept).sort(byCodeUnit);
  }
  if (!isDynamicPattern(given)) throw new UsageError(`data.path: no such file or folder: ${given}`);
  return (await glob(given, { absolute: true, expandDirectories: false })).sort(byCodeUnit);
}

async function inspect(path: string): Promise<{ real: string; found: BigIntStats }> {
  try {
    return { real: await realpath(path), found: await stat(path, { bigint: true }) };
  } catch (error) {
    throw new UsageError(`data.path: cannot read ${path}: ${(error as Error).message}`, { cause: error });
  }
}

function describeFile(path: string, found: BigIntStats): SourceFile {
  return { path, size: Number(found.size), modified: found.mtimeNs.toString() };
}

/** Not localeCompare: the order must be the same under every locale. */
function byCodeUnit(first: string, second: string): number {
  return first < second ? -1 : first > second ? 1 : 0;
}
