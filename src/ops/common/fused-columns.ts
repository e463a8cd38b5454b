/** An operation that reads columns of a fused projection, for the operation that owns the projection's gradient. */
import type { GradientTarget } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';

/** Columns of a fused projection that another operation reads. */
export interface FusedColumns {
  /** How many of the last columns belong to it. */
  readonly columns: number;
  /** Besides the projection. */
  readonly inputs: readonly Tensor[];
  readonly outputs: readonly Tensor[];
  /** What `backward` reads. */
  readonly saved: readonly Tensor[];
  /** Writes all of its columns of the projection's gradient, or adds to them. */
  backward(dFused: GradientTarget): void;
}
