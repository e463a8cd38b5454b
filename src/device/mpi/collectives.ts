/**
 * Collectives between CPUs over MPI, which transports bytes only. A reduction is an all-to-all, after which each rank reduces
 * one part in order of rank (cpu.cpp), and an all-gather of the parts. So results do not depend on the algorithms of the MPI
 * library, and bf16, which MPI lacks, needs no special case.
 *
 * Operations start at once and progress whenever this file calls MPI, which works only while it is called. Every wait is a
 * loop here, in which the caller's hook can check the other ranks and throw.
 */
import { type Collectives, expectParts, type Reduction, type Span, type WireType } from '../collectives.js';
import type { CpuDevice } from '../cpu/cpu.js';
import { type Addressable, defineKernels, type MemoryBlock } from '../device.js';
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
/** Below this size every rank gets all data and reduces it whole: one exchange is cheaper than two. */
const SMALL_BYTES = 4096;
/** A wait polls without a pause for SPIN_MS, then every NAP_MS, because ranks may share a core. */
const SPIN_MS = 0.3;
const NAP_MS = 0.05;
/** Interval of checks during a long wait. */
const LOOK_MS = 200;

export interface MpiOptions {
  /** Called every LOOK_MS while an operation waits for other ranks. An error that it throws ends the wait. */
  readonly onWait?: (waitedMs: number, operation: string) => void;
  /** Called at the end of a wait during which `onWait` was called. */
  readonly onResume?: () => void;
}

/** A running operation. */
interface Operation {
  readonly name: string;
  /** Progresses without waiting; returns true when finished. `mayFollow`: all earlier operations are in their last exchange. */
  advance(mayFollow: boolean): boolean;
  /** Whether its last exchange has started. */
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
   * All ranks must start the exchanges of a communicator in the same order. First exchanges start in call order. Second ones
   * start when the first has finished, at different times on different ranks, so they use another communicator.
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
    expectParts('reduceScatter', from, into, this.world);
    const received = this.#take(from.count, from.dtype);
    const request = this.#exchange(from, received.address, into.count);
    this.#begin('reduceScatter', request, () => {
      this.#reduce(received.address, into, 'sum');
      this.#give(received);
    });
    this.#advance();
  }

  allGather(from: Span, into: Span): void {
    expectParts('allGather', into, from, this.world);
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

  /** MPI reports errors synchronously, so there is nothing to check; operations progress. */
  check(): void {
    this.#advance();
  }

  abort(): void {
    this.#mpi.call('MPI_Abort', this.#mpi.handles.world, 1);
  }

  /** A no-op: operations progress only while something waits for them. */
  leave(): void {}

  /** Like `abort`, with the exit code for mpirun. */
  abortWith(code: number): void {
    this.#mpi.call('MPI_Abort', this.#mpi.handles.world, code);
  }

  close(): void {
    this.join();
    if (!this.#mpi.isFinalized) this.#mpi.call('MPI_Finalize');
  }

  /** Every rank gets all data and reduces it whole. */
  #reduceWhole(span: Span, reduction: Reduction): void {
    const received = this.#take(span.count * this.world, span.dtype);
    const request = this.#gather(span.address, received.address, span.count * BYTES[span.dtype], this.#first);
    this.#begin('allReduce', request, () => {
      this.#reduce(received.address, span, reduction);
      this.#give(received);
    });
  }

  /** Rank r gets part r of every rank and reduces it; then all ranks gather the results. */
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

  /** Progresses all operations; returns whether any still runs. */
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

  /** `from` null: the rank's own part is already in place. */
  #gather(from: bigint | null, into: bigint, bytes: number, communicator: bigint): Request {
    const { byte, inPlace } = this.#mpi.handles;
    return new Request(this.#mpi, 'MPI_Iallgather', [from ?? inPlace, bytes, byte, into, bytes, byte, communicator]);
  }

  #reduce(received: bigint, into: Span, reduction: Reduction): void {
    const kernel = this.#device.kernels(kernels)[`ranks_reduce_${into.dtype}`];
    kernel(at(received), at(into.address), into.count, this.world, REDUCTIONS[reduction]);
  }

  #take(count: number, dtype: WireType): MemoryBlock {
    return this.#device.pool.take(count * BYTES[dtype]);
  }

  #give(block: MemoryBlock): void {
    this.#device.pool.give(block);
  }
}

function at(pointer: bigint): Addressable {
  return { pointer };
}

function part(span: Span, from: number, count: number): Span {
  return { address: span.address + BigInt(from * BYTES[span.dtype]), count, dtype: span.dtype };
}
