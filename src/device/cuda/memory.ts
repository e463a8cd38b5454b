/** The GPU's memory: several pools that share it, and what happens when it runs out. */
import { OutOfMemory } from '../../errors.js';
import type { MemoryUse } from '../device.js';
import { MemoryPool } from '../pool.js';
import { CudaError } from './driver.js';
import type { DeviceStream } from './stream.js';

const MIB = 2 ** 20;

export class CudaMemory {
  readonly #stream: DeviceStream;
  readonly #pools = new Set<MemoryPool>();
  readonly #retired = new Set<MemoryPool>();
  #pool: MemoryPool;

  constructor(stream: DeviceStream) {
    this.#stream = stream;
    this.#pool = this.newPool();
  }

  /** The current pool. */
  get pool(): MemoryPool {
    return this.#pool;
  }

  get use(): MemoryUse {
    this.#forgetRetired();
    const sum = (of: (pool: MemoryPool) => number) => [...this.#pools].reduce((total, pool) => total + of(pool), 0);
    return {
      usedBytes: sum((pool) => pool.bytesInUse),
      peakBytes: sum((pool) => pool.peakBytesInUse),
      reservedBytes: sum((pool) => pool.bytesReserved),
    };
  }

  newPool(): MemoryPool {
    const pool = new MemoryPool({
      allocate: (bytes) => this.allocate(bytes),
      free: (address) => this.#stream.driver.call('cuMemFree_v2', address),
    });
    this.#pools.add(pool);
    return pool;
  }

  dropPool(pool: MemoryPool): void {
    this.#retired.add(pool);
    this.#forgetRetired();
  }

  withPool<T>(pool: MemoryPool, work: () => T): T {
    const outer = this.#pool;
    this.#pool = pool;
    try {
      return work();
    } finally {
      this.#pool = outer;
    }
  }

  withScratch<T>(bytes: number, use: (address: bigint) => T): T {
    const block = this.#pool.take(bytes);
    try {
      return use(block.address);
    } finally {
      this.#pool.give(block); // later users come after these launches in stream order
    }
  }

  /** Runs `use` with memory outside the pools, so that they do not grow; returns null if there is not enough. */
  withSpare<T>(bytes: number, use: (address: bigint) => T): T | null {
    const { driver } = this.#stream;
    let address: bigint;
    try {
      address = driver.get('cuMemAlloc_v2', bytes);
    } catch (error) {
      if (error instanceof CudaError && error.isOutOfMemory) return null;
      throw error;
    }
    try {
      return use(address);
    } finally {
      this.#stream.synchronize();
      driver.call('cuMemFree_v2', address);
    }
  }

  /** Allocates memory outside the pools. */
  allocate(bytes: number): bigint {
    const { driver } = this.#stream;
    try {
      return driver.get('cuMemAlloc_v2', bytes);
    } catch (error) {
      if (!(error instanceof CudaError && error.isOutOfMemory)) throw error;
    }
    // Unused blocks of the pools can be freed, after the device has finished with them.
    this.#stream.synchronize();
    for (const pool of this.#pools) pool.trim();
    try {
      return driver.get('cuMemAlloc_v2', bytes);
    } catch (error) {
      if (!(error instanceof CudaError && error.isOutOfMemory)) throw error;
      throw this.#outOfMemory(bytes);
    }
  }

  #forgetRetired(): void {
    for (const pool of this.#retired) {
      pool.trim();
      if (pool.bytesReserved > 0) continue;
      this.#retired.delete(pool);
      this.#pools.delete(pool);
    }
  }

  #outOfMemory(bytes: number): OutOfMemory {
    const mib = (count: number) => `${(count / MIB).toFixed(0)} MiB`;
    const { free, total } = this.#stream.driver.memory();
    return new OutOfMemory(
      `out of GPU memory: ${mib(bytes)} were requested, ${mib(free)} of ${mib(total)} are free and this run holds ` +
        `${mib(this.use.reservedBytes)}; lower train.batch_size or train.seq_len, set runtime.gradient_checkpointing, ` +
        'or use runtime.precision bf16',
    );
  }
}
