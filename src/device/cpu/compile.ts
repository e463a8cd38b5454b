/**
 * Compiles CPU kernels with the system's C++ compiler, once per machine, into the kernel cache. By default code is generated
 * for this machine's processor. TREFOIL_MARCH names another target, such as x86-64-v3, for a cache that is used on other
 * machines.
 */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import type { Environment } from '../../environment.js';
import { UsageError } from '../../errors.js';
import type { KernelSource } from '../device.js';
import {
  type CompileProgress,
  interruption,
  KernelCache,
  kernelCacheFolder,
  kernelKey,
  sourceWithHeaders,
} from '../kernel-cache.js';
import type { PrebuiltKernels } from './prebuilt.js';
import { CPU_FOLDER, kernelName, kernelSources } from './sources.js';

/** How CPU kernels are compiled. */
export interface CompilerOptions {
  /** Folder of the cache; created if missing. */
  readonly cache: string;
  /** Commands in order of preference; the first that answers `--version` is used. */
  readonly candidates: readonly string[];
  /** Flags after the common ones: tests compile as other machines do. */
  readonly flags?: readonly string[];
  /** Architecture to generate code for, as in `-march=`; defaults to this machine's processor. */
  readonly target?: string;
  /** Kernels of this package that need no compiler; others, such as those of a user, are compiled. */
  readonly prebuilt?: PrebuiltKernels;
  readonly progress?: CompileProgress;
}

export function defaultCompilerOptions(environment: Environment): CompilerOptions {
  const { CXX: named, TREFOIL_MARCH: target } = environment;
  return {
    cache: kernelCacheFolder(environment),
    candidates: named ? [named] : ['g++', 'clang++', 'c++'],
    ...(target && { target: expectTarget(target) }),
  };
}

/** A C++ compiler of this machine. */
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

/** The properties of the processor that generated code depends on: its model and instruction sets. */
export function processorIdentity(): string {
  try {
    const lines = readFileSync('/proc/cpuinfo', 'utf8').split('\n');
    const pick = (key: string) => lines.find((line) => line.startsWith(key))?.replace(/\s+/g, ' ') ?? '';
    return [process.arch, pick('model name'), pick('flags'), pick('Features')].join('|');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw error;
    return [process.arch, process.platform].join('|'); // macOS has no /proc; its machines differ by architecture only
  }
}

/** Instruction sets of the named x86-64 levels that kernels use. Running code without them kills the process. */
const LEVELS: Readonly<Record<string, readonly string[]>> = {
  'x86-64-v3': ['avx2', 'bmi2', 'fma'],
  'x86-64-v4': ['avx2', 'bmi2', 'fma', 'avx512f', 'avx512bw', 'avx512cd', 'avx512dq', 'avx512vl'],
};

/** Those that this processor lacks; none where its instruction sets are not known. */
export function missingSets(target: string): string[] {
  const sets = new Set(processorIdentity().split(/[\s|]+/));
  return sets.has('fpu') ? (LEVELS[target] ?? []).filter((name) => !sets.has(name)) : [];
}

function expectTarget(target: string): string {
  if (!/^[a-z0-9][\w.+-]*$/i.test(target))
    throw new UsageError(`TREFOIL_MARCH: ${JSON.stringify(target)} is not the name of an architecture, as in -march=`);
  const missing = missingSets(target);
  if (missing.length > 0)
    throw new UsageError(`TREFOIL_MARCH: ${target} needs ${missing.join(', ')}, which this processor lacks`);
  return target;
}

/** Flags of every compiler and processor. */
export const CODE_FLAGS: readonly string[] = [
  '-std=c++17',
  '-O3',
  '-fPIC',
  '-shared',
  '-fno-math-errno',
  '-fno-trapping-math',
  '-ffp-contract=off', // fused multiply-add only where `multiply_add` in simd.h asks for it, never by the compiler's choice
  '-pthread',
];

export function compilerFlags(target?: string): string[] {
  const native = process.arch === 'arm64' ? '-mcpu=native' : '-march=native';
  const link =
    process.platform === 'darwin'
      ? ['-undefined', 'dynamic_lookup'] // the runtime's symbols are resolved at load time
      : ['-Wl,-z,nodelete']; // the pool's threads must not lose their code when Node unloads libraries at exit
  return [...CODE_FLAGS, target === undefined ? native : `-march=${target}`, ...link];
}

/** How a compiler process ended. */
interface BuildResult {
  readonly status: number | null;
  readonly signal: string | null;
  readonly stderr: string;
  /** If it could not be started. */
  readonly error?: Error | undefined;
}

/**
 * Compiles C++ kernels and caches them.
 *
 * @opaque
 */
export class KernelCompiler {
  readonly #options: CompilerOptions;
  readonly #flags: readonly string[];
  readonly #cache: KernelCache;
  /** The name of the processor in keys. */
  readonly #processor: string;
  /** Null until it is needed; an error if there is none. */
  #compiler: Compiler | UsageError | null = null;
  #compiled = 0;
  /** At most this many are compiled by this process; null before the first. */
  #total: number | null = null;

  constructor(options: CompilerOptions) {
    this.#options = options;
    this.#flags = [...compilerFlags(options.target), ...(options.flags ?? [])];
    this.#cache = new KernelCache(options.cache, 'so');
    this.#processor = options.target === undefined ? processorIdentity() : process.arch;
  }

  /** Throws if there is none. */
  get compiler(): Compiler {
    const found = this.#findCompiler();
    if (found instanceof UsageError) throw found;
    return found;
  }

  get hasCompiler(): boolean {
    return !(this.#findCompiler() instanceof UsageError);
  }

  /** The path of the shared library of `source`: from the cache, or compiled. Without a compiler any cached one will do. */
  library(source: string): string {
    const { prebuilt } = this.#options;
    if (prebuilt?.sources.has(source)) return prebuilt.path;
    const key = this.#key(source);
    const found = this.#cache.find(key, this.#identity());
    if (found !== null) return found;
    const { progress } = this.#options;
    const identity = `${this.compiler.command} ${this.compiler.version}`;
    if (progress) {
      this.#total ??= kernelSources().filter((one) => this.#cache.find(this.#key(one), identity) === null).length;
      progress.begin(kernelName(source), this.#compiled, this.#total > this.#compiled ? this.#total : null);
    }
    try {
      return this.#cache.store(key, identity, (path) => this.#build(source, path));
    } finally {
      this.#compiled += 1;
      progress?.end();
    }
  }

  /** Kernels of this package, and how many of them are in the cache; without a compiler by any compiler. */
  get stock(): { readonly cached: number; readonly total: number } {
    const sources = kernelSources();
    const cached = sources.filter((source) => this.#cache.find(this.#key(source), this.#identity()) !== null).length;
    return { cached, total: sources.length };
  }

  /** The compiler of the kernels, and for which processor. The hash is that of the runtime, which all kernels need. */
  get source(): Omit<KernelSource, 'isFused'> {
    const { prebuilt } = this.#options;
    if (prebuilt) return { kind: 'prebuilt', name: `${prebuilt.compiler} in ${prebuilt.name}`, hash: prebuilt.key };
    const name = `${this.#identity() ?? 'the cache'} for ${this.#options.target ?? 'this processor'}`;
    return { kind: 'native', name, hash: this.#key(join(CPU_FOLDER, 'runtime.cpp')) };
  }

  /** Whether no kernel has been compiled yet. */
  get isCold(): boolean {
    return this.#cache.isEmpty;
  }

  /**
   * Compiles every kernel that the cache lacks, one per core at a time, for machines that have no compiler and for commands that
   * need most kernels; `isNeeded` leaves some out by name, such as `ops/rope`. SIGINT and SIGTERM end the compilation with an
   * error. Returns the number of kernels.
   */
  async compileAll(isNeeded: (kernel: string) => boolean = () => true): Promise<number> {
    const sources = kernelSources().filter((source) => isNeeded(kernelName(source)));
    const missing = sources.filter((source) => this.#cache.find(this.#key(source), this.#identity()) === null);
    const total = missing.length;
    const { progress } = this.#options;
    const running = new Set<ChildProcess>();
    const interrupt = (signal: NodeJS.Signals) => {
      for (const child of running) child.kill(signal);
    };
    const compileNext = async (): Promise<void> => {
      for (let source = missing.shift(); source !== undefined; source = missing.shift()) {
        const { command, version } = this.compiler;
        progress?.begin(kernelName(source), total - missing.length - 1, total);
        const one = source;
        await this.#cache.storeAsync(this.#key(one), `${command} ${version}`, (path) =>
          this.#buildAsync(one, path, running),
        );
      }
    };
    process.on('SIGINT', interrupt).on('SIGTERM', interrupt);
    try {
      await Promise.all(Array.from({ length: availableParallelism() }, compileNext));
    } finally {
      missing.length = 0; // after an error no other one is begun
      process.off('SIGINT', interrupt).off('SIGTERM', interrupt);
      progress?.end();
    }
    return sources.length;
  }

  #findCompiler(): Compiler | UsageError {
    if (this.#compiler === null)
      try {
        this.#compiler = findCompiler(this.#options.candidates);
      } catch (error) {
        if (!(error instanceof UsageError)) throw error;
        this.#compiler = error;
      }
    return this.#compiler;
  }

  /** Null without a compiler. */
  #identity(): string | null {
    const found = this.#findCompiler();
    return found instanceof UsageError ? null : `${found.command} ${found.version}`;
  }

  #key(source: string): string {
    return kernelKey([sourceWithHeaders(source, CPU_FOLDER), this.#flags.join(' '), this.#processor]);
  }

  #build(source: string, path: string): void {
    const built = spawnSync(this.compiler.command, this.#arguments(source, path), {
      encoding: 'utf8',
      env: this.#environment(),
    });
    this.#expectBuilt(source, built);
  }

  async #buildAsync(source: string, path: string, running: Set<ChildProcess>): Promise<void> {
    const child = spawn(this.compiler.command, this.#arguments(source, path), {
      stdio: ['ignore', 'ignore', 'pipe'],
      env: this.#environment(),
    });
    running.add(child);
    const ended = new Promise<Omit<BuildResult, 'stderr'>>((resolve) => {
      child.once('error', (error) => resolve({ status: null, signal: null, error }));
      child.once('close', (status, signal) => resolve({ status, signal }));
    });
    const [end, stderr] = await Promise.all([ended, text(child.stderr)]);
    running.delete(child);
    this.#expectBuilt(source, { ...end, stderr });
  }

  #arguments(source: string, path: string): string[] {
    return [`-I${CPU_FOLDER}`, ...this.#flags, source, '-o', path];
  }

  /** The compiler's temporary files are in the cache too: an error of a full or read-only disk then names the right folder. */
  #environment(): NodeJS.ProcessEnv {
    return { ...process.env, TMPDIR: this.#options.cache };
  }

  #expectBuilt(source: string, { status, signal, stderr, error }: BuildResult): void {
    if (status === 0) return;
    throw (
      interruption(kernelName(source), { status, signal }) ??
      this.#compileError(source, stderr || String(error ?? `it was killed by ${signal}`))
    );
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
