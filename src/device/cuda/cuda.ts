/**
 * One NVIDIA GPU as a device. All work goes to one stream (stream.ts), in the order of the calls; the host waits only in
 * `download` and `synchronize`. Two streams may run beside it: copies of batches (copy-queue.ts) and collectives (nccl.ts).
 */
import { fileURLToPath } from 'node:url';
import { UsageError } from '../../errors.js';
import {
  type Device,
  expectDevice,
  type KernelModule,
  type Kernels,
  type MemoryUse,
  type Signatures,
} from '../device.js';
import { KernelCache, kernelCacheFolder } from '../kernel-cache.js';
import type { MemoryPool } from '../pool.js';
import { CudaClock, type TimelineEntry } from './clock.js';
import { CudaCompiler, type CudaCompilerOptions, tryBackend } from './compile.js';
import { CublasLt } from './cublaslt.js';
import { ATTRIBUTE, CudaError, Driver } from './driver.js';
import { CudaGraph } from './graph.js';
import { Launcher } from './launcher.js';
import { LibraryMissing } from './libraries.js';
import { LoadedCode } from './loaded-code.js';
import { CudaMemory } from './memory.js';
import type { CudaCode, CudaRuntime, Macros, MatrixProduct } from './runtime.js';
import { Staging } from './staging.js';
import { DeviceStream, type Lookout } from './stream.js';

const SMALLEST_ARCHITECTURE = 80;

export interface CudaOptions {
  /** Which GPU, counted from 0 among the visible ones. */
  readonly index?: number;
  readonly compiler?: Partial<CudaCompilerOptions>;
  /** Matrix products by the library's first choice instead of the fastest in a trial: bitwise equal runs. */
  readonly deterministic?: boolean;
}

let absence: string | null | undefined;

/** Why there is no CUDA here, in one sentence; null when there is. Asked once per process. */
export function cudaAbsence(): string | null {
  if (absence === undefined) absence = findAbsence();
  return absence;
}

function findAbsence(): string | null {
  if (process.platform !== 'linux') return `no CUDA device: ${process.platform} has no CUDA`;
  try {
    const driver = new Driver();
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

/** How many GPUs this process sees. */
export function gpuCount(): number {
  return new Driver().getInt('cuDeviceGetCount');
}

/** Memory of a GPU in bytes, without opening it. */
export function gpuMemoryBytes(index = 0): number {
  const driver = new Driver();
  return Number(driver.get('cuDeviceTotalMem_v2', driver.getInt('cuDeviceGet', index)));
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
      throw new UsageError(`there is no GPU ${index}: this machine shows ${count}, counted from 0`);
    const device = driver.getInt('cuDeviceGet', index);
    this.driver = driver;
    this.#index = device;
    this.#deterministic = options.deterministic ?? false;
    this.name = driver.deviceName(device);
    this.multiprocessors = driver.attribute(device, ATTRIBUTE.multiprocessors);
    this.architecture = 10 * driver.attribute(device, ATTRIBUTE.major) + driver.attribute(device, ATTRIBUTE.minor);
    if (this.architecture < SMALLEST_ARCHITECTURE)
      throw new UsageError(
        `${this.name} has compute capability ${this.architecture / 10}: 8.0 (A100, RTX 30) or newer is needed`,
      );
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

  /** What tells this GPU from all others, on every machine. */
  get uuid(): string {
    return this.driver.deviceUuid(this.#index);
  }

  get stream(): bigint {
    return this.#stream.handle;
  }

  /** Looks about while the host waits for the GPU. */
  get lookout(): Lookout | null {
    return this.#stream.lookout;
  }
  set lookout(lookout: Lookout | null) {
    this.#stream.lookout = lookout;
  }

  get pool(): MemoryPool {
    return this.#memory.pool;
  }

  get memory(): MemoryUse {
    return this.#memory.use;
  }

  /** Kernels launched so far, replays of graphs not counted. */
  get launches(): number {
    return this.#launcher.launches + this.#products;
  }

  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    let kernels = this.#modules.get(module);
    if (!kernels) {
      if (!module.cuda) throw new UsageError(`${module.folder} has no CUDA kernels`);
      kernels = checked(this, module.cuda(this) as Kernels<Signatures>);
      this.#modules.set(module, kernels);
    }
    return kernels as Kernels<S>;
  }

  compile(source: URL, macros: Macros = {}): CudaCode {
    const path = fileURLToPath(source);
    const key = JSON.stringify([path, macros]);
    let code = this.#code.get(key);
    if (!code) {
      const cubin = this.compiler.cubin(path, macros);
      this.lookout?.busy?.();
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
    cublas.prepare(product); // outside the marks: a trial is not the product's time
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
    // From memory that is not pinned the driver takes a copy before it returns, and keeps the stream's order.
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

  /** A pool beside the device's own: a graph works in one, so that nothing else is put there between replays. */
  newPool(): MemoryPool {
    return this.#memory.newPool();
  }

  /** Gives a pool up: now, or when the last of its blocks has come back. */
  dropPool(pool: MemoryPool): void {
    this.#memory.dropPool(pool);
  }

  /** Runs `work` with memory from `pool`. */
  withPool<T>(pool: MemoryPool, work: () => T): T {
    return this.#memory.withPool(pool, work);
  }

  /**
   * Records what `work` launches, without running it, to be replayed as often as one likes. Run it once for real
   * before, with the same pool: then everything is compiled and every block is there. It must not wait for the device.
   */
  record(work: () => void): CudaGraph {
    return new CudaGraph(this.#stream, work);
  }

  /** The device's time of everything `work` launches, by name; a graph's replay shows nothing. */
  profile(work: () => void): Map<string, { calls: number; ms: number }> {
    return this.#clock.profile(work);
  }

  /** When everything that `work` launches begins and ends, on each stream; a graph's replay shows nothing. */
  timeline(work: () => void): TimelineEntry[] {
    return this.#clock.timeline(work);
  }

  /** Runs `launch`, which launches something on `stream`, between two events while a timeline is taken. */
  marked(name: string | (() => string), stream: bigint, launch: () => void): void {
    this.#clock.marked(name, stream, launch);
  }

  /** Milliseconds of each of `repeats` runs on the device, measured by its own clock. */
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

function productName({ m, n, k, a, c, d, accumulate }: MatrixProduct): string {
  const into = d.dtype === a.dtype ? '' : ` to ${d.dtype}`;
  return `product ${m}x${n}x${k} ${a.dtype}${into}${accumulate ? ', added' : c ? ', sum' : ''}`;
}

/** The same kernels, which refuse tensors of another device. */
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
