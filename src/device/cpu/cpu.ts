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
  type HostDevice,
  type KernelModule,
  type KernelSource,
  type Kernels,
  type MemoryUse,
  type Signature,
  type Signatures,
  type StructArgument,
} from '../device.js';
import koffi from '../koffi.js';
import { MemoryPool } from '../pool.js';
import { type CompilerOptions, defaultCompilerOptions, KernelCompiler } from './compile.js';

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
export class CpuDevice implements HostDevice {
  readonly kind = 'cpu';
  readonly name: string;
  readonly pool: MemoryPool;
  readonly compiler: KernelCompiler;
  readonly #modules = new Map<KernelModule, Kernels<Signatures>>();
  readonly #runtime: Record<
    'allocate' | 'free' | 'copy' | 'zero' | 'threads' | 'setThreads' | 'scratchBytes' | 'isFused',
    NativeCall
  >;

  constructor(options: CpuOptions = {}) {
    const threads = options.threads ?? availableParallelism();
    if (!Number.isInteger(threads) || threads < 1 || threads > 1024)
      throw new UsageError(`threads must be an integer from 1 to 1024, not ${threads}`);
    this.name = cpus()[0]?.model.trim() ?? process.arch;
    const { compiler = defaultCompilerOptions(process.env) } = options;
    this.compiler = compiler instanceof KernelCompiler ? compiler : new KernelCompiler(compiler);
    const source = join(fileURLToPath(new URL('.', import.meta.url)), 'runtime.cpp');
    // Global symbols: all kernel libraries use the thread pool and scratch memory of this library.
    const library = load(this.compiler.library(source), { global: true });
    this.#runtime = {
      allocate: library.func('trefoil_allocate', 'void *', ['size_t']),
      free: library.func('trefoil_free', 'void', ['void *']),
      copy: library.func('trefoil_copy', 'void', ['void *', 'void *', 'size_t']),
      zero: library.func('trefoil_zero', 'void', ['void *', 'size_t']),
      threads: library.func('trefoil_threads', 'int', []),
      setThreads: library.func('trefoil_set_threads', 'void', ['int']),
      isFused: library.func('trefoil_is_fused', 'int', []),
      scratchBytes: library.func('trefoil_scratch_bytes', 'int64_t', []),
    };
    this.pool = new MemoryPool({
      allocate: (bytes) => this.#allocate(bytes),
      free: (address) => void this.#runtime.free(address),
    });
    this.threads = threads;
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
    const { bytesInUse, peakBytesInUse, bytesReserved } = this.pool;
    return { usedBytes: bytesInUse, peakBytes: peakBytesInUse, reservedBytes: bytesReserved };
  }

  freeBytes(): number {
    return freemem();
  }

  /** The compiler, or the cache of one that is not here. */
  get kernelSource(): KernelSource {
    return { kind: 'native', isFused: this.#runtime.isFused() === 1, ...this.compiler.source };
  }

  /** Scratch memory of the kernels, over all threads. */
  get scratchBytes(): number {
    return Number(this.#runtime.scratchBytes());
  }

  /** Compiles and loads a module on first use. */
  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    let kernels = this.#modules.get(module);
    if (!kernels) {
      const library = load(this.compiler.library(join(module.folder, 'cpu.cpp')));
      kernels = Object.fromEntries(
        Object.entries(module.functions).map(([name, signature]) => [name, bind(this, library, name, signature)]),
      ) as Kernels<Signatures>;
      this.#modules.set(module, kernels);
    }
    return kernels as Kernels<S>;
  }

  upload(address: bigint, bytes: Uint8Array): void {
    if (bytes.byteLength > 0) this.#runtime.copy(address, bytes, bytes.byteLength);
  }

  /** Copies bytes at an address into an array. */
  download(address: bigint, into: Uint8Array): void {
    // A temporary view of the native memory: as an output argument koffi would copy it twice.
    if (into.byteLength > 0) into.set(new Uint8Array(koffi.view(address, into.byteLength)));
  }

  /** Sets bytes at an address to zero. */
  fillZero(address: bigint, bytes: number): void {
    this.#runtime.zero(address, bytes);
  }

  fill(address: bigint, value: number, count: number): void {
    new Float32Array(koffi.view(address, count * Float32Array.BYTES_PER_ELEMENT)).fill(value);
  }

  /** Copies bytes from one address to another. */
  copy(to: bigint, from: bigint, bytes: number): void {
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

function bind(
  device: Device,
  library: Library,
  name: string,
  signature: Signature,
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
