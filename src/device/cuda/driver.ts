/** Typed functions of the CUDA driver. Every call is checked. */

import { TrefoilError } from '../../errors.js';
import koffi from '../koffi.js';
import { DRIVER, type Library, openLibrary } from './libraries.js';

const handle = 'void *';
const address = 'uint64_t';
const size = 'size_t';
const out = 'void *'; // memory that the driver writes to

/** Function names and argument types. All return a status. */
const FUNCTIONS = {
  cuInit: ['uint'],
  cuDeviceGetCount: [out],
  cuDeviceGet: [out, 'int'],
  cuDeviceGetName: [out, 'int', 'int'],
  cuDeviceGetAttribute: [out, 'int', 'int'],
  cuDeviceTotalMem_v2: [out, 'int'],
  cuDeviceGetUuid_v2: [out, 'int'],
  cuDevicePrimaryCtxRetain: [out, 'int'],
  cuDevicePrimaryCtxRelease_v2: ['int'],
  cuCtxSetCurrent: [handle],
  cuMemGetInfo_v2: [out, out],
  cuMemAlloc_v2: [out, size],
  cuMemFree_v2: [address],
  cuMemAllocHost_v2: [out, size],
  cuMemFreeHost: [handle],
  cuMemcpyHtoDAsync_v2: [address, handle, size, handle],
  cuMemcpyDtoHAsync_v2: [handle, address, size, handle],
  cuMemcpyDtoDAsync_v2: [address, address, size, handle],
  cuMemsetD8Async: [address, 'uint8_t', size, handle],
  cuMemsetD32Async: [address, 'uint', size, handle],
  cuStreamCreate: [out, 'uint'],
  cuStreamDestroy_v2: [handle],
  cuStreamSynchronize: [handle],
  cuStreamQuery: [handle],
  cuStreamWaitEvent: [handle, handle, 'uint'],
  cuStreamBeginCapture_v2: [handle, 'int'],
  cuStreamEndCapture: [handle, out],
  cuGraphInstantiateWithFlags: [out, handle, 'uint64_t'],
  cuGraphLaunch: [handle, handle],
  cuGraphExecDestroy: [handle],
  cuGraphDestroy: [handle],
  cuEventCreate: [out, 'uint'],
  cuEventDestroy_v2: [handle],
  cuEventRecord: [handle, handle],
  cuEventSynchronize: [handle],
  cuEventElapsedTime: [out, handle, handle],
  cuModuleLoadData: [out, handle],
  cuModuleGetFunction: [out, handle, 'str'],
  cuModuleGetGlobal_v2: [out, out, handle, 'str'],
  cuFuncSetAttribute: [handle, 'int', 'int'],
  cuLaunchKernelEx: [handle, handle, handle, handle],
  cuLaunchKernel: [handle, 'uint', 'uint', 'uint', 'uint', 'uint', 'uint', 'uint', handle, handle, handle],
} as const;

/** Functions that newer drivers export under another name with the same arguments. */
const OTHER_NAMES: Partial<Record<keyof typeof FUNCTIONS, string>> = { cuEventElapsedTime: 'cuEventElapsedTime_v2' };

type Name = keyof typeof FUNCTIONS;
type Native = (...values: unknown[]) => number;

const OUT_OF_MEMORY = 2;
const NOT_READY = 600;

export class CudaError extends TrefoilError {
  readonly status: number;

  constructor(message: string, status: number) {
    super(message);
    this.status = status;
  }

  get isOutOfMemory(): boolean {
    return this.status === OUT_OF_MEMORY;
  }
}

/** Values of CUdevice_attribute. */
export const ATTRIBUTE = { multiprocessors: 16, major: 75, minor: 76, sharedPerBlock: 97 } as const;
const FUNCTION_MAX_DYNAMIC_SHARED = 8;

export class Driver {
  readonly #calls: Record<Name, Native>;
  readonly #errorName: Native;
  readonly #errorString: Native;
  /** Two 64-bit words for results. */
  readonly #result = koffi.alloc('uint64_t', 2);
  readonly #view: DataView;
  #isAbandoned = false;

  constructor(library: Library = openLibrary(DRIVER)) {
    const bind = (name: string, types: readonly string[]) => library.func(name, 'int', [...types]) as Native;
    this.#calls = Object.fromEntries(
      Object.entries(FUNCTIONS).map(([name, types]) => [name, this.#bind(bind, name as Name, types)]),
    ) as Record<Name, Native>;
    this.#errorName = bind('cuGetErrorName', ['int', out]);
    this.#errorString = bind('cuGetErrorString', ['int', out]);
    this.#view = new DataView(koffi.view(this.#result, 16));
    this.call('cuInit', 0);
  }

  #bind(bind: (name: string, types: readonly string[]) => Native, name: Name, types: readonly string[]): Native {
    const other = OTHER_NAMES[name];
    try {
      return bind(name, types);
    } catch (error) {
      if (!other) throw error;
      return bind(other, types);
    }
  }

  /**
   * Turns every later call into a no-op, because work on the GPU will never end. Otherwise freeing memory, as a program does
   * on exit, would wait for it.
   */
  abandon(): void {
    this.#isAbandoned = true;
  }

  call(name: Name, ...values: unknown[]): void {
    if (this.#isAbandoned) return;
    const status = this.#calls[name](...values);
    if (status !== 0) throw new CudaError(`CUDA: ${name} failed: ${this.describe(status)}`, status);
  }

  /** Whether all work on a stream has finished. */
  isDone(stream: bigint): boolean {
    if (this.#isAbandoned) return true;
    const status = this.#calls.cuStreamQuery(stream);
    if (status === 0) return true;
    if (status === NOT_READY) return false;
    throw new CudaError(`CUDA: ${this.describe(status)}`, status);
  }

  /** Calls a function that writes a 64-bit result to its first argument; returns the result. */
  get(name: Name, ...values: unknown[]): bigint {
    this.#view.setBigUint64(0, 0n, true);
    this.call(name, this.#result, ...values);
    return this.#view.getBigUint64(0, true);
  }

  getInt(name: Name, ...values: unknown[]): number {
    this.#view.setBigUint64(0, 0n, true);
    this.call(name, this.#result, ...values);
    return this.#view.getInt32(0, true);
  }

  getFloat(name: Name, ...values: unknown[]): number {
    this.call(name, this.#result, ...values);
    return this.#view.getFloat32(0, true);
  }

  /** Ends a capture, even a failed one, and returns the graph. */
  endCapture(stream: bigint): bigint {
    this.#view.setBigUint64(0, 0n, true);
    this.call('cuStreamEndCapture', stream, this.#result);
    return this.#view.getBigUint64(0, true);
  }

  deviceName(device: number): string {
    const bytes = new Uint8Array(256);
    const text = koffi.alloc('uint8_t', 256);
    this.call('cuDeviceGetName', text, 256, device);
    bytes.set(new Uint8Array(koffi.view(text, 256)));
    koffi.free(text);
    return Buffer.from(bytes.subarray(0, bytes.indexOf(0))).toString('utf8');
  }

  /** Identifies a GPU among all GPUs of all machines. */
  deviceUuid(device: number): string {
    const bytes = koffi.alloc('uint8_t', 16);
    this.call('cuDeviceGetUuid_v2', bytes, device);
    const uuid = Buffer.from(koffi.view(bytes, 16)).toString('hex');
    koffi.free(bytes);
    return uuid;
  }

  attribute(device: number, attribute: number): number {
    return this.getInt('cuDeviceGetAttribute', attribute, device);
  }

  memory(): { free: number; total: number } {
    const words = koffi.alloc('uint64_t', 2);
    this.call('cuMemGetInfo_v2', words, koffi.address(words) + 8n);
    const view = new DataView(koffi.view(words, 16));
    const memory = { free: Number(view.getBigUint64(0, true)), total: Number(view.getBigUint64(8, true)) };
    koffi.free(words);
    return memory;
  }

  /** Address of a global variable of a module. */
  global(module: bigint, name: string): bigint {
    const words = koffi.alloc('uint64_t', 2);
    this.call('cuModuleGetGlobal_v2', words, koffi.address(words) + 8n, module, name);
    const found = new DataView(koffi.view(words, 16)).getBigUint64(0, true);
    koffi.free(words);
    return found;
  }

  allowShared(kernel: bigint, bytes: number): void {
    this.call('cuFuncSetAttribute', kernel, FUNCTION_MAX_DYNAMIC_SHARED, bytes);
  }

  /** The most frequent call, without the lookup by name. */
  get launchKernel(): Native {
    return this.#calls.cuLaunchKernel;
  }

  /** The same with attributes. `config`: a CUlaunchConfig in native memory. */
  get launchKernelEx(): Native {
    return this.#calls.cuLaunchKernelEx;
  }

  describe(status: number): string {
    const text = (read: Native) => {
      this.#view.setBigUint64(0, 0n, true);
      read(status, this.#result);
      const pointer = this.#view.getBigUint64(0, true);
      return pointer === 0n ? '' : (koffi.decode(pointer, 'char', -1) as string);
    };
    return `${text(this.#errorName) || status} (${text(this.#errorString) || 'no description'})`;
  }
}
