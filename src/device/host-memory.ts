/** Buffers of the host for large copies to a device, and for small results from it. */

import { CudaDevice } from './cuda/cuda.js';
import type { Device } from './device.js';
import koffi from './koffi.js';

/** Memory of the host. */
export interface HostMemory {
  readonly bytes: Uint8Array;
  /** Address of pinned memory; 0 for memory of the JavaScript engine. */
  readonly address: bigint;
  /** Starts to copy its first bytes to the device; returns a function that waits until it may be changed. */
  upload(to: bigint, bytes: number): () => void;
  free(): void;
}

const EVENT_WITHOUT_TIME = 2;

/** Memory from which the device copies at full speed: pinned for a GPU. */
export function hostMemory(device: Device, size: number): HostMemory {
  if (!(device instanceof CudaDevice)) return plainMemory(device, size);
  const { driver, stream } = device;
  const address = driver.get('cuMemAllocHost_v2', size);
  const event = driver.get('cuEventCreate', EVENT_WITHOUT_TIME);
  return {
    bytes: new Uint8Array(koffi.view(address, size)),
    address,
    upload: (to, bytes) => {
      driver.call('cuMemcpyHtoDAsync_v2', to, address, bytes, stream);
      driver.call('cuEventRecord', event, stream);
      return () => driver.call('cuEventSynchronize', event);
    },
    free: () => {
      driver.call('cuMemFreeHost', address);
      driver.call('cuEventDestroy_v2', event);
    },
  };
}

function plainMemory(device: Device, size: number): HostMemory {
  const memory = new Uint8Array(size);
  const upload = (to: bigint, bytes: number) => {
    device.upload(to, memory.subarray(0, bytes));
    return () => {};
  };
  return { bytes: memory, address: 0n, upload, free: () => {} };
}

const RESULT_SLOTS = 2;

interface ResultSlot {
  readonly memory: HostMemory;
  readonly event: bigint;
}

/**
 * Copies of small results that are made in the order of the device's work: a result can be read after work that overwrites it
 * was launched. At most two may be unread.
 */
export class ResultCopies {
  readonly bytes: number;
  readonly #device: Device;
  readonly #slots: readonly ResultSlot[];
  #next = 0;

  /** `bytes`: of the largest result. */
  constructor(device: Device, bytes: number) {
    this.#device = device;
    this.bytes = bytes;
    this.#slots = Array.from({ length: RESULT_SLOTS }, () => ({
      memory: hostMemory(device, bytes),
      event: device instanceof CudaDevice ? device.driver.get('cuEventCreate', EVENT_WITHOUT_TIME) : 0n,
    }));
  }

  /** Copies what the work launched so far leaves at `address`. Returns a function that waits for it. */
  start(address: bigint, bytes: number): () => Uint8Array {
    const { memory, event } = this.#slots[this.#next];
    this.#next = (this.#next + 1) % RESULT_SLOTS;
    const device = this.#device;
    if (!(device instanceof CudaDevice)) {
      device.download(address, memory.bytes.subarray(0, bytes));
      return () => memory.bytes.slice(0, bytes);
    }
    const { driver, stream } = device;
    driver.call('cuMemcpyDtoHAsync_v2', memory.address, address, bytes, stream);
    driver.call('cuEventRecord', event, stream);
    return () => {
      driver.call('cuEventSynchronize', event);
      return memory.bytes.slice(0, bytes);
    };
  }

  free(): void {
    for (const { memory, event } of this.#slots) {
      memory.free();
      if (this.#device instanceof CudaDevice) this.#device.driver.call('cuEventDestroy_v2', event);
    }
  }
}
