/**
 * A model's parameters by name, and how each starts (docs/reference/model.md):
 * matrices normal(0, 0.02); matrices that write into the residual stream normal(0, 0.02 / sqrt(2 * layers)), so that the
 * stream's variance does not grow with depth; norms 1; the gate 0, so that it starts uniform.
 * Every parameter draws from a stream of its own: adding one does not change the numbers of the others.
 */
import type { Device } from '../device/device.js';
import { UsageError } from '../errors.js';
import type { RotaryShape } from '../ops/rope/frequencies.js';
import { RotaryTable } from '../ops/rope/op.js';
import { dispose } from '../tensor/dispose.js';
import { Parameter } from '../tensor/parameter.js';
import { ParameterStack } from '../tensor/parameter-stack.js';
import { fillNormal } from '../tensor/random/op.js';
import type { Dtype, Shape, Tensor } from '../tensor/tensor.js';

const STANDARD_DEVIATION = 0.02;

/** Values of parameters from where they are stored. A model that is made of them draws no random ones, and owns them. */
export interface StoredParameters {
  /** The value of the parameter of this name. */
  read(name: string, shape: Shape): Tensor;
  /** Frees memory that values share, after they were freed. */
  free(): void;
}

/** Creates the named parameters of a model and owns their memory. */
export class ParameterStore implements Disposable {
  readonly parameters: Parameter[] = [];
  readonly #device: Device;
  readonly #initial: number | StoredParameters;
  readonly #layers: number;
  readonly #dtype: Dtype;
  readonly #stacks: ParameterStack[] = [];
  readonly #tables = new Map<string, RotaryTable>();
  #isFreed = false;

  /** `initial`: the seed of random values, or all values as they are stored. `dtype`: what the model computes in. */
  constructor(device: Device, initial: number | StoredParameters, layers: number, dtype: Dtype = 'f32') {
    this.#device = device;
    this.#initial = initial;
    this.#layers = layers;
    this.#dtype = dtype;
  }

  /**
   * A matrix of normally distributed values, with the standard deviation of all matrices. `rows`: those of the linear
   * layers whose weights it holds (`Parameter.matrices`); none for a table.
   */
  matrix(name: string, shape: Shape, rows: readonly number[] = []): Parameter {
    return this.normal(name, shape, STANDARD_DEVIATION, rows);
  }

  /** A matrix whose product is added to the residual stream, twice per layer. */
  residualMatrix(name: string, shape: Shape): Parameter {
    return this.normal(name, shape, STANDARD_DEVIATION / Math.sqrt(2 * this.#layers), [shape[0]]);
  }

  /** A parameter of normally distributed values; `rows` as in `matrix`. */
  normal(name: string, shape: Shape, standardDeviation: number, rows: readonly number[] = []): Parameter {
    return this.#add(name, shape, rows, (value, seed) =>
      fillNormal(value, { seed, stream: streamOf(name) }, standardDeviation),
    );
  }

  /** A parameter whose values are all the same. */
  constant(name: string, shape: Shape, value: number): Parameter {
    return this.#add(name, shape, [], (tensor) => tensor.write(new Float32Array(tensor.size).fill(value)));
  }

  /** A parameter of zeros. */
  zeros(name: string, shape: Shape): Parameter {
    return this.constant(name, shape, 0);
  }

  /** Matrices of the same input as one; null where products read the f32 values themselves, each in its own place. */
  stack(...parameters: readonly Parameter[]): ParameterStack | null {
    if (this.#dtype === 'f32') return null;
    const stack = new ParameterStack(this.#device, parameters, this.#dtype);
    this.#stacks.push(stack);
    return stack;
  }

  /** The rotations of this shape: not trained, and one table for all layers. */
  rotary(shape: RotaryShape): RotaryTable {
    const key = JSON.stringify(shape);
    const table = this.#tables.get(key) ?? new RotaryTable(this.#device, shape);
    this.#tables.set(key, table);
    return table;
  }

  /** Frees all parameters and their gradients. */
  free(): void {
    for (const parameter of this.parameters) parameter.free();
    for (const stack of this.#stacks) stack.free();
    for (const table of this.#tables.values()) table.free();
    if (typeof this.#initial !== 'number') this.#initial.free();
    this.#isFreed = true;
  }

  /** `free`, for `using`: a no-op if that has happened already. */
  [dispose](): void {
    if (!this.#isFreed) this.free();
  }

  #add(name: string, shape: Shape, rows: readonly number[], fill: (value: Tensor, seed: number) => void): Parameter {
    if (this.parameters.some((parameter) => parameter.name === name))
      throw new UsageError(`this model already has a parameter named ${name}: give each layer a name of its own`);
    const initial = this.#initial;
    const read = typeof initial === 'number' ? undefined : initial.read(name, shape);
    const parameter = new Parameter(this.#device, name, shape, rows, read);
    this.parameters.push(parameter);
    if (typeof initial === 'number') fill(parameter.value, initial);
    return parameter;
  }
}

/** FNV-1a of the name: the stream of random numbers that belongs to it. */
function streamOf(name: string): number {
  let hash = 0x811c9dc5;
  for (const character of name) hash = Math.imul(hash ^ character.charCodeAt(0), 0x01000193) >>> 0;
  return hash;
}
