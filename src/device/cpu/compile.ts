/**
 * Kernels are source files, compiled once for the machine they run on. The cache is addressed by content: the key is
 * a hash of the source, its headers, the flags, the compiler and the processor; the file name also holds the hash of
 * the library itself, so a truncated or damaged entry is recognised before it is loaded, and rebuilt.
 */
import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { accessSync, constants, readdirSync, readFileSync, renameSync, rmSync, statSync } from 'node:fs';
import { homedir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { UsageError } from '../../errors.js';
import { ensureFolder } from '../../folders.js';

const HERE = dirname(fileURLToPath(import.meta.url));

export interface CompilerOptions {
  /** Folder of the cache; created when missing. */
  readonly cache: string;
  /** Candidates in order; the first that answers `--version` is used. */
  readonly candidates: readonly string[];
  /** Told before a kernel is compiled: it takes a second or two, once per machine. */
  readonly onCompile?: (source: string) => void;
}

type Environment = Readonly<Record<string, string | undefined>>;

export function defaultCompilerOptions(environment: Environment): CompilerOptions {
  // Empty counts as unset: a relative folder would follow the working directory.
  const base =
    environment['TREFOIL_CACHE'] || join(environment['XDG_CACHE_HOME'] || join(homedir(), '.cache'), 'trefoil');
  const named = environment['CXX'];
  return { cache: join(base, 'kernels'), candidates: named ? [named] : ['g++', 'clang++', 'c++'] };
}

export interface Compiler {
  readonly command: string;
  readonly version: string;
}

export function findCompiler(candidates: readonly string[]): Compiler {
  for (const command of candidates) {
    const answer = spawnSync(command, ['--version'], { encoding: 'utf8' });
    if (answer.status === 0) return { command, version: answer.stdout.split('\n')[0].trim() };
  }
  throw new UsageError(
    `no C++ compiler found (tried ${candidates.join(', ')}): install one (Debian: apt-get install g++; macOS: ` +
      'xcode-select --install) or name it in the environment variable CXX',
  );
}

/** The processor as far as generated code depends on it: its model and instruction sets. */
export function processorIdentity(): string {
  try {
    const lines = readFileSync('/proc/cpuinfo', 'utf8').split('\n');
    const pick = (key: string) => lines.find((line) => line.startsWith(key))?.replace(/\s+/g, ' ') ?? '';
    return [process.arch, pick('model name'), pick('flags'), pick('Features')].join('|');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw error;
    return [process.arch, process.platform].join('|'); // no /proc outside Linux: macOS machines differ by arch alone
  }
}

export function compilerFlags(): string[] {
  const native = process.arch === 'arm64' ? '-mcpu=native' : '-march=native';
  const link =
    process.platform === 'darwin'
      ? ['-undefined', 'dynamic_lookup'] // the runtime's symbols are resolved at load time
      : ['-Wl,-z,nodelete']; // the pool's threads must not lose their code when Node unloads libraries at exit
  return [
    '-std=c++17',
    '-O3',
    native,
    '-fPIC',
    '-shared',
    '-fno-math-errno',
    '-fno-trapping-math',
    '-pthread',
    ...link,
  ];
}

export class KernelCompiler {
  readonly #options: CompilerOptions;
  #compiler: Compiler | null = null;
  #headers: string | null = null;

  constructor(options: CompilerOptions) {
    this.#options = options;
  }

  get compiler(): Compiler {
    this.#compiler ??= findCompiler(this.#options.candidates);
    return this.#compiler;
  }

  /** The path of a shared library built from `source`, from the cache if it is there and whole. */
  library(source: string, extraFlags: readonly string[] = []): string {
    const flags = [...compilerFlags(), ...extraFlags];
    const key = this.#key(source, flags);
    return this.#cached(key) ?? this.#build(source, flags, key);
  }

  #key(source: string, flags: readonly string[]): string {
    this.#headers ??= readdirSync(HERE)
      .filter((name) => name.endsWith('.h'))
      .sort()
      .map((name) => readFileSync(join(HERE, name), 'utf8'))
      .join('\n');
    const { command, version } = this.compiler;
    const hash = createHash('sha256');
    for (const part of [
      readFileSync(source, 'utf8'),
      this.#headers,
      flags.join(' '),
      command,
      version,
      processorIdentity(),
    ])
      hash.update(part).update('\0');
    return hash.digest('hex').slice(0, 32);
  }

  #cached(key: string): string | null {
    let names: string[];
    try {
      names = readdirSync(this.#options.cache).filter((name) => name.startsWith(`${key}.`) && name.endsWith('.so'));
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === 'ENOENT') return null;
      throw this.#cacheError(error);
    }
    for (const name of names) {
      const path = join(this.#options.cache, name);
      try {
        if (name === `${key}.${contentHash(path)}.so`) return path;
        rmSync(path, { force: true }); // damaged: never loaded, built again
      } catch (error) {
        // Gone: another process found the same damage and removed it first.
        if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw this.#cacheError(error);
      }
    }
    return null;
  }

  #build(source: string, flags: readonly string[], key: string): string {
    const { cache } = this.#options;
    try {
      ensureFolder(cache);
      accessSync(cache, constants.W_OK);
    } catch (error) {
      throw this.#cacheError(error);
    }
    // Built aside and renamed: two processes may compile the same kernel at once, and neither sees half a file.
    this.#options.onCompile?.(source);
    const aside = join(cache, `.building-${key}-${process.pid}.so`);
    try {
      const built = spawnSync(this.compiler.command, [`-I${HERE}`, ...flags, source, '-o', aside], {
        encoding: 'utf8',
        // The compiler's own files too: a disk that is full or read-only is then the cache's, as the message says.
        env: { ...process.env, TMPDIR: cache },
      });
      if (built.status !== 0)
        throw this.#compileError(source, built.stderr || String(built.error ?? `it was ended by ${built.signal}`));
      const path = join(cache, `${key}.${contentHash(aside)}.so`);
      renameSync(aside, path);
      return path;
    } catch (error) {
      if (error instanceof UsageError) throw error;
      throw this.#cacheError(error);
    } finally {
      rmSync(aside, { force: true });
    }
  }

  #compileError(source: string, log: string): UsageError {
    if (/no space left/i.test(log)) return this.#cacheError(Object.assign(new Error(log), { code: 'ENOSPC' }));
    if (/read-only file system|permission denied/i.test(log))
      return this.#cacheError(Object.assign(new Error(log), { code: 'EROFS' }));
    const first = log.split('\n').find((line) => /error/i.test(line)) ?? log.split('\n')[0];
    return new UsageError(
      `${this.compiler.command} could not compile ${source}: ${first.trim()} (try another compiler with CXX=clang++)`,
    );
  }

  #cacheError(cause: unknown): UsageError {
    const { code, message } = cause as NodeJS.ErrnoException;
    const { cache } = this.#options;
    const remedy = 'set TREFOIL_CACHE to a folder that can be written';
    if (code === 'ENOSPC')
      return new UsageError(`the kernel cache ${cache} is on a full disk: free some space or ${remedy}`, { cause });
    if (code === 'EACCES' || code === 'EROFS' || code === 'EPERM')
      return new UsageError(`the kernel cache ${cache} cannot be written: ${remedy}`, { cause });
    return new UsageError(`the kernel cache ${cache} cannot be used (${code ?? message}): ${remedy}`, { cause });
  }
}

function contentHash(path: string): string {
  return statSync(path).size === 0
    ? 'empty'
    : createHash('sha256').update(readFileSync(path)).digest('hex').slice(0, 32);
}
