/** An operation that reads columns of a fused projection, for the operation that owns the projection's gradient. */
import type { GradientTarget } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';

/** Where the writers of a gradient leave its largest magnitude: finding it afterwards would read all of it again. */
export interface LargestMagnitude {
  /** f32 [8], zeros before; the magnitude is at 0. */
  readonly scale: Tensor;
  /** Whether all writers have left theirs. */
  isKnown: boolean;
}

/** Columns of a fused projection that another operation reads. */
export interface FusedColumns {
  /** How many of the last columns belong to it. */
  readonly columns: number;
  /** Besides the projection. */
  readonly inputs: readonly Tensor[];
  readonly outputs: readonly Tensor[];
  /** Tensors that `backward` reads. */
  readonly saved: readonly Tensor[];
  /** Largest magnitude of the projection's gradient, where it is wanted. */
  readonly largest?: LargestMagnitude | null;
  /** Writes all of its columns of the projection's gradient, or adds to them; `largest` as a kernel takes it. */
  backward(dFused: GradientTarget, largest: Tensor | null): void;
}
