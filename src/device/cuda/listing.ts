/**
 * A CUDA device without a GPU, which lists what it is asked to compile: memory is only accounted for, and launches do
 * nothing. A training step runs on one so that all of its kernels can be compiled at the same time, before the first step.
 */
import { fileURLToPath } from 'node:url';
import type { Device, KernelModule, Kernels, Signatures } from '../device.js';
import { MemoryPool } from '../pool.js';
import type { KernelRequest } from './compile.js';
import type { CudaCode, CudaRuntime, KernelMacros, MatrixProduct } from './runtime.js';

/** Properties of a GPU by which launchers choose kernels. */
export interface GpuFacts {
  /** Compute capability times ten. */
  readonly architecture: number;
  readonly multiprocessors: number;
}

/** Stands for tile sizes and the like that only compiled code knows. They determine launches, which do nothing here. */
const UNKNOWN = 64;

export class ListingCuda implements Device, CudaRuntime {
  readonly kind = 'cuda';
  readonly name = 'no GPU';
  readonly architecture: number;
  readonly multiprocessors: number;
  readonly pool: MemoryPool;
  readonly #requests = new Map<string, KernelRequest>();

  constructor({ architecture, multiprocessors }: GpuFacts) {
    this.architecture = architecture;
    this.multiprocessors = multiprocessors;
    let next = 4096n;
    const allocate = (bytes: number) => {
      const address = next;
      next += BigInt(bytes);
      return address;
    };
    this.pool = new MemoryPool({ allocate, free: () => {} });
  }

  /** The requested kernels, each once. */
  get requests(): readonly KernelRequest[] {
    return [...this.#requests.values()];
  }

  get memory() {
    const { bytesInUse, peakBytesInUse, bytesReserved } = this.pool;
    return { usedBytes: bytesInUse, peakBytes: peakBytesInUse, reservedBytes: bytesReserved };
  }

  freeBytes(): number {
    return 2 ** 37;
  }

  compile(source: URL, macros: KernelMacros = {}): CudaCode {
    const path = fileURLToPath(source);
    this.#requests.set(JSON.stringify([path, macros]), { source: path, macros });
    return { constant: () => UNKNOWN, launch: () => {} };
  }

  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    if (!module.cuda) throw new Error(`${module.url} has no CUDA kernels`);
    return module.cuda(this) as Kernels<S>;
  }

  matrixProduct(_: MatrixProduct): void {}
  withScratch<T>(_: number, use: (address: bigint) => T): T {
    return use(0n);
  }
  upload(): void {}
  download(_: bigint, into: Uint8Array): void {
    into.fill(0);
  }
  fillZero(): void {}
  fill(): void {}
  copy(): void {}
  synchronize(): void {}
}
