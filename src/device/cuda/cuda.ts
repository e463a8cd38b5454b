/**
 * One NVIDIA GPU as a device. All work goes to one stream, in the order of the calls; the host waits only in `download`
 * and `synchronize`. Two streams may run beside it: copies of batches (copy-queue.ts) and collectives (nccl.ts).
 */
import { fileURLToPath } from 'node:url';
import koffi from 'koffi';
import { TrefoilError, UsageError } from '../../errors.js';
import type { Device, KernelModule, Kernels, MemoryUse, Signatures } from '../device.js';
import { kernelCacheFolder } from '../kernel-cache.js';
import { MemoryPool } from '../pool.js';
import { AttributeLaunch, LAUNCH_ATTRIBUTE } from './attribute-launch.js';
import { CudaCompiler, type CudaCompilerOptions, findBackend } from './compile.js';
import { CublasLt } from './cublaslt.js';
import { ATTRIBUTE, CudaError, Driver } from './driver.js';
import { LibraryMissing } from './libraries.js';
import {
  type CudaCode,
  type CudaRuntime,
  Floating,
  type LaunchArgument,
  type LaunchShape,
  type Macros,
  type MatrixProduct,
} from './runtime.js';

const MIB = 2 ** 20;
const STREAM_NON_BLOCKING = 1;
/** Memory may be taken while capturing: a block that is new then is as good as an old one. */
const CAPTURE_RELAXED = 2;
/** Parameters of a kernel at most. */
const MOST_ARGUMENTS = 64;
const STAGING_BYTES = 32 * MIB;
/** Up to this much shared memory a kernel needs no permission. */
const FREE_SHARED = 48 * 1024;
const SMALLEST_ARCHITECTURE = 80;
/** With a lookout: how long the host asks without a pause, and then sleeps between two questions. */
const SPIN_MS = 0.3;
const WAIT_MS = 0.05;
const NOBODY = new Int32Array(new SharedArrayBuffer(4));
/** From here on a kernel may start before the one ahead of it ends. */
const OVERLAP_ARCHITECTURE = 90;

export interface CudaOptions {
  /** Which GPU, counted from 0 among the visible ones. */
  readonly index?: number;
  readonly compiler?: Partial<CudaCompilerOptions>;
  /** Matrix products by the library's first choice instead of the fastest in a trial: bitwise equal runs. */
  readonly deterministic?: boolean;
}

/** Somebody with a reason to end a wait: the GPU may wait for other ranks. */
export interface Lookout {
  /** Called again and again; what it throws ends the wait. */
  look(waitedMs: number): void;
  /** The wait is over. */
  resume(): void;
  /** The host was busy with something of its own, which takes its time. */
  busy?(): void;
  /** A graph begins, and with it whatever was recorded. */
  replay?(): void;
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
    findBackend();
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

export class CudaDevice implements Device, CudaRuntime {
  readonly kind = 'cuda';
  readonly name: string;
  readonly multiprocessors: number;
  readonly architecture: number;
  readonly totalBytes: number;
  readonly driver: Driver;
  readonly compiler: CudaCompiler;
  readonly stream: bigint;
  #pool: MemoryPool;
  readonly #pools = new Set<MemoryPool>();
  readonly #retired = new Set<MemoryPool>();
  readonly #code = new Map<string, LoadedCode>();
  readonly #modules = new Map<KernelModule, Kernels<Signatures>>();
  readonly #staging: Staging;
  #cublas: CublasLt | null = null;
  readonly #deterministic: boolean;
  #isRecording = false;
  /** Where the arguments of a launch are put: the driver copies them before the call returns. */
  readonly #arguments: ArgumentTable;
  readonly #overlapping: AttributeLaunch;
  readonly #cooperative: AttributeLaunch;
  #launches = 0;
  #marks: Mark[] | null = null;
  readonly #index: number;
  /** Looks about while the host waits for the GPU. */
  lookout: Lookout | null = null;

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
    this.stream = driver.get('cuStreamCreate', STREAM_NON_BLOCKING);
    this.compiler = new CudaCompiler(this.architecture, findBackend(), {
      cache: kernelCacheFolder(process.env),
      ...options.compiler,
    });
    this.#pool = this.newPool();
    this.#staging = new Staging(driver, STAGING_BYTES);
    this.#arguments = new ArgumentTable();
    this.#overlapping = new AttributeLaunch(this.stream, LAUNCH_ATTRIBUTE.programmaticStreamSerialization);
    this.#cooperative = new AttributeLaunch(this.stream, LAUNCH_ATTRIBUTE.cooperative);
  }

  /** What tells this GPU from all others, on every machine. */
  get uuid(): string {
    return this.driver.deviceUuid(this.#index);
  }

  get pool(): MemoryPool {
    return this.#pool;
  }

  get memory(): MemoryUse {
    this.#forgetRetired();
    const sum = (of: (pool: MemoryPool) => number) => [...this.#pools].reduce((total, pool) => total + of(pool), 0);
    return { peakBytes: sum((pool) => pool.peakBytesInUse), reservedBytes: sum((pool) => pool.bytesReserved) };
  }

  /** Kernels launched so far, replays of graphs not counted. */
  get launches(): number {
    return this.#launches;
  }

  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    let kernels = this.#modules.get(module);
    if (!kernels) {
      if (!module.cuda) throw new UsageError(`${module.folder} has no CUDA kernels`);
      kernels = module.cuda(this) as Kernels<Signatures>;
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
        this.marked(name, this.stream, () => this.#launch(kernel, shape, values)),
      );
      this.#code.set(key, code);
    }
    return code;
  }

  matrixProduct(product: MatrixProduct): void {
    this.#cublas ??= this.#openCublas();
    this.#launches += 1;
    const cublas = this.#cublas;
    cublas.prepare(product); // outside the marks: a trial is not the product's time
    this.marked(
      () => productName(product),
      this.stream,
      () => cublas.product(product),
    );
  }

  withScratch<T>(bytes: number, use: (address: bigint) => T): T {
    const block = this.pool.take(bytes);
    try {
      return use(block.address);
    } finally {
      this.pool.give(block); // the stream keeps the order: whoever gets it next comes after these launches
    }
  }

  upload(address: bigint, bytes: Uint8Array): void {
    // From memory that is not pinned the driver takes a copy before it returns, and keeps the stream's order.
    if (bytes.byteLength > 0) this.driver.call('cuMemcpyHtoDAsync_v2', address, bytes, bytes.byteLength, this.stream);
  }

  download(address: bigint, into: Uint8Array): void {
    for (let from = 0; from < into.byteLength; from += STAGING_BYTES) {
      const count = Math.min(STAGING_BYTES, into.byteLength - from);
      this.driver.call('cuMemcpyDtoHAsync_v2', this.#staging.address, address + BigInt(from), count, this.stream);
      this.synchronize();
      into.set(this.#staging.bytes.subarray(0, count), from);
    }
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
    const { lookout } = this;
    if (!lookout) {
      this.driver.call('cuStreamSynchronize', this.stream);
      return;
    }
    const started = performance.now();
    while (!this.driver.isDone(this.stream)) {
      const waited = performance.now() - started;
      if (waited < SPIN_MS) continue;
      lookout.look(waited);
      Atomics.wait(NOBODY, 0, 0, WAIT_MS);
    }
    lookout.resume();
  }

  /** A pool beside the device's own: a graph works in one, so that nothing else is put there between replays. */
  newPool(): MemoryPool {
    const pool = new MemoryPool({
      allocate: (bytes) => this.#allocate(bytes),
      free: (address) => this.driver.call('cuMemFree_v2', address),
    });
    this.#pools.add(pool);
    return pool;
  }

  /** Gives a pool up: now, or when the last of its blocks has come back. */
  dropPool(pool: MemoryPool): void {
    this.#retired.add(pool);
    this.#forgetRetired();
  }

  /** Runs `work` with memory from `pool`. */
  withPool<T>(pool: MemoryPool, work: () => T): T {
    const outer = this.#pool;
    this.#pool = pool;
    try {
      return work();
    } finally {
      this.#pool = outer;
    }
  }

  /**
   * Records what `work` launches, without running it, to be replayed as often as one likes. Run it once for real
   * before, with the same pool: then everything is compiled and every block is there. It must not wait for the device.
   */
  record(work: () => void): CudaGraph {
    this.driver.call('cuStreamBeginCapture_v2', this.stream, CAPTURE_RELAXED);
    this.#isRecording = true;
    let graph: bigint;
    try {
      work();
    } finally {
      this.#isRecording = false;
      graph = this.driver.endCapture(this.stream);
    }
    const executable = this.driver.get('cuGraphInstantiateWithFlags', graph, 0n);
    this.driver.call('cuGraphDestroy', graph);
    return new CudaGraph(this, executable);
  }

  /** The device's time of everything `work` launches, by name; a graph's replay shows nothing. */
  profile(work: () => void): Map<string, { calls: number; ms: number }> {
    const total = new Map<string, { calls: number; ms: number }>();
    for (const { name, from, to } of this.timeline(work)) {
      const entry = total.get(name) ?? { calls: 0, ms: 0 };
      entry.calls += 1;
      entry.ms += to - from;
      total.set(name, entry);
    }
    return total;
  }

  /** When everything that `work` launches begins and ends, on each stream; a graph's replay shows nothing. */
  timeline(work: () => void): TimelineEntry[] {
    const start = this.driver.get('cuEventCreate', 0);
    this.driver.call('cuEventRecord', start, this.stream);
    this.#marks = [];
    try {
      work();
      this.synchronize();
      const since = (mark: bigint) => this.driver.getFloat('cuEventElapsedTime', start, mark);
      return this.#marks.map(({ name, stream, before, after }) => ({
        name,
        isBeside: stream !== this.stream,
        from: since(before),
        to: since(after),
      }));
    } finally {
      for (const { before, after } of this.#marks)
        for (const mark of [before, after]) this.driver.call('cuEventDestroy_v2', mark);
      this.driver.call('cuEventDestroy_v2', start);
      this.#marks = null;
    }
  }

  /** Runs `launch`, which launches something on `stream`, between two events while a timeline is taken. */
  marked(name: string | (() => string), stream: bigint, launch: () => void): void {
    const marks = this.#marks;
    if (!marks) {
      launch();
      return;
    }
    const [before, after] = [this.driver.get('cuEventCreate', 0), this.driver.get('cuEventCreate', 0)];
    marks.push({ name: typeof name === 'string' ? name : name(), stream, before, after });
    this.driver.call('cuEventRecord', before, stream);
    launch();
    this.driver.call('cuEventRecord', after, stream);
  }

  /** Milliseconds of each of `repeats` runs on the device, measured by its own clock. */
  time(work: () => void, repeats: number): number[] {
    const event = () => this.driver.get('cuEventCreate', 0);
    const marks = Array.from({ length: repeats }, () => [event(), event()] as const);
    for (const [before, after] of marks) {
      this.driver.call('cuEventRecord', before, this.stream);
      work();
      this.driver.call('cuEventRecord', after, this.stream);
    }
    this.synchronize();
    return marks.map(([before, after]) => {
      const milliseconds = this.driver.getFloat('cuEventElapsedTime', before, after);
      for (const mark of [before, after]) this.driver.call('cuEventDestroy_v2', mark);
      return milliseconds;
    });
  }

  #forgetRetired(): void {
    for (const pool of this.#retired) {
      pool.trim();
      if (pool.bytesReserved > 0) continue;
      this.#retired.delete(pool);
      this.#pools.delete(pool);
    }
  }

  #openCublas(): CublasLt {
    const trial = {
      possible: () => !this.#isRecording,
      withMemory: <T>(bytes: number, use: (address: bigint) => T) => this.#withSpareMemory(bytes, use),
      time: (work: () => void, repeats: number) => this.time(work, repeats),
    };
    return new CublasLt({
      stream: this.stream,
      allocate: (bytes) => this.#allocate(bytes),
      trial: this.#deterministic ? null : trial,
    });
  }

  /** Memory of no pool, so that what the pools hold stays as it is; null when there is not enough. */
  #withSpareMemory<T>(bytes: number, use: (address: bigint) => T): T | null {
    let address: bigint;
    try {
      address = this.driver.get('cuMemAlloc_v2', bytes);
    } catch (error) {
      if (error instanceof CudaError && error.isOutOfMemory) return null;
      throw error;
    }
    try {
      return use(address);
    } finally {
      this.synchronize();
      this.driver.call('cuMemFree_v2', address);
    }
  }

  #allocate(bytes: number): bigint {
    try {
      return this.driver.get('cuMemAlloc_v2', bytes);
    } catch (error) {
      if (!(error instanceof CudaError && error.isOutOfMemory)) throw error;
    }
    // What the pool keeps for later may be just what is missing now; the device must be done with it first.
    this.synchronize();
    for (const pool of this.#pools) pool.trim();
    try {
      return this.driver.get('cuMemAlloc_v2', bytes);
    } catch (error) {
      if (!(error instanceof CudaError && error.isOutOfMemory)) throw error;
      throw this.#outOfMemory(bytes);
    }
  }

  #outOfMemory(bytes: number): TrefoilError {
    const mib = (count: number) => `${(count / MIB).toFixed(0)} MiB`;
    const { free, total } = this.driver.memory();
    return new TrefoilError(
      `out of GPU memory: ${mib(bytes)} were asked for, ${mib(free)} of ${mib(total)} are free and this run holds ` +
        `${mib(this.memory.reservedBytes)}; lower train.batch_size or train.seq_len, set runtime.gradient_checkpointing, ` +
        'or use runtime.precision bf16',
    );
  }

  #launch(kernel: bigint, shape: LaunchShape, values: readonly LaunchArgument[]): void {
    const { grid, block, shared = 0 } = shape;
    const [x, y = 1, z = 1] = typeof grid === 'number' ? [grid] : grid;
    if (x === 0 || y === 0 || z === 0) return;
    this.#arguments.set(values);
    this.#launches += 1;
    const { table } = this.#arguments;
    const overlaps = shape.overlap === true && this.architecture >= OVERLAP_ARCHITECTURE;
    const special = shape.cooperative ? this.#cooperative : overlaps ? this.#overlapping : null;
    const status = special
      ? special.launch(this.driver, kernel, [x, y, z], block, shared, table)
      : this.driver.launchKernel(kernel, x, y, z, block, 1, 1, shared, this.stream, table, null);
    if (status !== 0)
      throw new CudaError(
        `CUDA: a launch of ${x}x${y}x${z} blocks of ${block} threads with ${shared} bytes of shared memory failed: ` +
          this.driver.describe(status),
        status,
      );
  }
}

/** One launch on the GPU's own clock, in milliseconds. */
export interface TimelineEntry {
  readonly name: string;
  /** On a stream beside the device's own: a collective. */
  readonly isBeside: boolean;
  readonly from: number;
  readonly to: number;
}

interface Mark {
  readonly name: string;
  readonly stream: bigint;
  readonly before: bigint;
  readonly after: bigint;
}

function productName({ m, n, k, a, c, d, accumulate }: MatrixProduct): string {
  const into = d.dtype === a.dtype ? '' : ` to ${d.dtype}`;
  return `product ${m}x${n}x${k} ${a.dtype}${into}${accumulate ? ', added' : c ? ', sum' : ''}`;
}

/** A recorded sequence of launches. */
export class CudaGraph {
  readonly #device: CudaDevice;
  #executable: bigint | null;

  constructor(device: CudaDevice, executable: bigint) {
    this.#device = device;
    this.#executable = executable;
  }

  replay(): void {
    if (this.#executable === null) throw new Error('a graph was replayed after it was freed');
    this.#device.lookout?.replay?.();
    this.#device.driver.call('cuGraphLaunch', this.#executable, this.#device.stream);
  }

  free(): void {
    if (this.#executable === null) return;
    this.#device.synchronize();
    this.#device.driver.call('cuGraphExecDestroy', this.#executable);
    this.#executable = null;
  }
}

type Launch = (name: string, kernel: bigint, shape: LaunchShape, values: readonly LaunchArgument[]) => void;

/** A module on the GPU and its functions, found by name once. */
class LoadedCode implements CudaCode {
  readonly #driver: Driver;
  readonly #module: bigint;
  readonly #path: string;
  readonly #launch: Launch;
  readonly #kernels = new Map<string, { readonly address: bigint; shared: number }>();
  readonly #constants = new Map<string, number>();

  constructor(driver: Driver, cubin: Uint8Array, path: string, launch: Launch) {
    this.#driver = driver;
    this.#module = driver.get('cuModuleLoadData', cubin);
    this.#path = path;
    this.#launch = launch;
  }

  launch(name: string, shape: LaunchShape, ...values: LaunchArgument[]): void {
    let kernel = this.#kernels.get(name);
    if (!kernel) {
      kernel = { address: this.#find(name), shared: FREE_SHARED };
      this.#kernels.set(name, kernel);
    }
    const { shared = 0 } = shape;
    if (shared > kernel.shared) {
      this.#driver.allowShared(kernel.address, shared);
      kernel.shared = shared;
    }
    try {
      this.#launch(name, kernel.address, shape, values);
    } catch (error) {
      if (error instanceof CudaError) throw new CudaError(`${name} (${this.#path}): ${error.message}`, error.status);
      throw error;
    }
  }

  constant(name: string): number {
    let value = this.#constants.get(name);
    if (value === undefined) {
      const memory = koffi.alloc('int', 1);
      const at = this.#driver.global(this.#module, name);
      this.#driver.call('cuMemcpyDtoHAsync_v2', memory, at, 4, null);
      this.#driver.call('cuStreamSynchronize', null);
      value = new Int32Array(koffi.view(memory, 4))[0];
      koffi.free(memory);
      this.#constants.set(name, value);
    }
    return value;
  }

  #find(name: string): bigint {
    try {
      return this.#driver.get('cuModuleGetFunction', this.#module, name);
    } catch (error) {
      throw new Error(`${this.#path} has no kernel ${name}`, { cause: error });
    }
  }
}

/** Arguments of a launch: eight bytes each, and the table of their addresses that the driver is given. */
class ArgumentTable {
  readonly table = koffi.alloc('uint64_t', MOST_ARGUMENTS) as bigint;
  readonly #values: DataView;

  constructor() {
    const values = koffi.alloc('uint64_t', MOST_ARGUMENTS) as bigint;
    this.#values = new DataView(koffi.view(values, 8 * MOST_ARGUMENTS));
    const table = new BigUint64Array(koffi.view(this.table, 8 * MOST_ARGUMENTS));
    for (let i = 0; i < MOST_ARGUMENTS; i++) table[i] = values + BigInt(8 * i);
  }

  set(values: readonly LaunchArgument[]): void {
    if (values.length > MOST_ARGUMENTS) throw new Error(`a kernel takes at most ${MOST_ARGUMENTS} arguments`);
    const view = this.#values;
    for (let i = 0; i < values.length; i++) {
      const value = values[i];
      const at = 8 * i;
      if (typeof value === 'number') view.setBigInt64(at, BigInt(value), true);
      else if (typeof value === 'bigint') view.setBigUint64(at, value, true);
      else if (value === null) view.setBigUint64(at, 0n, true);
      else if (!(value instanceof Floating)) view.setBigUint64(at, value.pointer, true);
      else if (value.double) view.setFloat64(at, value.value, true);
      else view.setFloat32(at, value.value, true);
    }
  }
}

/** Pinned host memory that downloads pass through: the GPU writes there at full speed. */
class Staging {
  readonly address: bigint;
  readonly bytes: Uint8Array;

  constructor(driver: Driver, bytes: number) {
    this.address = driver.get('cuMemAllocHost_v2', bytes);
    this.bytes = new Uint8Array(koffi.view(this.address, bytes));
  }
}
