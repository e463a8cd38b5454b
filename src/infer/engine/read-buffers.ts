/** A fixed number of buffers for files that are read, on their way to the device. */
import type { Device } from '../../device/device.js';
import { type HostMemory, hostMemory } from '../../device/host-memory.js';

/** Copies to the device that are not waited for. */
const IN_FLIGHT = 8;

export class ReadBuffers {
  readonly #all: readonly HostMemory[];
  readonly #free: HostMemory[];
  readonly #waiting: ((memory: HostMemory) => void)[] = [];
  /** Buffers that the device copies from, the oldest first. */
  readonly #copied: { readonly memory: HostMemory; readonly wait: () => void }[] = [];

  constructor(device: Device, count: number, bytes: number) {
    this.#all = Array.from({ length: count }, () => hostMemory(device, bytes));
    this.#free = [...this.#all];
  }

  /** A buffer; waits until one is given back if all are taken, in the order of the calls. */
  async take(): Promise<HostMemory> {
    return this.#free.pop() ?? new Promise((resolve) => this.#waiting.push(resolve));
  }

  give(memory: HostMemory): void {
    const next = this.#waiting.shift();
    if (next) next(memory);
    else this.#free.push(memory);
  }

  /** Starts to copy the first bytes of a buffer to the device, and gives it back when that is done. */
  upload(memory: HostMemory, address: bigint, bytes: number): void {
    this.#copied.push({ memory, wait: memory.upload(address, bytes) });
    if (this.#copied.length > IN_FLIGHT) this.#settleOldest();
  }

  /** Waits for all copies. */
  settle(): void {
    while (this.#copied.length > 0) this.#settleOldest();
  }

  #settleOldest(): void {
    const oldest = this.#copied.shift();
    if (!oldest) return;
    oldest.wait();
    this.give(oldest.memory);
  }

  /** To be called when all buffers were given back. */
  free(): void {
    for (const memory of this.#all) memory.free();
  }
}
