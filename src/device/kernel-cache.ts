/**
 * Compiled kernels on disk, addressed by content: the key is a hash of everything that went into a kernel, and the file
 * name also holds the hash of the file itself, so a truncated or damaged entry is recognised before it is loaded, and
 * built again. Two processes may build one entry at once: each writes aside and renames, and neither sees half a file.
 */
import { createHash } from 'node:crypto';
import { accessSync, constants, existsSync, readdirSync, readFileSync, renameSync, rmSync, statSync } from 'node:fs';
import { homedir } from 'node:os';
import { dirname, join } from 'node:path';
import { UsageError } from '../errors.js';
import { ensureFolder } from '../folders.js';

type Environment = Readonly<Record<string, string | undefined>>;

/** The folder of compiled kernels: TREFOIL_CACHE, else the user's cache folder. */
export function kernelCacheFolder(environment: Environment): string {
  // Empty counts as unset: a relative folder would follow the working directory.
  const base =
    environment['TREFOIL_CACHE'] || join(environment['XDG_CACHE_HOME'] || join(homedir(), '.cache'), 'trefoil');
  return join(base, 'kernels');
}

/** A key of all that decides what a kernel becomes. */
export function kernelKey(parts: readonly string[]): string {
  const hash = createHash('sha256');
  for (const part of parts) hash.update(part).update('\0');
  return hash.digest('hex').slice(0, 32);
}

/**
 * The text of a kernel source and of every header it includes with quotes, each once. Headers are searched where the
 * compiler searches: beside the file that includes them, then in `folder`. Headers that are in neither place are left
 * to the compiler to report.
 */
export function sourceWithHeaders(source: string, folder: string): string {
  const texts = new Map<string, string>();
  const add = (path: string): void => {
    if (texts.has(path)) return;
    const text = readFileSync(path, 'utf8');
    texts.set(path, text);
    for (const [, header] of text.matchAll(/^\s*#\s*include\s+"([^"]+)"/gm)) {
      const found = [join(dirname(path), header), join(folder, header)].find((candidate) => existsSync(candidate));
      if (found !== undefined) add(found);
    }
  };
  add(source);
  return [...texts.values()].join('\0');
}

export class KernelCache {
  readonly folder: string;
  readonly #extension: string;

  constructor(folder: string, extension: string) {
    this.folder = folder;
    this.#extension = extension;
  }

  /** The path of a whole entry, or null. */
  find(key: string): string | null {
    let names: string[];
    try {
      names = readdirSync(this.folder).filter(
        (name) => name.startsWith(`${key}.`) && name.endsWith(`.${this.#extension}`),
      );
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === 'ENOENT') return null;
      throw this.error(error);
    }
    for (const name of names) {
      const path = join(this.folder, name);
      try {
        if (name === this.#nameOf(key, path)) return path;
        rmSync(path, { force: true }); // damaged: never loaded, built again
      } catch (error) {
        // Gone: another process found the same damage and removed it first.
        if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw this.error(error);
      }
    }
    return null;
  }

  /** Makes the entry: `build` writes the file it is given the path of. */
  store(key: string, build: (path: string) => void): string {
    try {
      ensureFolder(this.folder);
      accessSync(this.folder, constants.W_OK);
    } catch (error) {
      throw this.error(error);
    }
    const aside = join(this.folder, `.building-${key}-${process.pid}.${this.#extension}`);
    try {
      build(aside);
      const path = join(this.folder, this.#nameOf(key, aside));
      renameSync(aside, path);
      return path;
    } catch (error) {
      if (error instanceof UsageError) throw error;
      throw this.error(error);
    } finally {
      rmSync(aside, { force: true });
    }
  }

  error(cause: unknown): UsageError {
    const { code, message } = cause as NodeJS.ErrnoException;
    const remedy = 'set TREFOIL_CACHE to a folder that can be written';
    if (code === 'ENOSPC')
      return new UsageError(`the kernel cache ${this.folder} is on a full disk: free some space or ${remedy}`, {
        cause,
      });
    if (code === 'EACCES' || code === 'EROFS' || code === 'EPERM')
      return new UsageError(`the kernel cache ${this.folder} cannot be written: ${remedy}`, { cause });
    return new UsageError(`the kernel cache ${this.folder} cannot be used (${code ?? message}): ${remedy}`, { cause });
  }

  #nameOf(key: string, path: string): string {
    const content =
      statSync(path).size === 0 ? 'empty' : createHash('sha256').update(readFileSync(path)).digest('hex').slice(0, 32);
    return `${key}.${content}.${this.#extension}`;
  }
}
