/** From paths, folders and patterns to the list of files to read, in an order that does not depend on the machine. */

import { type BigIntStats, existsSync } from 'node:fs';
import { realpath, stat } from 'node:fs/promises';
import { resolve } from 'node:path';
import { glob, isDynamicPattern } from 'tinyglobby';
import { UsageError } from '../../errors.js';

/** A file that was found but is not read, and why. */
export interface SkippedFile {
  readonly path: string;
  readonly reason: string;
}

/** How many files of a corpus were read and skipped. */
export interface FileReport {
  /** Names of files that are binary. */
  readonly skipped: string[];
  /** Names of files with invalid UTF-8, and how many sequences became U+FFFD. */
  readonly replaced: { file: string; count: number }[];
}

export interface FoundFiles {
  readonly files: SourceFile[];
  readonly skipped: SkippedFile[];
}

export interface SourceFile {
  readonly path: string;
  readonly size: number;
  /** Time of change in nanoseconds, as text. With the size it identifies the content. */
  readonly modified: string;
}

/**
 * The files at `paths`: in the order given, sorted inside each folder or pattern, each file once however many links lead
 * to it. Names that begin with a dot are ignored (so .git is), unless the user names them. `accept` filters the files of a
 * folder; a file or pattern that the user names is always taken. Files of a folder that are text but no prose are left out.
 * Empty files are skipped.
 */
export async function resolveFiles(
  paths: string | readonly string[],
  accept: (path: string) => boolean = () => true,
): Promise<FoundFiles> {
  const files: SourceFile[] = [];
  const skipped: SkippedFile[] = [];
  const seen = new Set<string>();
  for (const given of typeof paths === 'string' ? [paths] : paths) {
    const { taken, refused } = await expand(given, accept);
    for (const path of refused) skipped.push({ path, reason: isProse(path) ? 'its name' : 'not prose' });
    if (taken.length === 0) {
      throw new UsageError(`data.path: ${given} holds no file to read; check the folder or pattern and the file names`);
    }
    for (const path of taken) {
      const { real, found } = await inspect(path);
      if (seen.has(real) || !found.isFile()) continue;
      seen.add(real);
      if (found.size === 0n) skipped.push({ path, reason: 'empty' });
      else files.push(describeFile(path, found));
    }
  }
  if (files.length === 0) throw new UsageError(`data.path: only empty files in ${[paths].flat().join(', ')}`);
  return { files, skipped };
}

/** Whether a file still has the size and time that it was listed with. */
export async function isUnchanged({ path, size, modified }: SourceFile): Promise<boolean> {
  if (!existsSync(path)) return false;
  const now = describeFile(path, await stat(path, { bigint: true }));
  return now.size === size && now.modified === modified;
}

/** Generated text that repeats itself: a model of a folder of code would learn little else. Binary files show when they are read. */
const NOT_PROSE =
  /\.(svg|map|lock|min\.(js|mjs|cjs|css))$|(^|[/\\])(package-lock|npm-shrinkwrap)\.json$|pnpm-lock\.yaml$|go\.sum$/i;

function isProse(path: string): boolean {
  return !NOT_PROSE.test(path);
}

async function expand(
  given: string,
  accept: (path: string) => boolean,
): Promise<{ taken: string[]; refused: string[] }> {
  const absolute = resolve(given);
  // A file may really be called "notes[1].txt": what exists is never taken as a pattern.
  if (existsSync(absolute)) {
    if (!(await stat(absolute)).isDirectory()) return { taken: [absolute], refused: [] };
    const inside = await glob('**/*', { cwd: absolute, absolute: true, expandDirectories: false });
    inside.sort(byCodeUnit);
    const isTaken = (path: string) => isProse(path) && accept(path);
    return { taken: inside.filter(isTaken), refused: inside.filter((path) => !isTaken(path)) };
  }
  if (!isDynamicPattern(given)) throw new UsageError(`data.path: no such file or folder: ${given}`);
  const found = await glob(given, { absolute: true, expandDirectories: false });
  return { taken: found.sort(byCodeUnit), refused: [] };
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
