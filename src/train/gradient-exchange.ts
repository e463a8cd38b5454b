/** How gradients of several ranks are summed. `DataParallel` (data-parallel.ts) does it, `LocalGradients` has nothing to sum. */
import type { Trainable } from '../tensor/optimizer.js';
import type { Parameter } from '../tensor/parameter.js';
import type { Tensor } from '../tensor/tensor.js';

/**
 * Sums gradients over ranks, or does nothing in a run of one process. `DataParallel` documents the order of calls.
 *
 * @opaque
 */
export interface GradientExchange {
  /** The tensors that this rank's optimizer updates: parameters, or this rank's parts of them. */
  readonly trained: readonly Trainable[];
  /** The gradients whose norms this rank computes. */
  readonly gradients: readonly Tensor[];
  /** Whether each rank keeps only a part of the optimizer's state (ZeRO-1). */
  readonly isSharded: boolean;
  /** Whether a step may be recorded as a graph although batches of the ranks may differ in shape. */
  readonly allowsUnequalShapes: boolean;
  /** Called before each backward pass; `isLast` for the last one of a step, after which gradients are exchanged. */
  begin(isLast: boolean): void;
  /** Waits until all gradients are exchanged. */
  finish(): void;
  /** Where ranks hold parts of the gradients (ZeRO-1): adds the sums over the parts, in place. Elsewhere they are whole already. */
  reduceSums(sums: Tensor): void;
  /** Gives every rank the values that other ranks have updated. */
  shareValues(): void;
  /** Frees the buffers of the exchange. */
  free(): void;
}

/** The gradients of a run of one process: nothing to exchange. */
export class LocalGradients implements GradientExchange {
  readonly trained: readonly Parameter[];
  readonly isSharded = false;
  readonly allowsUnequalShapes = true;

  constructor(parameters: readonly Parameter[]) {
    this.trained = parameters;
  }

  get gradients(): readonly Tensor[] {
    return this.trained.flatMap(({ gradient }) => (gradient ? [gradient] : []));
  }

  begin(): void {}
  finish(): void {}
  reduceSums(): void {}
  shareValues(): void {}
  free(): void {}
}
