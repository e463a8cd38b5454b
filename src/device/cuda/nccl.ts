/**
 * Collectives between GPUs through NCCL, on a second stream. An operation starts when the work launched before it has
 * finished; `join` makes the device's stream wait for all operations started so far. Both are ordered by events on the GPU,
 * never by the host, so a graph can contain them.
 */
import { UsageError } from '../../errors.js';
import { type Collectives, expectParts, type Reduction, type Span } from '../collectives.js';
import type { CudaDevice } from './cuda.js';
import { NCCL_REDUCTION, NCCL_TYPE, NcclError, NcclLibrary } from './nccl-library.js';

const STREAM_NON_BLOCKING = 1;
const EVENT_WITHOUT_TIME = 2;
/** Interval of checks during a long wait. */
const LOOK_MS = 200;

/**
 * Another thread that watches this one. CUDA and NCCL calls may block while the GPU waits for a rank that is gone: a launch
 * into a full queue, an allocation, loading code, the first use of a connection. This thread can check nothing then.
 */
export interface Guard {
  /** From now on this thread may wait for other ranks. */
  begin(phase: 'join' | 'exchange' | 'leave'): void;
  /** This thread makes progress. */
  moved(): void;
  /** This thread no longer waits for other ranks. */
  end(): void;
}

const NO_GUARD: Guard = { begin: () => {}, moved: () => {}, end: () => {} };

export interface NcclOptions {
  readonly rank: number;
  readonly world: number;
  /** `NcclLibrary.uniqueId` of rank 0. */
  readonly id: Uint8Array;
  readonly guard?: Guard;
  /** Called every LOOK_MS while the host waits for the GPU. An error that it throws ends the wait. */
  readonly onWait?: (waitedMs: number) => void;
  /** Called at the end of a wait during which `onWait` was called. */
  readonly onResume?: () => void;
}

export class NcclCollectives implements Collectives {
  readonly kind = 'nccl';
  readonly rank: number;
  readonly world: number;
  readonly stream: bigint;
  readonly #device: CudaDevice;
  readonly #library: NcclLibrary;
  /** Events: the device's stream at the start of an operation, and this stream at a join. */
  readonly #before: bigint;
  readonly #after: bigint;
  readonly #hooks: Required<Pick<NcclOptions, 'onWait' | 'onResume'>>;
  readonly #guard: Guard;
  #communicator: bigint | null;
  /** Whether operations may still run, and whether the device's stream waits for all of them. */
  #isUnderWay = false;
  #isJoined = true;
  /** Time of the last check within the current wait, in milliseconds from its start. */
  #looked = 0;

  /** Collective: returns when every rank has called it with the same id. */
  constructor(device: CudaDevice, options: NcclOptions, library: NcclLibrary = new NcclLibrary()) {
    const { rank, world, id, guard = NO_GUARD, onWait = () => {}, onResume = () => {} } = options;
    this.rank = rank;
    this.world = world;
    this.#hooks = { onWait, onResume };
    this.#guard = guard;
    this.#device = device;
    this.#library = library;
    this.#communicator = this.#guarded('join', () => library.join(id, rank, world));
    const { driver } = device;
    this.stream = driver.get('cuStreamCreate', STREAM_NON_BLOCKING);
    this.#before = driver.get('cuEventCreate', EVENT_WITHOUT_TIME);
    this.#after = driver.get('cuEventCreate', EVENT_WITHOUT_TIME);
    device.waitMonitor = {
      look: (waitedMs) => this.#look(waitedMs),
      resume: () => this.#resume(),
      busy: () => guard.moved(),
      replay: () => this.#begun(),
    };
  }

  allReduce({ address, count, dtype }: Span, reduction: Reduction = 'sum'): void {
    this.#begin(`all-reduce ${count} ${dtype}`, (communicator) =>
      this.#library.call(
        'ncclAllReduce',
        ...[address, address, count, NCCL_TYPE[dtype], NCCL_REDUCTION[reduction], communicator, this.stream],
      ),
    );
  }

  reduceScatter(from: Span, into: Span): void {
    expectParts('reduceScatter', from, into, this.world);
    this.#begin(`reduce-scatter ${from.count} ${from.dtype}`, (communicator) =>
      this.#library.call(
        'ncclReduceScatter',
        ...[from.address, into.address, into.count, NCCL_TYPE[from.dtype], NCCL_REDUCTION.sum],
        ...[communicator, this.stream],
      ),
    );
  }

  allGather(from: Span, into: Span): void {
    expectParts('allGather', into, from, this.world);
    this.#begin(`all-gather ${into.count} ${into.dtype}`, (communicator) =>
      this.#library.call(
        'ncclAllGather',
        ...[from.address, into.address, from.count, NCCL_TYPE[from.dtype], communicator, this.stream],
      ),
    );
  }

  broadcast({ address, count, dtype }: Span, root: number): void {
    if (!(Number.isInteger(root) && root >= 0 && root < this.world))
      throw new UsageError(`broadcast: rank ${root} is not below the world size ${this.world}`);
    this.#begin(`broadcast ${count} ${dtype}`, (communicator) =>
      this.#library.call(
        'ncclBroadcast',
        ...[address, address, count, NCCL_TYPE[dtype], root, communicator, this.stream],
      ),
    );
  }

  join(): void {
    const { driver, stream } = this.#device;
    driver.call('cuEventRecord', this.#after, this.stream);
    driver.call('cuStreamWaitEvent', stream, this.#after, 0);
    this.#isJoined = true;
  }

  check(): void {
    const communicator = this.#open();
    this.#named(() => this.#library.check(communicator));
  }

  /** Must not be called while a graph with operations runs: the rest of the graph would use a destroyed communicator. */
  abort(): void {
    if (this.#communicator === null) return;
    const communicator = this.#communicator;
    this.#communicator = null;
    this.#device.waitMonitor = null;
    this.#guarded('leave', () => this.#library.call('ncclCommAbort', communicator));
  }

  leave(): void {
    if (this.#isUnderWay) this.#abandon();
  }

  /** All graphs that contain operations must be freed before: NCCL waits for them here. */
  close(): void {
    if (this.#communicator === null) return;
    const { driver } = this.#device;
    this.join();
    this.#device.synchronize();
    const communicator = this.#communicator;
    this.#communicator = null;
    this.#device.waitMonitor = null;
    // Collective among the ranks of a machine.
    this.#guarded('leave', () => {
      this.#library.call('ncclCommFinalize', communicator);
      this.#library.call('ncclCommDestroy', communicator);
    });
    driver.call('cuEventDestroy_v2', this.#before);
    driver.call('cuEventDestroy_v2', this.#after);
    driver.call('cuStreamDestroy_v2', this.stream);
  }

  /** Called while the host waits for the GPU, which may wait for a rank that is gone. */
  #look(waitedMs: number): void {
    if (waitedMs - this.#looked < LOOK_MS) return;
    this.#looked = waitedMs;
    this.#guard.moved();
    try {
      this.#hooks.onWait(waitedMs); // first: it can name the lost rank
      this.check();
    } catch (error) {
      this.#abandon();
      throw error;
    }
  }

  /**
   * Work on the GPU that waits for a lost rank never ends, and a graph may contain more of it. Aborting the communicator
   * while it runs would crash. The process is about to exit.
   */
  #abandon(): void {
    this.#communicator = null;
    this.#device.waitMonitor = null;
    this.#device.driver.abandon();
    this.#guard.end();
  }

  #resume(): void {
    if (this.#looked > 0) this.#hooks.onResume();
    this.#looked = 0;
    if (!this.#isJoined) return;
    this.#isUnderWay = false;
    this.#guard.end();
  }

  #begin(name: string, launch: (communicator: bigint) => void): void {
    const communicator = this.#open();
    const { driver, stream } = this.#device;
    this.#begun();
    this.#isJoined = false;
    driver.call('cuEventRecord', this.#before, stream);
    driver.call('cuStreamWaitEvent', this.stream, this.#before, 0);
    this.#device.marked(name, this.stream, () => this.#named(() => launch(communicator)));
  }

  #begun(): void {
    this.#isUnderWay = true;
    this.#guard.begin('exchange');
  }

  /** Runs a call that waits for other ranks on this thread. */
  #guarded<T>(phase: 'join' | 'leave', work: () => T): T {
    this.#guard.begin(phase);
    try {
      return this.#named(work);
    } finally {
      this.#guard.end();
    }
  }

  #open(): bigint {
    if (this.#communicator === null) throw new Error('collectives were used after they were closed');
    return this.#communicator;
  }

  /** Adds this rank to the message of an error. */
  #named<T>(work: () => T): T {
    try {
      return work();
    } catch (error) {
      if (!(error instanceof NcclError)) throw error;
      throw new NcclError(`rank ${this.rank} of ${this.world} on ${this.#device.name}: ${error.message}`, error.status);
    }
  }
}
