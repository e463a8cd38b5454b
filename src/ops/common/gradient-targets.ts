/** Gradients of kernels that can only overwrite: where a gradient exists already, a temporary is added to it. */
import type { GradientTarget, Tape } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';
import { addInto } from '../add/op.js';

export class OverwrittenGradients {
  /** Where to write the gradient of each input; temporary memory for those not needed. */
  readonly into: readonly Tensor[];
  readonly #tape: Tape;
  readonly #targets: readonly (GradientTarget | null)[];

  constructor(tape: Tape, inputs: readonly Tensor[]) {
    this.#tape = tape;
    this.#targets = inputs.map((input) => tape.gradientTarget(input));
    this.into = inputs.map((input, i) => {
      const target = this.#targets[i];
      return target && !target.accumulate ? target.gradient : tape.empty(input.shape, input.dtype);
    });
  }

  /** When all kernels are launched. */
  finish(): void {
    this.into.forEach((value, i) => {
      const target = this.#targets[i];
      if (target && !target.accumulate) return;
      if (target) addInto(this.#tape.device, target.gradient, value);
      this.#tape.drop(value);
    });
  }
}
