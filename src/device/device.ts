/**
 * The interface of a device, which owns memory and runs kernels. An operation declares its kernels once (`defineKernels`) and
 * calls them with tensors and numbers; the device compiles the source in the operation's folder.
 */
import { UsageError } from '../errors.js';
import type { CudaRuntime } from './cuda/runtime.js';
import type { MemoryPool } from './pool.js';

/** The kinds of devices. */
export type DeviceKind = 'cpu' | 'cuda';

/**
 * A block of device memory. `address` is valid on its device only.
 *
 * @opaque
 */
export interface MemoryBlock {
  readonly address: bigint;
  readonly bytes: number;
}

/**
 * Kinds of kernel arguments: a tensor's memory (or null), a number passed as 64-bit integer or float, or a struct passed by
 * address.
 */
export type ArgumentKind = 'ptr' | 'i64' | 'f32' | 'f64' | 'struct';

/** The fields of a C struct in its order: addresses and 64-bit integers, 8 bytes each. */
export type StructArgument = Readonly<Record<string, Addressable | number | null>>;

/** Anything with an address on the device; tensors are the usual case. */
export interface Addressable {
  readonly pointer: bigint;
  /** Element type. CUDA kernels are compiled for it; CPU kernels compute in f32. */
  readonly dtype?: string;
  /** The device that the address belongs to. */
  readonly device?: Device;
}

/** Throws unless `value` is on `device`: an address of another device would crash the process. */
export function expectDevice(device: Device, value: Addressable | StructArgument, what: string): void {
  if (!('pointer' in value)) {
    for (const field of Object.values(value as StructArgument))
      if (typeof field === 'object' && field) expectDevice(device, field, what);
    return;
  }
  const { device: other } = value as Addressable;
  // A device that wraps another one (to time or to record it) shares its pool.
  if (other === undefined || other === device || other.pool === device.pool) return;
  throw new UsageError(
    `${what}: ${value} is on another device (${other.kind}: ${other.name}) than the one that computes ` +
      `(${device.kind}: ${device.name}); create both on one device`,
  );
}

/** One argument type of a kernel. */
export type KernelArgument<K> = K extends 'ptr' ? Addressable | null : K extends 'struct' ? StructArgument : number;
/** Kinds of the arguments of a kernel, in their order. */
export type Signature = readonly ArgumentKind[];
/** Signatures of kernels by name. */
export type Signatures = Readonly<Record<string, Signature>>;
/** Argument types of a kernel. */
export type Arguments<S extends Signature> = { -readonly [I in keyof S]: KernelArgument<S[I]> };
/** Callable kernels by name. */
export type Kernels<S extends Signatures> = {
  readonly [Name in keyof S]: (...values: Arguments<S[Name]>) => void;
};

/** Options of `defineKernels`. */
export interface KernelOptions<S extends Signatures> {
  /** Creates the CUDA launchers of the same functions (the operation's cuda.ts). */
  readonly cuda?: (cuda: CudaRuntime) => Kernels<S>;
}

/** The kernels of one operation: where its sources lie, and its functions with their arguments. */
export interface KernelModule<S extends Signatures = Signatures> {
  /** Address of the module that declared them. Only a device that compiles makes a path of it. */
  readonly url: string;
  readonly functions: S;
  /** Creates a `Kernels<S>`; null for an operation without CUDA kernels. */
  readonly cuda: ((cuda: CudaRuntime) => unknown) | null;
}

/** `defineKernels(import.meta.url, {...})` in an operation's folder declares the functions of its `cpu.cpp`. */
export function defineKernels<const S extends Signatures>(
  moduleUrl: string,
  functions: S,
  options: KernelOptions<S> = {},
): KernelModule<S> {
  const { cuda = null } = options;
  return { url: moduleUrl, functions, cuda };
}

/** Device memory in use. */
export interface MemoryUse {
  /** Memory of the tensors that exist now. */
  readonly usedBytes: number;
  readonly peakBytes: number;
  readonly reservedBytes: number;
}

/** Where the kernels of the processor come from. */
export interface KernelSource {
  /** Compiled for this processor, compiled before for its platform, or WebAssembly. */
  readonly kind: 'native' | 'prebuilt' | 'wasm';
  /** The compiler, with the package of prebuilt ones; or the file in WebAssembly. */
  readonly name: string;
  /** Whether products are fused: then results have the bits of all such machines (docs/explain/determinism.md). */
  readonly isFused: boolean;
  /** Hash of the sources. */
  readonly hash: string;
}

/**
 * Memory of the host, for copies to and from a device.
 *
 * @opaque
 */
export interface HostMemory {
  readonly bytes: Uint8Array;
  /** Starts to copy its first bytes to the device; returns a function that waits until it may be changed. */
  upload(to: bigint, bytes: number): () => void;
  /** Starts to copy from the device, in the order of its work; returns a function that waits until the bytes are there. */
  download(from: bigint, bytes: number): () => void;
  free(): void;
}

/** Where memory lives and kernels run. */
export interface Device {
  readonly kind: DeviceKind;
  /** Model name of the processor or GPU. */
  readonly name: string;
  readonly pool: MemoryPool;
  /** Over all pools: peak bytes in use, and bytes reserved from the system. */
  readonly memory: MemoryUse;
  /** Bytes of the device's memory that no program has allocated. */
  freeBytes(): number;
  /** Compiles and loads a module on first use. */
  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S>;
  /** Copies between host and device memory; both return when the source may be reused and the result read. */
  upload(address: bigint, bytes: Uint8Array): void;
  /** Copies bytes at an address into an array; waits for what was queued before. */
  download(address: bigint, into: Uint8Array): void;
  /** Sets bytes at an address to zero. */
  fillZero(address: bigint, bytes: number): void;
  /** Sets `count` floats to `value`, asynchronously. */
  fill(address: bigint, value: number, count: number): void;
  /** Copies bytes from one address to another. */
  copy(to: bigint, from: bigint, bytes: number): void;
  /** Returns when everything launched so far is done. */
  synchronize(): void;
  /** Allocates host memory that is copied faster than JavaScript's. Devices without such memory omit it (host-memory.ts). */
  hostMemory?(size: number): HostMemory;
}

/** The processor as a device. */
export interface HostDevice extends Device {
  readonly kind: 'cpu';
  /** Threads that run kernels. Results do not depend on it. */
  threads: number;
  /** Temporary memory of the kernels, over all threads. */
  readonly scratchBytes: number;
  readonly kernelSource: KernelSource;
}

/**
 * A recorded list of calls. The creator frees it.
 * @opaque
 */
export interface LaunchList {
  /** Number of calls. */
  readonly count: number;
  /** Makes the calls again, with the same addresses and numbers. */
  replay(): void;
  free(): void;
}

/**
 * A processor that records calls, to repeat them without the JavaScript between them.
 *
 * @opaque
 */
export interface RecordingDevice extends HostDevice {
  /** A second pool, for `record`. */
  newPool(): MemoryPool;
  /** Frees a pool of which no block is in use. */
  dropPool(pool: MemoryPool): void;
  /**
   * Runs `work` and records its kernel calls and copies. Its tensors come from `pool`, where nothing else may be allocated
   * between replays. Null if `work` did something that cannot be repeated, such as an upload.
   */
  record(pool: MemoryPool, work: () => void): LaunchList | null;
}

export function canRecord(device: Device): device is RecordingDevice {
  return device.kind === 'cpu' && 'record' in device;
}

export function isHostDevice(device: Device): device is HostDevice {
  return device.kind === 'cpu';
}
