/**
 * What the ranks of a training do together, behind one small interface: MPI between CPUs (mpi/), NCCL between GPUs
 * (cuda/nccl.ts). Every rank calls the same operations with the same counts in the same order.
 *
 * A call begins its operation when the work launched on the device before it is done, and may return while the operation
 * still runs, beside work that is launched later. `join` puts an end to that: what is launched after it comes after every
 * operation begun so far.
 */
export type WireType = 'f32' | 'f64' | 'bf16' | 'i32' | 'u8';
/** How values of ranks are combined. */
export type Reduction = 'sum' | 'max' | 'min';

/** Some numbers in memory of the device: of the host with MPI, of the GPU with NCCL. */
export interface Span {
  readonly address: bigint;
  readonly count: number;
  readonly dtype: WireType;
}

/** Exchanges between ranks. */
export interface Collectives {
  readonly kind: 'mpi' | 'nccl';
  readonly rank: number;
  readonly world: number;
  /** Every rank ends with the reduction of all, bit for bit the same. */
  allReduce(span: Span, reduction?: Reduction): void;
  /** `from` holds world parts of `into.count` numbers; each rank ends with the sum of its part. */
  reduceScatter(from: Span, into: Span): void;
  /** `into` holds world parts of `from.count` numbers; `from` may be the rank's own part of it. */
  allGather(from: Span, into: Span): void;
  broadcast(span: Span, root: number): void;
  join(): void;
  /** Throws, naming what is known of the rank, when an operation failed behind the caller's back. */
  check(): void;
  /** Gives up at once, without the other ranks: operations in flight end with an error. */
  abort(): void;
  /** This rank is on its way out, without the others: from now on nothing here waits for what they have not done. */
  leave(): void;
  /** The orderly end; every rank calls it. */
  close(): void;
}
