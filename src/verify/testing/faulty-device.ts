/** A device with broken kernels: every check must detect them. */
import type { CpuDevice } from '../../device/cpu/cpu.js';
import type { Addressable, Device, KernelModule, Kernels, Signatures, StructArgument } from '../../device/device.js';

export type Argument = Addressable | StructArgument | number | null;
type Kernel = (...values: Argument[]) => void;

/** Replaces a kernel: gets the correct one and its arguments. */
export type Fault = (kernel: Kernel, values: Argument[], device: CpuDevice) => void;

export class FaultyDevice implements Device {
  readonly kind = 'cpu';
  readonly #device: CpuDevice;
  readonly #faults: Readonly<Record<string, Fault>>;

  constructor(device: CpuDevice, faults: Readonly<Record<string, Fault>>) {
    this.#device = device;
    this.#faults = faults;
  }

  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    const kernels = { ...this.#device.kernels(module) } as Record<string, Kernel>;
    for (const [name, fault] of Object.entries(this.#faults)) {
      const kernel = kernels[name];
      if (kernel) kernels[name] = (...values) => fault(kernel, values, this.#device);
    }
    return kernels as unknown as Kernels<S>;
  }

  get name() {
    return this.#device.name;
  }
  get pool() {
    return this.#device.pool;
  }
  get memory() {
    return this.#device.memory;
  }
  freeBytes() {
    return this.#device.freeBytes();
  }
  get threads() {
    return this.#device.threads;
  }
  set threads(count: number) {
    this.#device.threads = count;
  }
  upload(address: bigint, bytes: Uint8Array) {
    this.#device.upload(address, bytes);
  }
  download(address: bigint, into: Uint8Array) {
    this.#device.download(address, into);
  }
  fillZero(address: bigint, bytes: number) {
    this.#device.fillZero(address, bytes);
  }
  fill(address: bigint, value: number, count: number) {
    this.#device.fill(address, value, count);
  }
  copy(to: bigint, from: bigint, bytes: number) {
    this.#device.copy(to, from, bytes);
  }
  synchronize() {}
}

/** Calls the kernel with one argument replaced. */
export function replaced(index: number, change: (value: number, values: Argument[]) => number): Fault {
  return (kernel, values) =>
    kernel(...values.map((value, i) => (i === index ? change(value as number, values) : value)));
}

/**
 * Runs the kernel, then changes float32 `index` of an array: an argument, or a field of the struct that comes first.
 */
export function spoiled(argument: number | string, index: number, change: (value: number) => number): Fault {
  return (kernel, values, device) => {
    kernel(...values);
    const array = typeof argument === 'number' ? values[argument] : (values[0] as StructArgument)[argument];
    const address = (array as Addressable).pointer + BigInt(4 * index);
    const bytes = new Uint8Array(4);
    const view = new DataView(bytes.buffer);
    device.download(address, bytes);
    view.setFloat32(0, change(view.getFloat32(0, true)), true);
    device.upload(address, bytes);
  };
}
