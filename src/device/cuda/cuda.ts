/**
 * One NVIDIA GPU as a device. All work goes to one stream (stream.ts), in call order; the host waits only in `download` and
 * `synchronize`. Two more streams may run concurrently: copies of batches (copy-queue.ts) and collectives (nccl.ts).
 */
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { UsageError } from '../../errors.js';
import {
  type Device,
  expectDevice,
  type HostMemory,
  type KernelModule,
  type Kernels,
  type MemoryUse,
  type Signatures,
} from '../device.js';
import { KernelCache, kernelCacheFolder } from '../kernel-cache.js';
import { koffiAbsence } from '../koffi.js';
import type { MemoryPool } from '../pool.js';
import { CudaClock, type TimelineEntry } from './clock.js';
import { CudaCompiler, type CudaCompilerOptions, tryBackend } from './compile.js';
import { CublasLt } from './cublaslt.js';
import { ATTRIBUTE, CudaError, Driver } from './driver.js';
import { Launcher } from './launcher.js';
import { LibraryMissing } from './libraries.js';
import { LoadedCode } from './loaded-code.js';
import { CudaMemory } from './memory.js';
import { pinnedMemory } from './pinned-memory.js';
import type { CudaCode, CudaRuntime, KernelMacros, MatrixProduct } from './runtime.js';
import { CudaGraph, DeviceStream, Staging, type WaitMonitor } from './stream.js';

const SMALLEST_ARCHITECTURE = 80;
/** PCI vendor number. */
const NVIDIA_VENDOR = '0x10de';

export interface CudaOptions {
  /** Index among the visible GPUs; defaults to 0. */
  readonly index?: number;
  readonly compiler?: Partial<CudaCompilerOptions>;
  /** Uses cuBLASLt's first algorithm instead of the fastest in a trial, so that runs are bitwise equal. */
  readonly deterministic?: boolean;
}

let absence: string | null | undefined;

/** Why CUDA cannot be used, in one sentence; null if it can. Determined once per process. */
export function cudaAbsence(): string | null {
  if (absence === undefined) absence = findAbsence();
  return absence;
}

function findAbsence(): string | null {
  if (process.platform !== 'linux') return `no CUDA device: ${process.platform} has no CUDA`;
  const withoutNative = koffiAbsence();
  if (withoutNative !== null) return `no CUDA device: ${withoutNative}`;
  try {
    const driver = openDriver();
    if (driver === null) return 'no CUDA device: no NVIDIA GPU found';
    if (driver.getInt('cuDeviceGetCount') === 0) return 'no CUDA device: the driver finds no GPU';
    const backend = tryBackend();
    // Without a compiler the GPU can be used if kernels were compiled before.
    if (backend instanceof LibraryMissing && new KernelCache(kernelCacheFolder(process.env), 'cubin').isEmpty)
      throw backend;
    return null;
  } catch (error) {
    if (error instanceof LibraryMissing || error instanceof CudaError) return `no CUDA device: ${error.message}`;
    throw error;
  }
}

/** Null where neither the driver nor a GPU is present: to install a driver would not help there. */
function openDriver(): Driver | null {
  try {
    return new Driver();
  } catch (error) {
    if (error instanceof LibraryMissing && !hasNvidiaHardware()) return null;
    throw error;
  }
}

/** Whether the PCI bus or the system shows hardware of NVIDIA, also inside a container without GPU access. */
function hasNvidiaHardware(): boolean {
  const bus = '/sys/bus/pci/devices';
  if (['/proc/driver/nvidia', '/dev/nvidiactl', '/dev/dxg'].some((path) => existsSync(path))) return true;
  if (!existsSync(bus)) return false;
  return readdirSync(bus).some((name) => readFileSync(`${bus}/${name}/vendor`, 'utf8').trim() === NVIDIA_VENDOR);
}

/** Number of visible GPUs. */
export function gpuCount(): number {
  return new Driver().getInt('cuDeviceGetCount');
}

/** Memory of a GPU in bytes, without opening it. */
export function gpuMemoryBytes(index = 0): number {
  const driver = new Driver();
  return Number(driver.get('cuDeviceTotalMem_v2', driver.getInt('cuDeviceGet', index)));
}

/** Why the kernels do not support a GPU of this architecture (10 times its compute capability), or null. */
export function capabilityRefusal(name: string, architecture: number): string | null {
  if (architecture >= SMALLEST_ARCHITECTURE) return null;
  return (
    `${name} has compute capability ${(architecture / 10).toFixed(1)}, and the kernels need 8.0 (A100, RTX 30) or newer, ` +
    'for bf16: V100 (7.0) and T4 (7.5) are not supported; use --device cpu'
  );
}

export class CudaDevice implements Device, CudaRuntime {
  readonly kind = 'cuda';
  readonly name: string;
  readonly multiprocessors: number;
  readonly architecture: number;
  readonly totalBytes: number;
  readonly driver: Driver;
  readonly compiler: CudaCompiler;
  readonly #index: number;
  readonly #deterministic: boolean;
  readonly #stream: DeviceStream;
  readonly #memory: CudaMemory;
  readonly #staging: Staging;
  readonly #launcher: Launcher;
  readonly #clock: CudaClock;
  readonly #code = new Map<string, LoadedCode>();
  readonly #modules = new Map<KernelModule, Kernels<Signatures>>();
  #cublas: CublasLt | null = null;
  #products = 0;

  constructor(options: CudaOptions = {}) {
    const missing = cudaAbsence();
    if (missing) throw new UsageError(missing);
    const driver = new Driver();
    const count = driver.getInt('cuDeviceGetCount');
    const index = options.index ?? 0;
    if (!Number.isInteger(index) || index < 0 || index >= count)
      throw new UsageError(`there is no GPU ${index}: ${count} are visible, numbered from 0`);
    const device = driver.getInt('cuDeviceGet', index);
    this.driver = driver;
    this.#index = device;
    this.#deterministic = options.deterministic ?? false;
    this.name = driver.deviceName(device);
    this.multiprocessors = driver.attribute(device, ATTRIBUTE.multiprocessors);
    this.architecture = 10 * driver.attribute(device, ATTRIBUTE.major) + driver.attribute(device, ATTRIBUTE.minor);
    const refusal = capabilityRefusal(this.name, this.architecture);
    if (refusal !== null) throw new UsageError(refusal);
    driver.call('cuCtxSetCurrent', driver.get('cuDevicePrimaryCtxRetain', device));
    this.totalBytes = driver.memory().total;
    this.#stream = new DeviceStream(driver);
    this.compiler = new CudaCompiler(this.architecture, tryBackend(), {
      cache: kernelCacheFolder(process.env),
      ...options.compiler,
    });
    this.#memory = new CudaMemory(this.#stream);
    this.#staging = new Staging(this.#stream);
    this.#launcher = new Launcher(this.#stream, this.architecture);
    this.#clock = new CudaClock(this.#stream);
  }

  /** Identifies this GPU among all GPUs of all machines. */
  get uuid(): string {
    return this.driver.deviceUuid(this.#index);
  }

  get stream(): bigint {
    return this.#stream.handle;
  }

  /** Pinned memory. */
  hostMemory(size: number): HostMemory {
    return pinnedMemory(this.driver, this.stream, size);
  }

  /** Called while the host waits for the GPU. */
  get waitMonitor(): WaitMonitor | null {
    return this.#stream.waitMonitor;
  }
  set waitMonitor(monitor: WaitMonitor | null) {
    this.#stream.waitMonitor = monitor;
  }

  get pool(): MemoryPool {
    return this.#memory.pool;
  }

  get memory(): MemoryUse {
    return this.#memory.use;
  }

  freeBytes(): number {
    return this.driver.memory().free;
  }

  /** Number of kernels launched, without those that graphs replay. */
  get launches(): number {
    return this.#launcher.launches + this.#products;
  }

  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    let kernels = this.#modules.get(module);
    if (!kernels) {
      if (!module.cuda) throw new UsageError(`${module.url} has no CUDA kernels`);
      kernels = checked(this, module.cuda(this) as Kernels<Signatures>);
      this.#modules.set(module, kernels);
    }
    return kernels as Kernels<S>;
  }

  compile(source: URL, macros: KernelMacros = {}): CudaCode {
    const path = fileURLToPath(source);
    const key = JSON.stringify([path, macros]);
    let code = this.#code.get(key);
    if (!code) {
      const cubin = this.compiler.cubin(path, macros);
      this.waitMonitor?.busy?.();
      code = new LoadedCode(this.driver, cubin, path, (name, kernel, shape, values) =>
        this.marked(name, this.stream, () => this.#launcher.launch(kernel, shape, values)),
      );
      this.#code.set(key, code);
    }
    return code;
  }

  matrixProduct(product: MatrixProduct): void {
    this.#cublas ??= this.#openCublas();
    this.#products += 1;
    const cublas = this.#cublas;
    cublas.prepare(product); // not timed: a trial is not part of the product
    this.marked(
      () => productName(product),
      this.stream,
      () => cublas.product(product),
    );
  }

  withScratch<T>(bytes: number, use: (address: bigint) => T): T {
    return this.#memory.withScratch(bytes, use);
  }

  upload(address: bigint, bytes: Uint8Array): void {
    // The driver copies from pageable memory before the call returns, and keeps the stream's order. From pinned memory
    // (host-memory.ts) it may still copy afterwards.
    if (bytes.byteLength > 0) this.driver.call('cuMemcpyHtoDAsync_v2', address, bytes, bytes.byteLength, this.stream);
  }

  download(address: bigint, into: Uint8Array): void {
    this.#staging.download(address, into);
  }

  fillZero(address: bigint, bytes: number): void {
    if (bytes > 0)
      this.marked('(zero)', this.stream, () => this.driver.call('cuMemsetD8Async', address, 0, bytes, this.stream));
  }

  fill(address: bigint, value: number, count: number): void {
    const bits = new Uint32Array(Float32Array.of(value).buffer)[0];
    if (count > 0) this.driver.call('cuMemsetD32Async', address, bits, count, this.stream);
  }

  copy(to: bigint, from: bigint, bytes: number): void {
    if (bytes > 0)
      this.marked('(copy)', this.stream, () => this.driver.call('cuMemcpyDtoDAsync_v2', to, from, bytes, this.stream));
  }

  synchronize(): void {
    this.#stream.synchronize();
  }

  /** Creates a second pool. A graph uses its own, so that nothing else is allocated there between replays. */
  newPool(): MemoryPool {
    return this.#memory.newPool();
  }

  /** Frees a pool, at the latest when its last block is returned. */
  dropPool(pool: MemoryPool): void {
    this.#memory.dropPool(pool);
  }

  /** Runs `work` with `pool` as the current pool. */
  withPool<T>(pool: MemoryPool, work: () => T): T {
    return this.#memory.withPool(pool, work);
  }

  /**
   * Records the launches of `work`, without running them, as a graph. Run `work` once before, with the same pool, so that
   * all kernels are compiled and all blocks allocated. `work` must not wait for the device.
   */
  record(work: () => void): CudaGraph {
    return new CudaGraph(this.#stream, work);
  }

  /** GPU time of the launches of `work`, by name. Launches inside a graph are not seen. */
  profile(work: () => void): Map<string, { calls: number; ms: number }> {
    return this.#clock.profile(work);
  }

  /** Start and end of each launch of `work`, on all streams. Launches inside a graph are not seen. */
  timeline(work: () => void): TimelineEntry[] {
    return this.#clock.timeline(work);
  }

  /** Runs `launch`, which launches work on `stream`; records events around it while a timeline is taken. */
  marked(name: string | (() => string), stream: bigint, launch: () => void): void {
    this.#clock.marked(name, stream, launch);
  }

  /** GPU time of each of `repeats` runs of `work`, in milliseconds. */
  time(work: () => void, repeats: number): number[] {
    return this.#clock.time(work, repeats);
  }

  #openCublas(): CublasLt {
    const trial = {
      possible: () => !this.#stream.isCapturing,
      withMemory: <T>(bytes: number, use: (address: bigint) => T) => this.#memory.withSpare(bytes, use),
      time: (work: () => void, repeats: number) => this.time(work, repeats),
    };
    return new CublasLt({
      stream: this.stream,
      allocate: (bytes) => this.#memory.allocate(bytes),
      trial: this.#deterministic ? null : trial,
    });
  }
}

function productName({ m, n, k, a, b, c, d, accumulate, batch = 1 }: MatrixProduct): string {
  const from = a.dtype === b.dtype ? a.dtype : `${a.dtype} by ${b.dtype}`;
  const into = d.dtype === a.dtype ? '' : ` to ${d.dtype}`;
  const size = `${batch > 1 ? `${batch} x ` : ''}${m}x${n}x${k}`;
  return `product ${size} ${from}${into}${accumulate ? ', added' : c ? ', sum' : ''}`;
}

/** Wraps kernels so that they refuse tensors of another device. */
function checked(device: Device, kernels: Kernels<Signatures>): Kernels<Signatures> {
  return Object.fromEntries(
    Object.entries(kernels).map(([name, kernel]) => [
      name,
      (...values: Parameters<typeof kernel>) => {
        for (const value of values) if (typeof value === 'object' && value) expectDevice(device, value, name);
        kernel(...values);
      },
    ]),
  );
}
