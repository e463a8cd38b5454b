/**
 * Collectives between GPUs by NCCL, on a stream of its own beside the device's. An operation begins when the work launched
 * before it is done; `join` lets the device's stream wait for all operations begun so far. Both are ordered by events on
 * the GPU, never by the host, so a graph can hold them.
 */
import { UsageError } from '../../errors.js';
import type { Collectives, Reduction, Span } from '../collectives.js';
import type { CudaDevice } from './cuda.js';
import { NCCL_REDUCTION, NCCL_TYPE, NcclError, NcclLibrary } from './nccl-library.js';

const STREAM_NON_BLOCKING = 1;
const EVENT_WITHOUT_TIME = 2;
/** How often a long wait looks about. */
const LOOK_MS = 200;

/**
 * Somebody on another thread. Calls of CUDA and NCCL may block this one while the GPU waits for a rank that is gone: a
 * launch when many are ahead of it, taking memory, loading code, a connection that is made when it is first used. Nothing
 * can be asked here then.
 */
export interface Guard {
  /** From now on other ranks may keep this thread waiting. */
  begin(phase: 'join' | 'exchange' | 'leave'): void;
  /** It goes on. */
  moved(): void;
  /** There is nothing to wait for. */
  end(): void;
}

const NO_GUARD: Guard = { begin: () => {}, moved: () => {}, end: () => {} };

export interface NcclOptions {
  readonly rank: number;
  readonly world: number;
  /** Of `NcclLibrary.uniqueId` on rank 0, the same on every rank. */
  readonly id: Uint8Array;
  /** Knows when this thread may be blocked. */
  readonly guard?: Guard;
  /** Called every now and then while the host waits for the GPU, which may wait for other ranks; what it throws ends the wait. */
  readonly onWait?: (waitedMs: number) => void;
  /** A wait in which `onWait` was called is over. */
  readonly onResume?: () => void;
}

export class NcclCollectives implements Collectives {
  readonly kind = 'nccl';
  readonly rank: number;
  readonly world: number;
  readonly stream: bigint;
  readonly #device: CudaDevice;
  readonly #library: NcclLibrary;
  /** Where the device's stream stood when an operation was asked for, and where this one stood at a join. */
  readonly #before: bigint;
  readonly #after: bigint;
  readonly #hooks: Required<Pick<NcclOptions, 'onWait' | 'onResume'>>;
  readonly #guard: Guard;
  #communicator: bigint | null;
  /** Operations of which it is not known that they are over, and whether the device's stream waits for all of them. */
  #isUnderWay = false;
  #isJoined = true;
  /** When the present wait was last looked at, in its own milliseconds. */
  #looked = 0;

  /** Returns when every rank has come here with the same id. */
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
    device.lookout = {
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
    this.#expectParts('reduceScatter', from, into);
    this.#begin(`reduce-scatter ${from.count} ${from.dtype}`, (communicator) =>
      this.#library.call(
        'ncclReduceScatter',
        ...[from.address, into.address, into.count, NCCL_TYPE[from.dtype], NCCL_REDUCTION.sum],
        ...[communicator, this.stream],
      ),
    );
  }

  allGather(from: Span, into: Span): void {
    this.#expectParts('allGather', into, from);
    this.#begin(`all-gather ${into.count} ${into.dtype}`, (communicator) =>
      this.#library.call(
        'ncclAllGather',
        ...[from.address, into.address, from.count, NCCL_TYPE[from.dtype], communicator, this.stream],
      ),
    );
  }

  broadcast({ address, count, dtype }: Span, root: number): void {
    if (!(Number.isInteger(root) && root >= 0 && root < this.world))
      throw new UsageError(`broadcast: there is no rank ${root} among ${this.world}`);
    this.#begin(`broadcast ${count} ${dtype}`, (communicator) =>
      this.#library.call(
        'ncclBroadcast',
        ...[address, address, count, NCCL_TYPE[dtype], root, communicator, this.stream],
      ),
    );
  }

  /** Operations that `work` begins go to the GPU as one launch. When it throws, nothing is left but `abort`. */
  group(work: () => void): void {
    this.#told(() => this.#library.call('ncclGroupStart'));
    work();
    this.#told(() => this.#library.call('ncclGroupEnd'));
  }

  join(): void {
    const { driver, stream } = this.#device;
    driver.call('cuEventRecord', this.#after, this.stream);
    driver.call('cuStreamWaitEvent', stream, this.#after, 0);
    this.#isJoined = true;
  }

  check(): void {
    const communicator = this.#open();
    this.#told(() => this.#library.check(communicator));
  }

  /** Not while a graph with operations runs: the rest of it would find the communicator gone. */
  abort(): void {
    if (this.#communicator === null) return;
    const communicator = this.#communicator;
    this.#communicator = null;
    this.#device.lookout = null;
    this.#guarded('leave', () => this.#library.call('ncclCommAbort', communicator));
  }

  leave(): void {
    if (this.#isUnderWay) this.#abandon();
  }

  /** Free every graph that holds an operation before: NCCL waits for them here. */
  close(): void {
    if (this.#communicator === null) return;
    const { driver } = this.#device;
    this.join();
    this.#device.synchronize();
    const communicator = this.#communicator;
    this.#communicator = null;
    this.#device.lookout = null;
    // All ranks of a machine come here together, and wait for each other.
    this.#guarded('leave', () => {
      this.#library.call('ncclCommFinalize', communicator);
      this.#library.call('ncclCommDestroy', communicator);
    });
    driver.call('cuEventDestroy_v2', this.#before);
    driver.call('cuEventDestroy_v2', this.#after);
    driver.call('cuStreamDestroy_v2', this.stream);
  }

  /** While the host waits for the GPU, the GPU may wait for a rank that is gone. */
  #look(waitedMs: number): void {
    if (waitedMs - this.#looked < LOOK_MS) return;
    this.#looked = waitedMs;
    this.#guard.moved();
    try {
      this.#hooks.onWait(waitedMs); // first: it may know by name who is gone
      this.check();
    } catch (error) {
      this.#abandon();
      throw error;
    }
  }

  /**
   * What waits on the GPU for a lost rank waits for ever, and a graph may hold more of it behind: aborting the
   * communicator under their feet is worse. The process is on its way out.
   */
  #abandon(): void {
    this.#communicator = null;
    this.#device.lookout = null;
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
    this.#device.marked(name, this.stream, () => this.#told(() => launch(communicator)));
  }

  #begun(): void {
    this.#isUnderWay = true;
    this.#guard.begin('exchange');
  }

  /** A call that waits for other ranks on this thread. */
  #guarded<T>(phase: 'join' | 'leave', work: () => T): T {
    this.#guard.begin(phase);
    try {
      return this.#told(work);
    } finally {
      this.#guard.end();
    }
  }

  #open(): bigint {
    if (this.#communicator === null) throw new Error('collectives were used after they were closed');
    return this.#communicator;
  }

  #expectParts(what: string, whole: Span, part: Span): void {
    if (whole.count !== part.count * this.world || whole.dtype !== part.dtype)
      throw new UsageError(
        `${what}: ${whole.count} ${whole.dtype} numbers are not ${this.world} parts of ${part.count} ${part.dtype}`,
      );
  }

  /** An error names the rank it happened on. */
  #told<T>(work: () => T): T {
    try {
      return work();
    } catch (error) {
      if (!(error instanceof NcclError)) throw error;
      throw new NcclError(`rank ${this.rank} of ${this.world} on ${this.#device.name}: ${error.message}`, error.status);
    }
  }
}
