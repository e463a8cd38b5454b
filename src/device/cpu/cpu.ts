/** The CPU as a device: native memory, and C++ kernels called through FFI. */
import { availableParallelism, cpus, freemem } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { OutOfMemory, UsageError } from '../../errors.js';
import {
  type Addressable,
  type ArgumentKind,
  type Device,
  expectDevice,
  type KernelModule,
  type KernelSource,
  type Kernels,
  type LaunchList,
  type MemoryUse,
  type RecordingDevice,
  type Signature,
  type Signatures,
  type StructArgument,
} from '../device.js';
import koffi from '../koffi.js';
import { MemoryPool } from '../pool.js';
import { type CompilerOptions, defaultCompilerOptions, KernelCompiler } from './compile.js';
import { LaunchRecorder } from './launch-list.js';
import { CPU_FOLDER } from './sources.js';

const FFI_TYPES: Record<ArgumentKind, string> = {
  ptr: 'void *',
  i64: 'int64_t',
  f32: 'float',
  f64: 'double',
  struct: 'void *',
};

/** Options of `CpuDevice`. */
export interface CpuOptions {
  /** Threads that run kernels; defaults to all cores. Results do not depend on it. */
  readonly threads?: number;
  readonly compiler?: CompilerOptions | KernelCompiler;
}

type NativeCall = (...values: unknown[]) => unknown;
type Library = ReturnType<typeof koffi.load>;

/** The CPU: native memory, and C++ kernels that are compiled on first use. */
export class CpuDevice implements RecordingDevice {
  readonly kind = 'cpu';
  readonly name: string;
  readonly compiler: KernelCompiler;
  readonly #modules = new Map<KernelModule, Kernels<Signatures>>();
  readonly #runtime: Record<
    'allocate' | 'free' | 'copy' | 'zero' | 'replay' | 'threads' | 'setThreads' | 'scratchBytes' | 'isFused',
    NativeCall
  >;
  /** Addresses of the functions that are recorded besides kernels. */
  readonly #addresses: Record<'copy' | 'zero', bigint>;
  readonly #pools = new Set<MemoryPool>();
  #pool: MemoryPool;
  #recorder: LaunchRecorder | null = null;

  constructor(options: CpuOptions = {}) {
    const threads = options.threads ?? availableParallelism();
    if (!Number.isInteger(threads) || threads < 1 || threads > 1024)
      throw new UsageError(`threads must be an integer from 1 to 1024, not ${threads}`);
    this.name = cpus()[0]?.model.trim() ?? process.arch;
    const { compiler = defaultCompilerOptions(process.env) } = options;
    this.compiler = compiler instanceof KernelCompiler ? compiler : new KernelCompiler(compiler);
    const source = join(CPU_FOLDER, 'runtime.cpp');
    // Global symbols: all kernel libraries use the thread pool and scratch memory of this library.
    const library = load(this.compiler.library(source), { global: true });
    this.#runtime = {
      allocate: library.func('trefoil_allocate', 'void *', ['size_t']),
      free: library.func('trefoil_free', 'void', ['void *']),
      copy: library.func('trefoil_copy', 'void', ['void *', 'void *', 'size_t']),
      zero: library.func('trefoil_zero', 'void', ['void *', 'size_t']),
      replay: library.func('trefoil_replay', 'void', ['void *', 'int64_t']),
      threads: library.func('trefoil_threads', 'int', []),
      setThreads: library.func('trefoil_set_threads', 'void', ['int']),
      isFused: library.func('trefoil_is_fused', 'int', []),
      scratchBytes: library.func('trefoil_scratch_bytes', 'int64_t', []),
    };
    this.#addresses = { copy: library.symbol('trefoil_copy'), zero: library.symbol('trefoil_zero') };
    this.#pool = this.newPool();
    this.threads = threads;
  }

  /** The pool that tensors are allocated from. */
  get pool(): MemoryPool {
    return this.#pool;
  }

  /** A second pool, for `record`. */
  newPool(): MemoryPool {
    const pool = new MemoryPool({
      allocate: (bytes) => this.#allocate(bytes),
      free: (address) => void this.#runtime.free(address),
    });
    this.#pools.add(pool);
    return pool;
  }

  /** Frees a pool of which no block is in use. */
  dropPool(pool: MemoryPool): void {
    pool.trim();
    this.#pools.delete(pool);
  }

  /**
   * Runs `work` and records its kernel calls and copies, which `replay` repeats. Its tensors come from `pool`, where
   * nothing else may be allocated between replays. Null if `work` did something that cannot be repeated, such as an upload.
   */
  record(pool: MemoryPool, work: () => void): LaunchList | null {
    if (this.#recorder) throw new Error('a recording cannot begin inside another one');
    const outer = this.#pool;
    const recorder = new LaunchRecorder();
    this.#recorder = recorder;
    this.#pool = pool;
    try {
      work();
    } finally {
      this.#recorder = null;
      this.#pool = outer;
    }
    const list = recorder.finish();
    if (list === null) return null;
    const { bytes, count } = list;
    const block = outer.take(bytes.byteLength);
    this.upload(block.address, bytes);
    return {
      count,
      replay: () => void this.#runtime.replay(block.address, count),
      free: () => outer.give(block),
    };
  }

  /** Adds a call to the recording, if there is one. */
  #note(address: bigint, signature: Signature, values: readonly unknown[]): void {
    this.#recorder?.add(address, signature, values);
  }

  /** Threads that kernels use. */
  get threads(): number {
    return this.#runtime.threads() as number;
  }
  /** Changes the number of threads, from the next kernel on. */
  set threads(count: number) {
    this.#runtime.setThreads(count);
  }

  get memory(): MemoryUse {
    const sum = (of: (pool: MemoryPool) => number) => [...this.#pools].reduce((total, pool) => total + of(pool), 0);
    return {
      usedBytes: sum((pool) => pool.bytesInUse),
      peakBytes: sum((pool) => pool.peakBytesInUse),
      reservedBytes: sum((pool) => pool.bytesReserved),
    };
  }

  freeBytes(): number {
    return freemem();
  }

  /** The compiler, or the cache of one that is not here. */
  get kernelSource(): KernelSource {
    return { isFused: this.#runtime.isFused() === 1, ...this.compiler.source };
  }

  /** Scratch memory of the kernels, over all threads. */
  get scratchBytes(): number {
    return Number(this.#runtime.scratchBytes());
  }

  /** Compiles and loads a module on first use. */
  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    let kernels = this.#modules.get(module);
    if (!kernels) {
      const library = load(this.compiler.library(fileURLToPath(new URL('./cpu.cpp', module.url))));
      kernels = Object.fromEntries(
        Object.entries(module.functions).map(([name, signature]) => {
          const address: bigint = library.symbol(name);
          const note = (values: readonly unknown[]) => this.#note(address, signature, values);
          return [name, bind(this, library, { name, signature, note })];
        }),
      ) as Kernels<Signatures>;
      this.#modules.set(module, kernels);
    }
    return kernels as Kernels<S>;
  }

  upload(address: bigint, bytes: Uint8Array): void {
    this.#recorder?.refuse();
    if (bytes.byteLength > 0) this.#runtime.copy(address, bytes, bytes.byteLength);
  }

  /** Copies bytes at an address into an array. */
  download(address: bigint, into: Uint8Array): void {
    // A temporary view of the native memory: as an output argument koffi would copy it twice.
    if (into.byteLength > 0) into.set(new Uint8Array(koffi.view(address, into.byteLength)));
  }

  /** Sets bytes at an address to zero. */
  fillZero(address: bigint, bytes: number): void {
    this.#note(this.#addresses.zero, ['ptr', 'i64'], [address, bytes]);
    this.#runtime.zero(address, bytes);
  }

  fill(address: bigint, value: number, count: number): void {
    this.#recorder?.refuse();
    new Float32Array(koffi.view(address, count * Float32Array.BYTES_PER_ELEMENT)).fill(value);
  }

  /** Copies bytes from one address to another. */
  copy(to: bigint, from: bigint, bytes: number): void {
    this.#note(this.#addresses.copy, ['ptr', 'ptr', 'i64'], [to, from, bytes]);
    this.#runtime.copy(to, from, bytes);
  }

  synchronize(): void {} // kernel calls are synchronous

  #allocate(bytes: number): bigint {
    const address = this.#runtime.allocate(bytes) as bigint | null;
    if (!address)
      throw new OutOfMemory(
        `out of memory: ${(bytes / 2 ** 20).toFixed(0)} MiB could not be allocated for a tensor, with ` +
          `${(this.pool.bytesReserved / 2 ** 20).toFixed(0)} MiB already allocated; lower train.batch_size or train.seq_len, ` +
          'or set runtime.gradient_checkpointing',
      );
    return address;
  }
}

function load(path: string, options: { global: boolean } = { global: false }): Library {
  try {
    return koffi.load(path, options);
  } catch (cause) {
    // The file was verified, so the system refuses it: usually the folder is mounted noexec.
    const reason = (cause as Error).message.split('\n')[0];
    throw new UsageError(
      `a compiled kernel cannot be loaded (${reason}): set TREFOIL_CACHE to a folder from which programs may run`,
      { cause },
    );
  }
}

interface BoundKernel {
  readonly name: string;
  readonly signature: Signature;
  /** Called with the native arguments of each call. */
  note(values: readonly unknown[]): void;
}

function bind(
  device: Device,
  library: Library,
  { name, signature, note }: BoundKernel,
): (...values: (Addressable | StructArgument | number | null)[]) => void {
  const call: NativeCall = library.func(
    name,
    'void',
    signature.map((kind) => FFI_TYPES[kind]),
  );
  const count = signature.length;
  return (...values) => {
    if (values.length !== count) throw new UsageError(`${name}: takes ${count} arguments, not ${values.length}`);
    const native = new Array<bigint | number | BigInt64Array | null>(count);
    for (let i = 0; i < count; i++) {
      const value = values[i];
      if (typeof value === 'number' || value === null) {
        if (value !== null && signature[i] === 'ptr')
          throw new UsageError(`${name}: argument ${i + 1} must be a tensor or null, not ${value}`); // else a crash
        native[i] = value;
      } else {
        expectDevice(device, value, name);
        native[i] = signature[i] === 'struct' ? packed(value as StructArgument) : (value as Addressable).pointer;
      }
    }
    note(native);
    call(...native);
  };
}

/** The struct's fields, 8 bytes each; null is address 0. */
function packed(struct: StructArgument): BigInt64Array {
  return BigInt64Array.from(Object.values(struct), (field) => {
    if (typeof field === 'number') return BigInt(field);
    return field === null ? 0n : field.pointer;
  });
}
