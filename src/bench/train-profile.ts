/**
 * Where a step's time goes: a device wrapper that forwards every call and records the time of each kernel by
 * name. It changes no result and adds two clock readings a call, so a profiled step is as fast as any other. On CUDA,
 * where a call returns before its work is done, it waits after every call: shares are correct, the total is too long.
 */
import type { Device, DeviceKind, KernelModule, Kernels, MemoryUse, Signatures } from '../device/device.js';
import type { MemoryPool } from '../device/pool.js';

export interface ProfileRow {
  /** The kernel, a copy of the device, or the remaining time of the host. */
  readonly name: string;
  /** Per step, like `ms`. */
  readonly calls: number;
  readonly ms: number;
  readonly share: number;
  /** Null where the kernel's operations are not known or do not matter. */
  readonly gflops: number | null;
}

/** Operations of one call; 0 where they are not known. */
export type CallFlops = (kernel: string, values: readonly unknown[]) => number;

interface Entry {
  calls: number;
  ms: number;
  flops: number;
}

/** Time that no kernel took: the tape, the pool, argument passing, and whatever else the machine was doing. */
const HOST = '(host)';

/** Per step, the longest first, and what is left of the wall's time for the host. */
export function profileRows(
  entries: ReadonlyMap<string, { readonly calls: number; readonly ms: number; readonly flops?: number }>,
  wallMs: number,
  steps: number,
): ProfileRow[] {
  const inKernels = [...entries.values()].reduce((sum, { ms }) => sum + ms, 0);
  const host = { calls: 0, ms: Math.max(0, wallMs - inKernels), flops: 0 };
  return [...entries, [HOST, host] as const]
    .map(([name, { calls, ms, flops = 0 }]) => ({
      name,
      calls: calls / steps,
      ms: ms / steps,
      share: ms / wallMs,
      gflops: flops > 0 ? flops / ms / 1e6 : null,
    }))
    .sort((a, b) => b.ms - a.ms);
}

export class TimedDevice implements Device {
  readonly #inner: Device;
  readonly #flops: CallFlops;
  readonly #modules = new Map<KernelModule, Kernels<Signatures>>();
  #entries = new Map<string, Entry>();
  #since = performance.now();

  constructor(inner: Device, flops: CallFlops) {
    this.#inner = inner;
    this.#flops = flops;
  }

  get kind(): DeviceKind {
    return this.#inner.kind;
  }
  get name(): string {
    return this.#inner.name;
  }
  get pool(): MemoryPool {
    return this.#inner.pool;
  }

  get memory(): MemoryUse {
    return this.#inner.memory;
  }

  freeBytes(): number {
    return this.#inner.freeBytes();
  }

  /** Workspace of the CPU kernels. */
  get scratchBytes(): number {
    return 'scratchBytes' in this.#inner ? Number(this.#inner.scratchBytes) : 0;
  }

  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    let timed = this.#modules.get(module);
    if (!timed) {
      const own = Object.entries(this.#inner.kernels<Signatures>(module)).map(([name, kernel]) => {
        const call = (...values: Parameters<typeof kernel>) =>
          this.#time(name, this.#flops(name, values), () => kernel(...values));
        return [name, call] as const;
      });
      timed = Object.fromEntries(own);
      this.#modules.set(module, timed);
    }
    return timed as Kernels<S>;
  }

  upload(address: bigint, bytes: Uint8Array): void {
    this.#time('(upload)', 0, () => this.#inner.upload(address, bytes));
  }
  download(address: bigint, into: Uint8Array): void {
    this.#time('(download)', 0, () => this.#inner.download(address, into));
  }
  fillZero(address: bigint, bytes: number): void {
    this.#time('(zero)', 0, () => this.#inner.fillZero(address, bytes));
  }
  fill(address: bigint, value: number, count: number): void {
    this.#time('(fill)', 0, () => this.#inner.fill(address, value, count));
  }
  copy(to: bigint, from: bigint, bytes: number): void {
    this.#time('(copy)', 0, () => this.#inner.copy(to, from, bytes));
  }
  synchronize(): void {
    this.#inner.synchronize();
  }

  /** Discards all records: ends the warm-up. */
  restart(): void {
    this.#entries = new Map();
    this.#since = performance.now();
  }

  /** Records since `restart`, per step, the longest first. */
  rows(steps: number): ProfileRow[] {
    return profileRows(this.#entries, performance.now() - this.#since, steps);
  }

  #time(name: string, flops: number, call: () => void): void {
    const start = performance.now();
    call();
    this.#inner.synchronize();
    const ms = performance.now() - start;
    const entry = this.#entries.get(name);
    if (entry) {
      entry.calls += 1;
      entry.ms += ms;
      entry.flops += flops;
    } else this.#entries.set(name, { calls: 1, ms, flops });
  }
}
