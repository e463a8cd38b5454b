/**
 * Compiles CUDA kernels for the GPU at hand, with NVRTC or else with the nvcc of a CUDA toolkit, into the kernel cache.
 */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { availableParallelism, tmpdir } from 'node:os';
import { dirname, join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Worker } from 'node:worker_threads';
import type { Environment } from '../../environment.js';
import { TrefoilError, UsageError } from '../../errors.js';
import { workerFile } from '../../worker-file.js';
import { type CompileProgress, interruption, KernelCache, kernelKey, sourceWithHeaders } from '../kernel-cache.js';
import koffi from '../koffi.js';
import { LibraryMissing, NVRTC, openLibrary } from './libraries.js';
import type { KernelMacros } from './runtime.js';

const HERE = dirname(fileURLToPath(import.meta.url));

/** A compiler from source to cubin. */
export interface CudaBackend {
  /** Name and version; part of the name of a cache entry. */
  readonly identity: string;
  compile(source: string, flags: readonly string[]): Uint8Array;
}

/** One file to compile. */
export interface KernelRequest {
  readonly source: string;
  readonly macros: KernelMacros;
}

/** Messages to and from a thread of `compileAll` (compile-thread.ts). */
export interface CompileTask {
  readonly source: string;
  readonly flags: readonly string[];
}
export type CompileAnswer = { readonly code: Uint8Array } | { readonly message: string; readonly exitCode: number };

type Native = (...values: unknown[]) => unknown;

/** The run-time compilation library. */
class Nvrtc implements CudaBackend {
  readonly identity: string;
  readonly #create: Native;
  readonly #compile: Native;
  readonly #cubinSize: Native;
  readonly #cubin: Native;
  readonly #logSize: Native;
  readonly #log: Native;
  readonly #destroy: Native;
  readonly #describe: Native;

  constructor(environment: Environment = process.env) {
    const library = openLibrary(NVRTC, environment);
    const status = (name: string, types: readonly string[]) => library.func(name, 'int', [...types]) as Native;
    this.#create = status('nvrtcCreateProgram', ['void *', 'str', 'str', 'int', 'void *', 'void *']);
    this.#compile = status('nvrtcCompileProgram', ['void *', 'int', 'void *']);
    this.#cubinSize = status('nvrtcGetCUBINSize', ['void *', 'void *']);
    this.#cubin = status('nvrtcGetCUBIN', ['void *', 'void *']);
    this.#logSize = status('nvrtcGetProgramLogSize', ['void *', 'void *']);
    this.#log = status('nvrtcGetProgramLog', ['void *', 'void *']);
    this.#destroy = status('nvrtcDestroyProgram', ['void *']);
    this.#describe = library.func('nvrtcGetErrorString', 'str', ['int']) as Native;
    const version = status('nvrtcVersion', ['void *', 'void *']);
    const words = koffi.alloc('int', 2);
    version(words, koffi.address(words) + 4n);
    const [major, minor] = new Int32Array(koffi.view(words, 8));
    koffi.free(words);
    this.identity = `NVRTC ${major}.${minor}`;
  }

  compile(source: string, flags: readonly string[]): Uint8Array {
    const out = koffi.alloc('uint64_t', 1);
    const word = () => new DataView(koffi.view(out, 8)).getBigUint64(0, true);
    const texts = [...flags, '-default-device'].map((flag) => Buffer.from(`${flag}\0`));
    const options = koffi.alloc('uint64_t', Math.max(1, texts.length));
    // Options must stay in place until the compilation ends, so they are in native memory, freed below.
    const natives = texts.map((text) => {
      const memory = koffi.alloc('uint8_t', text.length);
      new Uint8Array(koffi.view(memory, text.length)).set(text);
      return memory;
    });
    new BigUint64Array(koffi.view(options, 8 * Math.max(1, texts.length))).set(natives.map((at) => koffi.address(at)));
    try {
      this.#check(this.#create(out, readFileSync(source, 'utf8'), source, 0, null, null), source);
      const program = word();
      try {
        const status = this.#compile(program, texts.length, options);
        if (status !== 0) {
          const log = this.#text(program, this.#logSize, this.#log);
          throw new UsageError(
            `${this.identity} could not compile ${source}: ${firstError(Buffer.from(log).toString())}`,
          );
        }
        return this.#text(program, this.#cubinSize, this.#cubin);
      } finally {
        new DataView(koffi.view(out, 8)).setBigUint64(0, program, true);
        this.#destroy(out);
      }
    } finally {
      for (const memory of [out, options, ...natives]) koffi.free(memory);
    }
  }

  #text(program: bigint, sizeOf: Native, read: Native): Uint8Array {
    const size = koffi.alloc('uint64_t', 1);
    this.#check(sizeOf(program, size), 'a kernel');
    const bytes = Number(new DataView(koffi.view(size, 8)).getBigUint64(0, true));
    koffi.free(size);
    const memory = koffi.alloc('uint8_t', bytes);
    this.#check(read(program, memory), 'a kernel');
    const copy = new Uint8Array(koffi.view(memory, bytes)).slice();
    koffi.free(memory);
    return copy;
  }

  #check(status: unknown, what: string): void {
    if (status !== 0) throw new UsageError(`${this.identity}: ${what}: ${this.#describe(status)}`);
  }
}

/** The compiler of a CUDA toolkit. */
export class Nvcc implements CudaBackend {
  readonly identity: string;
  readonly #command: string;

  constructor(command: string, version: string) {
    this.#command = command;
    this.identity = version;
  }

  /** The nvcc of CUDA_HOME or PATH; null if there is none. */
  static find(environment: Environment = process.env): Nvcc | null {
    const home = environment['CUDA_HOME'] || environment['CUDA_PATH'];
    for (const command of [...(home ? [join(home, 'bin', 'nvcc')] : []), 'nvcc', '/usr/local/cuda/bin/nvcc']) {
      const answer = spawnSync(command, ['--version'], { encoding: 'utf8' });
      if (answer.status !== 0) continue;
      const version = answer.stdout.match(/release .*/)?.[0] ?? 'of an unknown version';
      return new Nvcc(command, `nvcc ${version}`);
    }
    return null;
  }

  compile(source: string, flags: readonly string[]): Uint8Array {
    const folder = mkdtempSync(join(tmpdir(), 'trefoil-nvcc-'));
    try {
      const path = join(folder, 'kernel.cubin');
      const built = spawnSync(this.#command, ['-cubin', ...flags, source, '-o', path], { encoding: 'utf8' });
      if (built.status !== 0) {
        const log = built.stderr || String(built.error);
        const interrupted = interruption(kernelName(source), built);
        if (interrupted) throw interrupted;
        throw new UsageError(`${this.identity} could not compile ${source}: ${firstError(log)}`);
      }
      return readFileSync(path);
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  }
}

function firstError(log: string): string {
  return (log.split('\n').find((line) => /error/i.test(line)) ?? log.split('\n')[0] ?? '').trim();
}

/** NVRTC, or nvcc if there is no NVRTC, or why there is neither. */
export function tryBackend(environment: Environment = process.env): CudaBackend | LibraryMissing {
  try {
    return findBackend(environment);
  } catch (error) {
    if (error instanceof LibraryMissing) return error;
    throw error;
  }
}

/** NVRTC, or nvcc if there is no NVRTC. Throws `LibraryMissing` if there is neither. */
export function findBackend(environment: Environment = process.env): CudaBackend {
  try {
    return new Nvrtc(environment);
  } catch (error) {
    const nvcc = error instanceof LibraryMissing ? Nvcc.find(environment) : null;
    if (!nvcc) throw error;
    return nvcc;
  }
}

export interface CudaCompilerOptions {
  /** Folder of the cache. */
  readonly cache: string;
  readonly progress?: CompileProgress;
}

export class CudaCompiler {
  /** The GPU architecture that code is generated for: sm_80, sm_90a. */
  readonly target: string;
  readonly #backend: CudaBackend | LibraryMissing;
  readonly #options: CudaCompilerOptions;
  readonly #cache: KernelCache;
  #compiled = 0;

  /** `architecture`: compute capability times ten. `backend`: a compiler, or why there is none. */
  constructor(architecture: number, backend: CudaBackend | LibraryMissing, options: CudaCompilerOptions) {
    // Hopper's own instructions (wgmma, bulk copies) are only in the "a" variant.
    this.target = architecture === 90 ? 'sm_90a' : `sm_${architecture}`;
    this.#backend = backend;
    this.#options = options;
    this.#cache = new KernelCache(options.cache, 'cubin');
  }

  /** The code of a source file with these macros: from the cache, or compiled. Without a compiler any cached one will do. */
  cubin(source: string, macros: KernelMacros = {}): Uint8Array {
    const { key, flags } = this.#entry({ source, macros });
    const backend = this.#backend;
    if (backend instanceof LibraryMissing) {
      const found = this.#cache.find(key, null);
      if (found !== null) return readFileSync(found);
      throw new UsageError(
        `the kernel cache ${this.#cache.folder} lacks ${kernelName(source)} for ${this.target}, and ${backend.message}`,
      );
    }
    return readFileSync(this.#cache.find(key, backend.identity) ?? this.#compile(key, backend, source, flags));
  }

  /** Compiles what the cache lacks, one file per core at a time, each in a thread. Does nothing without a compiler. */
  async compileAll(requests: readonly KernelRequest[]): Promise<void> {
    const backend = this.#backend;
    if (backend instanceof LibraryMissing) return;
    const missing = requests
      .map((request) => ({ source: request.source, ...this.#entry(request) }))
      .filter(({ key }) => this.#cache.find(key, backend.identity) === null);
    if (missing.length === 0) return;
    const total = this.#compiled + missing.length;
    const { progress } = this.#options;
    const file = await workerFile(new URL('./compile-thread.js', import.meta.url));
    const compileInThread = async (): Promise<void> => {
      const worker = new Worker(file, { name: 'trefoil-compile' });
      try {
        for (let next = missing.shift(); next !== undefined; next = missing.shift()) {
          const { key, source, flags } = next;
          progress?.begin(kernelName(source), this.#compiled, total);
          this.#compiled += 1;
          await this.#cache.storeAsync(key, backend.identity, async (path) =>
            writeFileSync(path, await compileIn(worker, { source, flags })),
          );
        }
      } finally {
        missing.length = 0; // after an error no other one is begun
        await worker.terminate();
      }
    };
    try {
      const threads = Math.min(availableParallelism(), missing.length);
      await Promise.all(Array.from({ length: threads }, compileInThread));
    } finally {
      progress?.end();
    }
  }

  /** The cache entry of a request, and the compiler's flags. */
  #entry({ source, macros }: KernelRequest): { readonly key: string; readonly flags: readonly string[] } {
    const defined = Object.entries(macros).map(([name, value]) => `-D${name}=${value}`);
    const flags = ['-std=c++17', `-arch=${this.target}`, `-I${HERE}`, `-I${dirname(source)}`, ...defined.sort()];
    return { key: kernelKey([sourceWithHeaders(source, HERE), this.target, defined.join(' ')]), flags };
  }

  #compile(key: string, backend: CudaBackend, source: string, flags: readonly string[]): string {
    const { progress } = this.#options;
    progress?.begin(kernelName(source), this.#compiled, null);
    try {
      return this.#cache.store(key, backend.identity, (path) => writeFileSync(path, backend.compile(source, flags)));
    } finally {
      this.#compiled += 1;
      progress?.end();
    }
  }
}

function compileIn(worker: Worker, task: CompileTask): Promise<Uint8Array> {
  return new Promise((resolve, reject) => {
    worker.once('error', reject);
    worker.once('message', (answer: CompileAnswer) => {
      worker.off('error', reject);
      if ('code' in answer) resolve(answer.code);
      else reject(new TrefoilError(answer.message, answer.exitCode));
    });
    worker.postMessage(task);
  });
}

/** `ops/rmsnorm` for src/ops/rmsnorm/cuda.cu. */
function kernelName(source: string): string {
  const name = relative(join(HERE, '..', '..'), source);
  return name.startsWith('..') ? source : name.replace(/[\\/]cuda\.cu$/, '');
}
