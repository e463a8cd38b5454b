/**
 * Collective operations between the ranks of a run: MPI between CPUs (mpi/), NCCL between GPUs (cuda/nccl.ts). Every rank calls
 * the same operations with the same counts in the same order.
 *
 * An operation starts when the work launched on the device before it has finished. It may run concurrently with work
 * launched later, until `join`: work launched after `join` comes after every operation started so far.
 */
import { UsageError } from '../errors.js';

/** Type of gradients between ranks. */
export type WireType = 'f32' | 'f64' | 'bf16' | 'i32' | 'u8';
/** How values of ranks are combined. */
export type Reduction = 'sum' | 'max' | 'min';

/** An array in device memory: host memory with MPI, GPU memory with NCCL. */
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
  /** In place. Every rank gets the reduction over all ranks, with the same bits. */
  allReduce(span: Span, reduction?: Reduction): void;
  /** `from` has `world` parts of `into.count` numbers; each rank gets the sum of its part. */
  reduceScatter(from: Span, into: Span): void;
  /** `into` has `world` parts of `from.count` numbers; `from` may be the rank's own part of it. */
  allGather(from: Span, into: Span): void;
  /** Copies the values of rank `root` to all ranks. */
  broadcast(span: Span, root: number): void;
  /** Waits until the queued exchanges are done. */
  join(): void;
  /** Throws if an operation has failed asynchronously; the message names the rank. */
  check(): void;
  /** Aborts at once, without the other ranks: running operations fail. */
  abort(): void;
  /** This rank is about to exit alone: from now on nothing waits for other ranks. */
  leave(): void;
  /** Collective: the regular end. */
  close(): void;
}

/** Throws unless `whole` has `world` parts of the size and type of `part`. */
export function expectParts(what: string, whole: Span, part: Span, world: number): void {
  if (whole.count === part.count * world && whole.dtype === part.dtype) return;
  throw new UsageError(
    `${what}: ${whole.count} ${whole.dtype} numbers are not ${world} parts of ${part.count} ${part.dtype}`,
  );
}
