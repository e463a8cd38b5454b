/** An operation that reads columns of a fused projection, for the operation that owns the projection's gradient. */
import type { GradientTarget, Tape } from '../../tensor/tape.js';
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

/**
 * The first part of a fused projection, rotated by positions from 0 on: lets the operation that computes its gradient
 * turn it back and write it into the projection's gradient, so that it is not moved once more.
 */
export class RotatedColumns {
  /** The angles: frequencies f32 [size / 2], what positions are divided by, and the factor of cosines and sines. */
  readonly angles: { readonly frequencies: Tensor; readonly scale: number; readonly amplitude: number };
  readonly #tape: Tape;
  readonly #fused: Tensor;
  #taken: GradientTarget | null = null;

  /** `fused` [T, width] as `splitHeads` takes it. */
  constructor(tape: Tape, fused: Tensor, angles: RotatedColumns['angles']) {
    this.#tape = tape;
    this.#fused = fused;
    this.angles = angles;
  }

  /**
   * The projection's gradient [T, width], whose first columns the caller must then write, or null. The caller must fill the
   * part's own gradient too, with anything: the rule that writes the other columns runs only if there is one.
   */
  take(): Tensor | null {
    const target = this.#tape.gradientTarget(this.#fused);
    if (target && !target.accumulate) this.#taken = target;
    return this.#taken?.gradient ?? null;
  }

  /** What `take` has given; the rule of `splitHeads` writes the other columns. */
  get taken(): GradientTarget | null {
    return this.#taken;
  }
}
