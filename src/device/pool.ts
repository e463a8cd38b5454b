/**
 * Memory pool of a device. Freed blocks are kept and reused, so a training step in steady state allocates nothing from the
 * system: `systemAllocations` stops growing.
 */
import type { MemoryBlock } from './device.js';

/**
 * Allocates device memory from the system.
 *
 * @opaque
 */
export interface Allocator {
  /** Reserves memory of the device and returns its address. */
  allocate(bytes: number): bigint;
  /** Returns memory to the device. */
  free(address: bigint): void;
}

/** A block in use, with the call that took it. */
export interface Allocation {
  readonly bytes: number;
  /** The innermost stack frames outside of the tensor classes, one a line. */
  readonly where: string;
}

const SMALLEST = 256;
const FRAMES = 4;
const OWN_FRAME = /[\\/](device[\\/]pool|tensor[\\/](tensor|tape))\.[jt]s/;

/** The call that is under way, without the frames of this file and of tensors. */
export function callSite(): string {
  const frames = (new Error().stack ?? '').split('\n').slice(1);
  return frames
    .filter((frame) => !OWN_FRAME.test(frame))
    .slice(0, FRAMES)
    .map((frame) => frame.trim())
    .join('\n');
}

/** Rounds up to one of eight sizes per power of two: at most 12.5 % is wasted, and similar sizes share blocks. */
function bucketSize(bytes: number): number {
  if (bytes <= SMALLEST) return SMALLEST;
  const step = 2 ** (Math.floor(Math.log2(bytes - 1)) - 3);
  const rounded = Math.ceil(bytes / step) * step;
  return Math.ceil(rounded / SMALLEST) * SMALLEST;
}

/** Allocates device memory and reuses freed blocks. */
export class MemoryPool {
  readonly #allocator: Allocator;
  readonly #free = new Map<number, MemoryBlock[]>();
  #bytesInUse = 0;
  #bytesReserved = 0;
  #peakBytesInUse = 0;
  #systemAllocations = 0;
  #allocations: Map<MemoryBlock, Allocation> | null = null;

  constructor(allocator: Allocator) {
    this.#allocator = allocator;
  }

  /** A block of at least this size: a returned one if there is one, otherwise a new one. */
  take(bytes: number): MemoryBlock {
    const size = bucketSize(bytes);
    const reused = this.#free.get(size)?.pop();
    const block = reused ?? { address: this.#allocator.allocate(size), bytes: size };
    if (!reused) {
      this.#systemAllocations += 1;
      this.#bytesReserved += size;
    }
    this.#bytesInUse += size;
    this.#peakBytesInUse = Math.max(this.#peakBytesInUse, this.#bytesInUse);
    this.#allocations?.set(block, { bytes: size, where: callSite() });
    return block;
  }

  /** Returns a block to the pool. */
  give(block: MemoryBlock): void {
    this.#bytesInUse -= block.bytes;
    this.#allocations?.delete(block);
    const list = this.#free.get(block.bytes);
    if (list) list.push(block);
    else this.#free.set(block.bytes, [block]);
  }

  /** Records from now on where each block is taken, to find leaks. Costs a stack trace per tensor: for tests. */
  trace(): void {
    this.#allocations = new Map();
  }
  /** Whether the place of each allocation is recorded. */
  get isTracing(): boolean {
    return this.#allocations !== null;
  }
  /** Blocks that were taken since `trace` and are still in use. */
  get allocations(): readonly Allocation[] {
    return [...(this.#allocations?.values() ?? [])];
  }

  /** Returns all unused blocks to the system. */
  trim(): void {
    for (const list of this.#free.values()) {
      for (const block of list) {
        this.#allocator.free(block.address);
        this.#bytesReserved -= block.bytes;
      }
    }
    this.#free.clear();
  }

  /** Starts a new measurement of the peak. */
  resetPeak(): void {
    this.#peakBytesInUse = this.#bytesInUse;
  }

  /** Bytes of all blocks in use. */
  get bytesInUse(): number {
    return this.#bytesInUse;
  }
  /** Bytes taken from the device, in use or not. */
  get bytesReserved(): number {
    return this.#bytesReserved;
  }
  /** The largest `bytesInUse` so far. */
  get peakBytesInUse(): number {
    return this.#peakBytesInUse;
  }
  /** Number of allocations from the system. */
  get systemAllocations(): number {
    return this.#systemAllocations;
  }
}
