/** Interfaces of optimizers and of the parameters that they train. `AdamW` and `Muon` implement it. */
import { UsageError } from '../errors.js';
import type { Tensor } from './tensor.js';

/** A parameter, or the part of one that an optimizer keeps: its tensors are of one size. */
export interface Trainable {
  readonly name: string;
  readonly value: Tensor;
  /** Null: the parameter is not updated. */
  readonly gradient: Tensor | null;
  /** A rounded copy of the value, written together with it. */
  readonly rounded: Tensor | null;
  /** Row counts of the weight matrices in the value (`Parameter.matrices`); absent or empty if it holds none. */
  readonly matrices?: readonly number[];
  /** Marks the gradient as used: the next backward pass overwrites it. */
  clearGradient?(): void;
}

/** A parameter and its weight decay: every step multiplies it by 1 - learningRate * weightDecay. */
export interface TrainedParameter {
  readonly parameter: Trainable;
  readonly weightDecay: number;
}

/** The numbers of one optimizer step. */
export interface OptimizerStep {
  readonly learningRate: number;
  /** Factor on all gradients, applied first: the clip factor. Default 1. */
  readonly gradientScale?: number;
  /** Keeps the gradients, so that the next backward pass adds to them. Default false. */
  readonly keepGradients?: boolean;
}

/**
 * The numbers of an optimizer step on the device.
 *
 * @opaque
 */
export interface DeviceStep extends Omit<OptimizerStep, 'keepGradients'> {
  /** The norm of the gradients, `gradientScale` included, is clipped to this; 0 for no clipping. */
  readonly maxNorm?: number;
}

/** Numbers of the tensor that `stepOnDevice` reads; `nextStep` gives their values. */
export const STEP_SCALARS = 8;

/** An optimizer: its state, and the step from the host or on the device. */
export interface Optimizer {
  /** As `train.optimizer` names it. A checkpoint of another optimizer is refused. */
  readonly name: string;
  /** Steps taken so far. A checkpoint keeps it beside `state` and sets it on resume. */
  steps: number;
  /** The moments by name, `<parameter>.<moment>`; each has the shape of its parameter's value. */
  readonly state: ReadonlyMap<string, Tensor>;
  /** Updates every parameter that has a gradient, and clears the gradients unless `keepGradients` is set. */
  step(numbers: OptimizerStep): void;
  /**
   * Counts a step and returns its numbers, to be written into the tensor that `stepOnDevice` reads. Where the norm
   * turns out not to be finite the device changes nothing: the caller then subtracts 1 from `steps`.
   */
  nextStep(numbers: DeviceStep): Float32Array;
  /**
   * Launches the update of every parameter that has a gradient. `scalars` f32 [8] holds the numbers of `nextStep`; with
   * the sums of `GradientNorms.launch` gradients are clipped, and nothing is changed where one is not finite.
   */
  stepOnDevice(scalars: Tensor, sums?: Tensor | null): void;
  /** Frees the state. */
  free(): void;
}

/** One step with NaN would turn every weight into NaN. */
export function expectLearningRate(optimizer: string, learningRate: number): void {
  if (!(Number.isFinite(learningRate) && learningRate >= 0))
    throw new UsageError(`${optimizer}: learningRate must be a finite number of at least 0, not ${learningRate}`);
}

/** State is kept by name, so names must be unique. */
export function expectUniqueNames(optimizer: string, trained: readonly TrainedParameter[]): void {
  const names = trained.map(({ parameter }) => parameter.name);
  const duplicate = names.find((name, i) => names.indexOf(name) !== i);
  if (duplicate !== undefined) throw new UsageError(`${optimizer}: two parameters are named ${duplicate}`);
}
