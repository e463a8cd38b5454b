/**
 * Where memory lives and kernels run, behind one small interface. An operation names its kernels once (`defineKernels`)
 * and calls them with tensors and numbers; a device turns the source beside the operation into callable code.
 */
import { fileURLToPath } from 'node:url';
import { UsageError } from '../errors.js';
import type { CudaRuntime } from './cuda/runtime.js';
import type { MemoryPool } from './pool.js';

/** The kinds of devices. */
export type DeviceKind = 'cpu' | 'cuda';

/** A piece of device memory. `address` is meaningful on its device only. */
export interface Block {
  readonly address: bigint;
  readonly bytes: number;
}

/**
 * What a kernel argument may be: a tensor's memory (or null), a number passed as 64-bit integer or float, or a struct
 * that the kernel gets the address of.
 */
export type ArgumentKind = 'ptr' | 'i64' | 'f32' | 'f64' | 'struct';

/** The fields of a C struct in its order: addresses and 64-bit integers, 8 bytes each. */
export type StructArgument = Readonly<Record<string, Addressable | number | null>>;

/** Anything with an address on the device; tensors are the usual case. */
export interface Addressable {
  readonly pointer: bigint;
  /** What lies there. CUDA kernels are compiled for it; the CPU's compute in f32. */
  readonly dtype?: string;
  /** The device that the address belongs to. */
  readonly device?: Device;
}

/** Throws unless `value` lies on `device`: an address of another device would crash the process. */
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
export type Argument<K> = K extends 'ptr' ? Addressable | null : K extends 'struct' ? StructArgument : number;
export type Signature = readonly ArgumentKind[];
export type Signatures = Readonly<Record<string, Signature>>;
/** Argument types of a kernel. */
export type Arguments<S extends Signature> = { -readonly [I in keyof S]: Argument<S[I]> };
/** Callable kernels by name. */
export type Kernels<S extends Signatures> = {
  readonly [Name in keyof S]: (...values: Arguments<S[Name]>) => void;
};

export interface KernelOptions<S extends Signatures> {
  /** How the same functions are launched on a GPU (the operation's cuda.ts). */
  readonly cuda?: (cuda: CudaRuntime) => Kernels<S>;
}

/** The kernels of one operation: the folder that holds its sources, and its functions with their arguments. */
export interface KernelModule<S extends Signatures = Signatures> {
  readonly folder: string;
  readonly functions: S;
  /** Makes a `Kernels<S>`; null for an operation without CUDA kernels. */
  readonly cuda: ((cuda: CudaRuntime) => unknown) | null;
}

/** `defineKernels(import.meta.url, {...})` in an operation's folder describes the functions of its `cpu.cpp`. */
export function defineKernels<const S extends Signatures>(
  moduleUrl: string,
  functions: S,
  options: KernelOptions<S> = {},
): KernelModule<S> {
  const { cuda = null } = options;
  return { folder: fileURLToPath(new URL('.', moduleUrl)), functions, cuda };
}

/** Device memory in use. */
export interface MemoryUse {
  readonly peakBytes: number;
  readonly reservedBytes: number;
}

/** Where memory lives and kernels run. */
export interface Device {
  readonly kind: DeviceKind;
  /** What a person calls it: the processor's model name. */
  readonly name: string;
  readonly pool: MemoryPool;
  /** Tensors of all pools: bytes at the highest so far, and what is held. */
  readonly memory: MemoryUse;
  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S>;
  /** Copies host bytes to device memory and back; both return when the bytes have arrived. */
  upload(address: bigint, bytes: Uint8Array): void;
  download(address: bigint, into: Uint8Array): void;
  fillZero(address: bigint, bytes: number): void;
  /** `count` floats of one value, without waiting. */
  fill(address: bigint, value: number, count: number): void;
  copy(to: bigint, from: bigint, bytes: number): void;
  /** Returns when everything launched so far is done. */
  synchronize(): void;
}
