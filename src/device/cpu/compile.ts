/**
 * Kernels are source files, compiled once for the machine they run on and kept in a cache. The key of an entry is a
 * hash of the source, its headers, the flags, the compiler and the processor.
 */
import { spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { fileURLToPath } from 'node:url';
import { UsageError } from '../../errors.js';
import { KernelCache, kernelCacheFolder, kernelKey, sourceWithHeaders } from '../kernel-cache.js';

const HERE = dirname(fileURLToPath(import.meta.url));

export interface CompilerOptions {
  /** Folder of the cache; created when missing. */
  readonly cache: string;
  /** Candidates in order; the first that answers `--version` is used. */
  readonly candidates: readonly string[];
  /** Flags behind the common ones: tests compile as other machines do. */
  readonly flags?: readonly string[];
  /** Told before a kernel is compiled: it takes a second or two, once per machine. */
  readonly onCompile?: (source: string) => void;
}

type Environment = Readonly<Record<string, string | undefined>>;

export function defaultCompilerOptions(environment: Environment): CompilerOptions {
  const named = environment['CXX'];
  return { cache: kernelCacheFolder(environment), candidates: named ? [named] : ['g++', 'clang++', 'c++'] };
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
    '-ffp-contract=off', // products and sums are fused where `multiply_add` in simd.h says so, never at a compiler's choice
    '-pthread',
    ...link,
  ];
}

export class KernelCompiler {
  readonly #options: CompilerOptions;
  readonly #cache: KernelCache;
  #compiler: Compiler | null = null;

  constructor(options: CompilerOptions) {
    this.#options = options;
    this.#cache = new KernelCache(options.cache, 'so');
  }

  get compiler(): Compiler {
    this.#compiler ??= findCompiler(this.#options.candidates);
    return this.#compiler;
  }

  /** The path of a shared library built from `source`, from the cache if it is there and whole. */
  library(source: string): string {
    const flags = [...compilerFlags(), ...(this.#options.flags ?? [])];
    const key = this.#key(source, flags);
    return this.#cache.find(key) ?? this.#cache.store(key, (path) => this.#build(source, flags, path));
  }

  #key(source: string, flags: readonly string[]): string {
    const { command, version } = this.compiler;
    return kernelKey([sourceWithHeaders(source, HERE), flags.join(' '), command, version, processorIdentity()]);
  }

  #build(source: string, flags: readonly string[], path: string): void {
    this.#options.onCompile?.(source);
    const built = spawnSync(this.compiler.command, [`-I${HERE}`, ...flags, source, '-o', path], {
      encoding: 'utf8',
      // The compiler's own files too: a disk that is full or read-only is then the cache's, as the message says.
      env: { ...process.env, TMPDIR: this.#options.cache },
    });
    if (built.status !== 0)
      throw this.#compileError(source, built.stderr || String(built.error ?? `it was ended by ${built.signal}`));
  }

  #compileError(source: string, log: string): UsageError {
    if (/no space left/i.test(log)) return this.#cache.error(Object.assign(new Error(log), { code: 'ENOSPC' }));
    if (/read-only file system|permission denied/i.test(log))
      return this.#cache.error(Object.assign(new Error(log), { code: 'EROFS' }));
    const first = log.split('\n').find((line) => /error/i.test(line)) ?? log.split('\n')[0];
    return new UsageError(
      `${this.compiler.command} could not compile ${source}: ${first.trim()} (try another compiler with CXX=clang++)`,
    );
  }
}
