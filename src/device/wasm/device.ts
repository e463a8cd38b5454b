/**
 * The processor as a device through WebAssembly: no compiler and no native code. All kernels are in one module; memory is one
 * block that its threads share. Imports nothing of Node: node.ts opens it there.
 */
import { OutOfMemory, TrefoilError, UsageError } from '../../errors.js';
import {
  type Addressable,
  type ArgumentKind,
  expectDevice,
  type HostDevice,
  type KernelModule,
  type KernelSource,
  type Kernels,
  type MemoryUse,
  type Signatures,
  type StructArgument,
} from '../device.js';
import { MemoryPool } from '../pool.js';
import { Wasm, type WasmMemory, type WasmModule } from './webassembly.js';

const PAGE = 65_536;
/** All that 32-bit addresses reach. */
const MAX_PAGES = 65_536;
const INITIAL_PAGES = 20;
const STACK_BYTES = 2 ** 20;
const STRUCT_BYTES = 4096;
const MIB = 2 ** 20;

/** Functions that the kernels call. */
export interface WasmHost {
  /** Seconds of a clock. */
  readonly seconds: () => number;
  /** Fills memory from an open file; false if it has too few bytes. Null where there are no files. */
  readonly readFile: ((descriptor: number, offset: number, into: Uint8Array) => boolean) | null;
}

/** Values for a helper: it instantiates the module with this memory, and calls `trefoil_help(id)`. */
export interface HelperStart {
  readonly module: WasmModule;
  readonly memory: WasmMemory;
  readonly id: number;
  /** The top of its stack, and memory for its thread-local variables. */
  readonly stack: number;
  readonly tls: number;
  /** Address of a word that a helper which ends sets: 1 after a crash, 2 out of memory. */
  readonly failed: number;
}

export interface WasmOptions {
  readonly module: WasmModule;
  /** Name of the processor. */
  readonly name: string;
  readonly source: Omit<KernelSource, 'kind' | 'isFused'>;
  readonly threads: number;
  readonly host: WasmHost;
  /** Starts a helper thread; null where memory cannot be shared. */
  readonly startHelper: ((start: HelperStart) => void) | null;
  /** Bytes of the machine's memory that are free. */
  readonly freeMemory: () => number;
  /** End the messages about missing memory and about a crash. */
  readonly remedies: { readonly memory: string; readonly crash: string };
}

type Call = (...values: (number | bigint)[]) => unknown;

/** The processor through WebAssembly. */
export class WasmDevice implements HostDevice {
  readonly kind = 'cpu';
  readonly name: string;
  readonly pool: MemoryPool;
  readonly kernelSource: KernelSource;
  readonly #options: WasmOptions;
  readonly #memory: WasmMemory;
  readonly #exports: Readonly<Record<string, Call>>;
  readonly #tls: { readonly bytes: number; readonly alignment: number };
  readonly #struct: number;
  readonly #modules = new Map<KernelModule, Kernels<Signatures>>();
  #helpers = 0;
  #threads = 1;
  /** After a crash the memory is in no known state: every later call fails with the same line. */
  #crash: TrefoilError | null = null;

  constructor(options: WasmOptions) {
    this.#options = options;
    this.name = options.name;
    this.#memory = new Wasm.Memory({ initial: INITIAL_PAGES, maximum: MAX_PAGES, shared: true });
    const { seconds, readFile } = options.host;
    const env = {
      memory: this.#memory,
      seconds,
      fail: (bytes: number) => {
        throw this.#failure(bytes);
      },
      read_file: (descriptor: number, offset: number, to: number, bytes: number) =>
        Number(readFile?.(descriptor, offset, this.#bytes(to >>> 0, bytes)) ?? false),
    };
    const { exports } = new Wasm.Instance(options.module, { env });
    this.#exports = exports as unknown as Record<string, Call>;
    const { __tls_size: size, __tls_align: alignment } = exports as Record<string, { readonly value: number }>;
    this.#tls = { bytes: Number(size.value), alignment: Number(alignment.value) };
    this.#exports['__wasm_init_tls'](this.#tlsBlock());
    this.#struct = Number(this.#reserve(STRUCT_BYTES));
    const isFused = this.#exports['trefoil_is_fused']() === 1;
    this.kernelSource = { kind: 'wasm', isFused, ...options.source };
    this.pool = new MemoryPool({
      allocate: (bytes) => this.#reserve(bytes),
      free: (address) => void this.#exports['trefoil_free'](Number(address)),
    });
    this.threads = options.threads;
  }

  /** Threads that kernels use. */
  get threads(): number {
    return this.#threads;
  }
  /** Changes the number of threads, from the next kernel on. Helpers join when they have started. */
  set threads(count: number) {
    if (!Number.isInteger(count) || count < 1 || count > 1024)
      throw new UsageError(`threads must be an integer from 1 to 1024, not ${count}`);
    const { startHelper, module } = this.#options;
    const helpers = startHelper ? count - 1 : 0;
    while (startHelper && this.#helpers < helpers) {
      this.#helpers += 1;
      const stack = Number(this.#reserve(STACK_BYTES)) + STACK_BYTES;
      const failed = (this.#exports['trefoil_failed']() as number) >>> 0;
      startHelper({ module, memory: this.#memory, id: this.#helpers, stack, tls: this.#tlsBlock(), failed });
    }
    this.#exports['trefoil_allow'](helpers);
    this.#threads = helpers + 1;
  }

  get memory(): MemoryUse {
    const { bytesInUse, peakBytesInUse, bytesReserved } = this.pool;
    return { usedBytes: bytesInUse, peakBytes: peakBytesInUse, reservedBytes: bytesReserved };
  }

  freeBytes(): number {
    return Math.min(this.#options.freeMemory(), MAX_PAGES * PAGE - this.#memory.buffer.byteLength);
  }

  /** Scratch memory of the kernels, over all threads. */
  get scratchBytes(): number {
    return this.#exports['trefoil_scratch_bytes']() as number;
  }

  /** The kernels of an operation. */
  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    let kernels = this.#modules.get(module);
    if (!kernels) {
      kernels = Object.fromEntries(
        Object.entries(module.functions).map(([name, signature]) => [name, this.#bind(name, signature)]),
      ) as Kernels<Signatures>;
      this.#modules.set(module, kernels);
    }
    return kernels as Kernels<S>;
  }

  upload(address: bigint, bytes: Uint8Array): void {
    this.#bytes(Number(address), bytes.byteLength).set(bytes);
  }

  /** Copies bytes at an address into an array. */
  download(address: bigint, into: Uint8Array): void {
    into.set(this.#bytes(Number(address), into.byteLength));
  }

  /** Sets bytes at an address to zero. */
  fillZero(address: bigint, bytes: number): void {
    this.#bytes(Number(address), bytes).fill(0);
  }

  fill(address: bigint, value: number, count: number): void {
    new Float32Array(this.#memory.buffer, Number(address), count).fill(value);
  }

  /** Copies bytes from one address to another. */
  copy(to: bigint, from: bigint, bytes: number): void {
    this.#bytes(0, this.#memory.buffer.byteLength).copyWithin(Number(to), Number(from), Number(from) + bytes);
  }

  synchronize(): void {} // kernel calls are synchronous

  /** A new view each time: the buffer changes when memory grows. */
  #bytes(address: number, count: number): Uint8Array {
    return new Uint8Array(this.#memory.buffer, address, count);
  }

  #reserve(bytes: number): bigint {
    const address = (this.#exports['trefoil_allocate'](bytes) as number) >>> 0;
    if (address === 0) throw this.#outOfMemory(bytes, 'a tensor');
    return BigInt(address);
  }

  #tlsBlock(): number {
    const { bytes, alignment } = this.#tls;
    const address = Number(this.#reserve(bytes + alignment));
    return Math.ceil(address / alignment) * alignment;
  }

  #outOfMemory(bytes: number, what: string): OutOfMemory {
    const used = (this.#memory.buffer.byteLength / MIB).toFixed(0);
    return new OutOfMemory(
      `out of memory: ${(bytes / MIB).toFixed(0)} MiB could not be allocated for ${what}; kernels in WebAssembly reach ` +
        `${(MAX_PAGES * PAGE) / MIB} MiB in all, of which ${used} MiB are taken: ${this.#options.remedies.memory}`,
    );
  }

  /** Called by a kernel that cannot go on: `bytes` that it needs, or 0 if a helper has ended. */
  #failure(bytes: number): TrefoilError {
    const failed = new Int32Array(this.#memory.buffer, (this.#exports['trefoil_failed']() as number) >>> 0, 1);
    const isMemory = bytes > 0 || Atomics.load(failed, 0) === 2;
    this.#crash ??= isMemory ? this.#outOfMemory(bytes, 'a kernel') : this.#crashed('a helper thread', 'it ended');
    return this.#crash;
  }

  #crashed(what: string, reason: string): TrefoilError {
    return new TrefoilError(
      `${what} crashed in WebAssembly (${reason}; ${this.kernelSource.name} ${this.kernelSource.hash}): ` +
        this.#options.remedies.crash,
    );
  }

  #bind(name: string, signature: readonly ArgumentKind[]) {
    const call = this.#exports[name];
    if (typeof call !== 'function')
      throw new UsageError(
        `${name} is not among the kernels in WebAssembly (${this.kernelSource.name}): install a C++ compiler and set ` +
          'TREFOIL_KERNELS=native',
      );
    const count = signature.length;
    return (...values: (Addressable | StructArgument | number | null)[]): void => {
      if (this.#crash) throw this.#crash;
      if (values.length !== count) throw new UsageError(`${name}: takes ${count} arguments, not ${values.length}`);
      const native = new Array<number | bigint>(count);
      for (let i = 0; i < count; i++) {
        const value = values[i];
        const kind = signature[i];
        if (typeof value === 'number') {
          if (kind === 'ptr') throw new UsageError(`${name}: argument ${i + 1} must be a tensor or null, not ${value}`);
          native[i] = kind === 'i64' ? BigInt(value) : value;
        } else if (value === null) {
          native[i] = kind === 'i64' ? 0n : 0;
        } else {
          expectDevice(this, value, name);
          native[i] = kind === 'struct' ? this.#pack(value as StructArgument) : Number((value as Addressable).pointer);
        }
      }
      try {
        call(...native);
      } catch (error) {
        if (!(error instanceof Wasm.RuntimeError)) throw error;
        this.#crash = this.#crashed(name, error.message);
        throw this.#crash;
      }
    };
  }

  /** Writes the struct's fields, 8 bytes each, and returns its address; null is address 0. */
  #pack(struct: StructArgument): number {
    const fields = Object.values(struct);
    const words = new BigInt64Array(this.#memory.buffer, this.#struct, fields.length);
    fields.forEach((field, i) => {
      words[i] = typeof field === 'number' ? BigInt(field) : (field?.pointer ?? 0n);
    });
    return this.#struct;
  }
}
