/**
 * Matrices that are multiplied with the same input, as one: their rounded copies lie one after another in memory, so a
 * single product has the outputs of all. Values, gradients and names stay each parameter's own, and a checkpoint knows
 * nothing of it.
 */
import type { Device } from '../device/device.js';
import type { Parameter } from './parameter.js';
import { type Dtype, Tensor } from './tensor.js';

/** Rows are filled up to a multiple of this, the sizes of FP8 products; rows of the result then begin at whole sectors. */
const ROWS = 16;

/**
 * Matrices of one input that are multiplied as one.
 *
 * @opaque
 */
export class ParameterStack {
  readonly parameters: readonly Parameter[];
  readonly #memory: Tensor;

  /** `parameters` [rows, inputs] with the same inputs, which no product has used yet. */
  constructor(device: Device, parameters: readonly Parameter[], dtype: Dtype) {
    const inputs = parameters[0].value.shape[1];
    const ends: number[] = [];
    for (const { name, value } of parameters) {
      if (value.shape.length !== 2 || value.shape[1] !== inputs)
        throw new Error(`${name} [${value.shape.join(', ')}] cannot stand above others of ${inputs} inputs`);
      ends.push((ends[ends.length - 1] ?? 0) + value.shape[0]);
    }
    const rows = ROWS * Math.ceil(ends[ends.length - 1] / ROWS);
    this.parameters = parameters;
    this.#memory = Tensor.zeros(device, [rows, inputs], dtype); // the rows that fill up stay zero
    parameters.forEach((parameter, i) => {
      parameter.placeRounded(this.#memory.rows(ends[i - 1] ?? 0, ends[i]));
    });
  }

  /** All of them [rows, inputs], rounded where they are stale. It has no gradient: the parameters have. */
  operand(round: (from: Tensor, into: Tensor) => void): Tensor {
    for (const parameter of this.parameters) parameter.as(this.#memory.dtype, round);
    return this.#memory;
  }

  /** Frees the common storage. */
  free(): void {
    this.#memory.free();
  }
}
