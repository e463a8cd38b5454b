/**
 * Compiled kernels on disk. The name of an entry consists of three hashes: of everything that determines the code (source,
 * headers, flags, processor), of the compiler, and of the file itself. A truncated or damaged file is recognised before it
 * is loaded, and built again. Without a compiler an entry of any compiler is used, so a cache that was filled on one machine
 * works in an image that has none. Processes may build an entry at the same time: each writes a temporary file and
 * renames it.
 *
 * Entries are executed. A folder or file that another user could have written is refused (SECURITY.md).
 */
import { createHash } from 'node:crypto';
import {
  accessSync,
  chmodSync,
  constants,
  existsSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import type { Environment } from '../environment.js';
import { ExitCode, TrefoilError, UsageError } from '../errors.js';
import { cacheFolder, ensureFolder, othersWith } from '../files.js';

/** The folder of compiled kernels. */
export function kernelCacheFolder(environment: Environment): string {
  return join(cacheFolder(environment), 'kernels');
}

/** The hash of all that determines the code of a kernel. */
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

/** Notified while kernels are compiled. */
export interface CompileProgress {
  /**
   * A compilation begins. `compiled`: kernels compiled by this process so far. `total`: how many it may compile at most;
   * null if unknown. Another one may still be running.
   */
  begin(kernel: string, compiled: number, total: number | null): void;
  /** All that began have ended, successfully or not. */
  end(): void;
}

/** The error of a compilation that a signal ended; null if none did. Exit codes above 128 are those of a shell. */
export function interruption(
  kernel: string,
  { signal, status }: { signal: string | null; status: number | null },
): TrefoilError | null {
  const byCode: Readonly<Record<number, string>> = { 130: 'SIGINT', 143: 'SIGTERM' };
  const name = signal ?? byCode[status ?? 0];
  if (name !== 'SIGINT' && name !== 'SIGTERM') return null;
  return new TrefoilError(
    `interrupted (${name}) while compiling ${kernel}; kernels compiled before are kept, so the next start continues here`,
    ExitCode.signalled,
  );
}

export class KernelCache {
  readonly folder: string;
  readonly #extension: string;

  constructor(folder: string, extension: string) {
    this.folder = folder;
    this.#extension = extension;
  }

  /** Whether there is any entry. */
  get isEmpty(): boolean {
    return this.#names('').length === 0;
  }

  /** The path of an undamaged entry of this compiler, with null of any compiler; null if there is none. */
  find(key: string, compiler: string | null): string | null {
    const names = this.#names(compiler === null ? `${key}.` : `${key}.${compilerHash(compiler)}.`);
    if (names.length > 0) expectOwned(this.folder);
    for (const name of names) {
      const path = join(this.folder, name);
      try {
        if (name === `${name.split('.', 2).join('.')}.${contentHash(path)}.${this.#extension}`) {
          expectOwned(path);
          return path;
        }
        rmSync(path, { force: true }); // damaged: never loaded, built again
      } catch (error) {
        if (error instanceof UsageError) throw error;
        // ENOENT: another process found the same damage and removed it first.
        if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw this.error(error);
      }
    }
    return null;
  }

  /** Creates an entry: `build` writes the file whose path it gets. */
  store(key: string, compiler: string, build: (path: string) => void): string {
    const aside = this.#prepare(key);
    try {
      build(aside);
      return this.#keep(aside, key, compiler);
    } catch (error) {
      throw this.#refusal(error);
    } finally {
      rmSync(aside, { force: true });
    }
  }

  /** Same as `store`, for a build that does not block the event loop. */
  async storeAsync(key: string, compiler: string, build: (path: string) => Promise<void>): Promise<string> {
    const aside = this.#prepare(key);
    try {
      await build(aside);
      return this.#keep(aside, key, compiler);
    } catch (error) {
      throw this.#refusal(error);
    } finally {
      rmSync(aside, { force: true });
    }
  }

  /** Checks the folder, and returns the path of a temporary file in it. */
  #prepare(key: string): string {
    try {
      // Explicit modes: with umask 002 the group could write.
      if (ensureFolder(this.folder)) chmodSync(this.folder, 0o755);
      accessSync(this.folder, constants.W_OK);
    } catch (error) {
      throw this.error(error);
    }
    expectOwned(this.folder);
    return join(this.folder, `.building-${key}-${process.pid}.${this.#extension}`);
  }

  /** Makes a temporary file an entry. */
  #keep(aside: string, key: string, compiler: string): string {
    chmodSync(aside, 0o755);
    const name = `${key}.${compilerHash(compiler)}.${contentHash(aside)}.${this.#extension}`;
    const path = join(this.folder, name);
    renameSync(aside, path);
    return path;
  }

  #refusal(error: unknown): TrefoilError {
    return error instanceof TrefoilError ? error : this.error(error);
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

  #names(prefix: string): string[] {
    try {
      return readdirSync(this.folder).filter(
        (name) => name.startsWith(prefix) && name.endsWith(`.${this.#extension}`) && !name.startsWith('.'),
      );
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === 'ENOENT') return [];
      throw this.error(error);
    }
  }
}

/** Refuses what another user than this one or root owns or can write. */
function expectOwned(path: string): void {
  const others = othersWith(path);
  if (others === null) return;
  throw new UsageError(
    `the kernel cache ${path} ${others}, and its files are executed: if you trust its files run \`chmod go-w ${path}\` ` +
      '(or chown it), otherwise delete it, or set TREFOIL_CACHE to a folder of your own',
  );
}

function compilerHash(compiler: string): string {
  return createHash('sha256').update(compiler).digest('hex').slice(0, 8);
}

function contentHash(path: string): string {
  if (statSync(path).size === 0) return 'empty';
  return createHash('sha256').update(readFileSync(path)).digest('hex').slice(0, 32);
}
