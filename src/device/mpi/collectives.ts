/**
 * Collectives between CPUs over MPI. MPI carries bytes and nothing else: a reduction is an exchange after which each rank
 * reduces one part in the order of the ranks (cpu.cpp), and a second exchange that hands the parts round. So results do
 * not depend on which algorithm an MPI library likes today, and bf16, which MPI does not know, is a type like others.
 *
 * Operations are begun at once and go on whenever this file is entered: MPI works only while it is called. Every wait is a
 * loop of this file, in which whoever opened the collectives can look at the other ranks and give up.
 */
import { TrefoilError } from '../../errors.js';
import type { Collectives, Reduction, Span, WireType } from '../collectives.js';
import type { CpuDevice } from '../cpu/cpu.js';
import { type Addressable, type Block, defineKernels } from '../device.js';
import { Mpi, Request } from './library.js';

const parts = ['ptr', 'ptr', 'i64', 'i64', 'i64'] as const;
const kernels = defineKernels(import.meta.url, {
  ranks_reduce_f32: parts,
  ranks_reduce_f64: parts,
  ranks_reduce_bf16: parts,
  ranks_reduce_i32: parts,
  ranks_reduce_u8: parts,
});

const BYTES: Record<WireType, number> = { f32: 4, f64: 8, bf16: 2, i32: 4, u8: 1 };
const REDUCTIONS: Record<Reduction, number> = { sum: 0, max: 1, min: 2 };
/** Fewer bytes than this are sent whole to everybody: one exchange costs less than two. */
const SMALL_BYTES = 4096;
/** A wait asks without a pause this long; then it sleeps between two questions, for ranks may share a core. */
const SPIN_MS = 0.3;
const NAP_MS = 0.05;
/** How often a long wait looks about. */
const LOOK_MS = 200;

export interface MpiOptions {
  /** Called every now and then while an operation waits for other ranks; what it throws ends the wait. */
  readonly onWait?: (waitedMs: number, operation: string) => void;
  /** Called after a wait in which `onWait` was. */
  readonly onResume?: () => void;
}

/** An operation under way. */
interface Operation {
  readonly name: string;
  /** Moves on as far as it can without waiting; true when it is over. `mayFollow`: all before it began their last exchange. */
  advance(mayFollow: boolean): boolean;
  /** It has begun its last exchange. */
  readonly isLast: boolean;
}

export class MpiCollectives implements Collectives {
  readonly kind = 'mpi';
  readonly rank: number;
  readonly world: number;
  readonly #mpi: Mpi;
  readonly #device: CpuDevice;
  readonly #onWait: NonNullable<MpiOptions['onWait']>;
  readonly #onResume: () => void;
  /**
   * Ranks must begin the exchanges of a communicator in one order. First exchanges begin when they are asked for; second
   * ones when the first is over, which is earlier on one rank than on another: they have a communicator of their own.
   */
  readonly #first: bigint;
  readonly #second: bigint;
  readonly #nap = new Int32Array(new SharedArrayBuffer(4));
  #pending: Operation[] = [];

  constructor(device: CpuDevice, { onWait = () => {}, onResume = () => {} }: MpiOptions = {}) {
    this.#device = device;
    this.#onWait = onWait;
    this.#onResume = onResume;
    this.#mpi = new Mpi();
    const { world } = this.#mpi.handles;
    this.rank = this.#mpi.integer('MPI_Comm_rank', world);
    this.world = this.#mpi.integer('MPI_Comm_size', world);
    this.#first = this.#mpi.duplicate(world);
    this.#second = this.#mpi.duplicate(world);
  }

  allReduce(span: Span, reduction: Reduction = 'sum'): void {
    const bytes = span.count * BYTES[span.dtype];
    const rest = bytes <= SMALL_BYTES ? span.count : span.count % this.world;
    const whole = span.count - rest;
    if (whole > 0) this.#reduceInParts(part(span, 0, whole), reduction);
    if (rest > 0) this.#reduceWhole(part(span, whole, rest), reduction);
    this.#advance();
  }

  reduceScatter(from: Span, into: Span): void {
    expectParts('reduceScatter', into, from, this.world);
    const received = this.#take(from.count, from.dtype);
    const request = this.#exchange(from, received.address, into.count);
    this.#begin('reduceScatter', request, () => {
      this.#reduce(received.address, into, 'sum');
      this.#give(received);
    });
    this.#advance();
  }

  allGather(from: Span, into: Span): void {
    expectParts('allGather', from, into, this.world);
    const bytes = from.count * BYTES[from.dtype];
    const own = part(into, this.rank * from.count, from.count);
    const isInPlace = own.address === from.address;
    const request = this.#gather(isInPlace ? null : from.address, into.address, bytes, this.#first);
    this.#begin('allGather', request, () => {});
    this.#advance();
  }

  broadcast(span: Span, root: number): void {
    const values = [span.address, span.count * BYTES[span.dtype], this.#mpi.handles.byte, root, this.#first];
    this.#begin('broadcast', new Request(this.#mpi, 'MPI_Ibcast', values), () => {});
    this.#advance();
  }

  join(): void {
    const started = performance.now();
    let looked = started;
    while (this.#advance()) {
      const now = performance.now();
      if (now - started < SPIN_MS) continue;
      Atomics.wait(this.#nap, 0, 0, NAP_MS);
      if (now - looked < LOOK_MS) continue;
      looked = now;
      this.#onWait(now - started, this.#pending[0].name);
    }
    if (looked > started) this.#onResume();
  }

  /** MPI tells at once what went wrong; there is nothing behind the caller's back. It only lets work go on. */
  check(): void {
    this.#advance();
  }

  abort(): void {
    this.#mpi.call('MPI_Abort', this.#mpi.handles.world, 1);
  }

  /** What is under way moves on only while somebody waits for it, and nobody will. */
  leave(): void {}

  /** As `abort`, with the exit code that mpirun shall end with. */
  abortWith(code: number): void {
    this.#mpi.call('MPI_Abort', this.#mpi.handles.world, code);
  }

  close(): void {
    this.join();
    if (!this.#mpi.isFinalized) this.#mpi.call('MPI_Finalize');
  }

  /** Everybody sends all of it to everybody, and reduces all of it. */
  #reduceWhole(span: Span, reduction: Reduction): void {
    const received = this.#take(span.count * this.world, span.dtype);
    const request = this.#gather(span.address, received.address, span.count * BYTES[span.dtype], this.#first);
    this.#begin('allReduce', request, () => {
      this.#reduce(received.address, span, reduction);
      this.#give(received);
    });
  }

  /** Rank r gets part r of everybody, reduces it, and everybody gets the result. */
  #reduceInParts(span: Span, reduction: Reduction): void {
    const count = span.count / this.world;
    const received = this.#take(span.count, span.dtype);
    const own = part(span, this.rank * count, count);
    const first = this.#exchange(span, received.address, count);
    let second: Request | null = null;
    let isReduced = false;
    this.#pending.push({
      name: 'allReduce',
      get isLast() {
        return second !== null;
      },
      advance: (mayFollow) => {
        if (second) return second.test();
        if (!isReduced && !first.test()) return false;
        if (!isReduced) {
          this.#reduce(received.address, own, reduction);
          this.#give(received);
          isReduced = true;
        }
        if (!mayFollow) return false;
        second = this.#gather(null, span.address, count * BYTES[span.dtype], this.#second);
        return second.test();
      },
    });
  }

  #begin(name: string, request: Request, finish: () => void): void {
    this.#pending.push({
      name,
      isLast: true,
      advance: () => {
        if (!request.test()) return false;
        finish();
        return true;
      },
    });
  }

  /** Lets everything move on; whether something is still under way. */
  #advance(): boolean {
    let mayFollow = true;
    this.#pending = this.#pending.filter((operation) => {
      const isOver = operation.advance(mayFollow);
      mayFollow &&= operation.isLast;
      return !isOver;
    });
    return this.#pending.length > 0;
  }

  #exchange(from: Span, into: bigint, count: number): Request {
    const bytes = count * BYTES[from.dtype];
    const { byte } = this.#mpi.handles;
    return new Request(this.#mpi, 'MPI_Ialltoall', [from.address, bytes, byte, into, bytes, byte, this.#first]);
  }

  /** `from` null: the rank's own part lies in place. */
  #gather(from: bigint | null, into: bigint, bytes: number, communicator: bigint): Request {
    const { byte, inPlace } = this.#mpi.handles;
    return new Request(this.#mpi, 'MPI_Iallgather', [from ?? inPlace, bytes, byte, into, bytes, byte, communicator]);
  }

  #reduce(received: bigint, into: Span, reduction: Reduction): void {
    const kernel = this.#device.kernels(kernels)[`ranks_reduce_${into.dtype}`];
    kernel(at(received), at(into.address), into.count, this.world, REDUCTIONS[reduction]);
  }

  #take(count: number, dtype: WireType): Block {
    return this.#device.pool.take(count * BYTES[dtype]);
  }

  #give(block: Block): void {
    this.#device.pool.give(block);
  }
}

function at(pointer: bigint): Addressable {
  return { pointer };
}

function part(span: Span, from: number, count: number): Span {
  return { address: span.address + BigInt(from * BYTES[span.dtype]), count, dtype: span.dtype };
}

function expectParts(what: string, small: Span, large: Span, world: number): void {
  if (large.count !== small.count * world || large.dtype !== small.dtype)
    throw new TrefoilError(
      `${what}: ${large.count} ${large.dtype} are not ${world} parts of ${small.count} ${small.dtype}`,
    );
}
