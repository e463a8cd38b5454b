/** A fixed number of buffers for files that are read. */
import type { Device } from '../../device/device.js';
import { type HostMemory, hostMemory } from '../../device/host-memory.js';

export class ReadBuffers {
  readonly #all: readonly HostMemory[];
  readonly #free: HostMemory[];
  readonly #waiting: ((memory: HostMemory) => void)[] = [];

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

  /** To be called when all buffers were given back. */
  free(): void {
    for (const memory of this.#all) memory.free();
  }
}
