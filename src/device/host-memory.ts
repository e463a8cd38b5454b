/** Buffers of the host for large copies to a device, and for small results from it. */
import type { Device, HostMemory } from './device.js';

/** Memory from which the device copies at full speed: pinned for a GPU. */
export function hostMemory(device: Device, size: number): HostMemory {
  return device.hostMemory?.(size) ?? plainMemory(device, size);
}

function plainMemory(device: Device, size: number): HostMemory {
  const memory = new Uint8Array(size);
  const upload = (to: bigint, bytes: number) => {
    device.upload(to, memory.subarray(0, bytes));
    return () => {};
  };
  const download = (from: bigint, bytes: number) => {
    device.download(from, memory.subarray(0, bytes));
    return () => {};
  };
  return { bytes: memory, upload, download, free: () => {} };
}

const RESULT_SLOTS = 2;

/**
 * Copies of small results that are made in the order of the device's work: a result can be read after work that overwrites it
 * was launched. At most two may be unread.
 */
export class ResultCopies {
  readonly bytes: number;
  readonly #slots: readonly HostMemory[];
  #next = 0;

  /** `bytes`: of the largest result. */
  constructor(device: Device, bytes: number) {
    this.bytes = bytes;
    this.#slots = Array.from({ length: RESULT_SLOTS }, () => hostMemory(device, bytes));
  }

  /** Copies what the work launched so far leaves at `address`. Returns a function that waits for it. */
  start(address: bigint, bytes: number): () => Uint8Array {
    const memory = this.#slots[this.#next];
    this.#next = (this.#next + 1) % RESULT_SLOTS;
    const wait = memory.download(address, bytes);
    return () => {
      wait();
      return memory.bytes.slice(0, bytes);
    };
  }

  free(): void {
    for (const memory of this.#slots) memory.free();
  }
}
