/**
 * AdamW: Adam with bias correction and decoupled weight decay, in one pass over each parameter. The gradient is
 * multiplied on the way in, so clipping costs nothing. A parameter's rounded copy is written in the same pass.
 *
 * `step` takes its scalars from the host. `stepOnDevice` reads them from device memory, the clip factor included: all
 * parameters in one launch, without waiting for the host, so a graph can record it.
 */
import { type Device, defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import { dispose } from '../../tensor/dispose.js';
import {
  type DeviceStep,
  expectLearningRate,
  expectUniqueNames,
  type Optimizer,
  type OptimizerStep,
  STEP_SCALARS,
  type TrainedParameter,
} from '../../tensor/optimizer.js';
import { Tensor } from '../../tensor/tensor.js';
import { expectShape } from '../common/shapes.js';
import { TensorTable } from '../common/tensor-table.js';
import { launchers } from './cuda.js';

const tensors = ['ptr', 'ptr', 'ptr', 'ptr', 'ptr'] as const; // value, gradient, m, v, rounded
export const signatures = {
  adamw_step: [...tensors, 'i64', 'f32', 'f32', 'f32', 'f32', 'f32', 'f32', 'f32', 'f32', 'f32'],
  adamw_factor: ['ptr', 'ptr', 'ptr'],
  adamw_step_all: ['ptr', 'ptr', 'ptr', 'ptr', 'i64', 'f32', 'f32', 'f32', 'f32', 'f32'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** Options of `AdamW`. */
export interface AdamWOptions {
  readonly betas?: readonly [number, number];
  readonly epsilon?: number;
}

interface Moments {
  readonly m: Tensor;
  readonly v: Tensor;
}

/** The AdamW optimizer: its moments, and the step. */
export class AdamW implements Optimizer, Disposable {
  readonly name = 'adamw';
  readonly #device: Device;
  readonly #trained: readonly TrainedParameter[];
  readonly #moments = new Map<string, Moments>();
  readonly #betas: readonly [number, number];
  readonly #epsilon: number;
  readonly #table: TensorTable;
  #factor: Tensor | null = null;
  /** Steps taken so far. A checkpoint keeps it beside `state` and sets it on resume. */
  steps = 0;

  constructor(device: Device, trained: readonly TrainedParameter[], options: AdamWOptions = {}) {
    this.#device = device;
    this.#trained = trained;
    this.#table = new TensorTable(device);
    this.#betas = options.betas ?? [0.9, 0.95];
    this.#epsilon = options.epsilon ?? 1e-8;
    expectUniqueNames('AdamW', trained);
    if (this.#betas.some((beta) => !(beta >= 0 && beta < 1)))
      throw new UsageError(`AdamW: betas must be from 0 to below 1, not ${this.#betas.join(' and ')}`);
    if (!(this.#epsilon >= 0)) throw new UsageError(`AdamW: epsilon must be at least 0, not ${this.#epsilon}`);
    for (const { parameter } of trained) {
      const { name, value } = parameter;
      this.#moments.set(name, { m: Tensor.zeros(device, value.shape), v: Tensor.zeros(device, value.shape) });
    }
  }

  /** The moments by name, `<parameter>.m` and `<parameter>.v`, in the order of the parameters. */
  get state(): ReadonlyMap<string, Tensor> {
    const named = [...this.#moments].flatMap(([name, { m, v }]) => [
      [`${name}.m`, m] as const,
      [`${name}.v`, v] as const,
    ]);
    return new Map(named);
  }

  /** Updates every parameter that has a gradient, and clears the gradients unless `keepGradients` is set. */
  step({ learningRate, gradientScale = 1, keepGradients = false }: OptimizerStep): void {
    expectLearningRate('AdamW', learningRate);
    const kernel = this.#device.kernels(kernels);
    const [beta1, beta2] = this.#betas;
    this.steps += 1;
    const { stepSize, inverseRootBias } = this.#corrections(learningRate);
    for (const { parameter, weightDecay } of this.#trained) {
      const { name, value, gradient, rounded } = parameter;
      const moments = this.#moments.get(name);
      if (!gradient || !moments) continue;
      const shrink = learningRate * weightDecay;
      kernel.adamw_step(
        value,
        gradient,
        moments.m,
        moments.v,
        rounded,
        value.size,
        gradientScale,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        inverseRootBias,
        this.#epsilon,
        stepSize,
        shrink,
      );
      if (!keepGradients) parameter.clearGradient?.();
    }
  }

  /**
   * Counts a step and returns its numbers, to be written into the tensor that `stepOnDevice` reads. Where the norm
   * turns out not to be finite the device changes nothing: the caller then subtracts 1 from `steps`.
   */
  nextStep({ learningRate, gradientScale = 1, maxNorm = 0 }: DeviceStep): Float32Array {
    expectLearningRate('AdamW', learningRate);
    this.steps += 1;
    const { stepSize, inverseRootBias } = this.#corrections(learningRate);
    const limit = maxNorm > 0 ? maxNorm : Number.POSITIVE_INFINITY;
    const scalars = new Float32Array(STEP_SCALARS);
    scalars.set([gradientScale, limit, stepSize, inverseRootBias, learningRate]); // the kernel's struct Scalars
    return scalars;
  }

  /**
   * Launches the update of every parameter that has a gradient. `scalars` f32 [8] holds the numbers of `nextStep`; with
   * the sums of `GradientNorms.launch` gradients are clipped, and nothing is changed where one is not finite. Returns
   * the factor on the gradients f32 [1] on the device, NaN where nothing is changed; valid until the next call.
   */
  stepOnDevice(scalars: Tensor, sums: Tensor | null = null): Tensor {
    expectShape('AdamW: scalars', scalars, [STEP_SCALARS]);
    if (sums) expectShape('AdamW: sums', sums, [-1, 2], 'f64');
    const kernel = this.#device.kernels(kernels);
    const table = this.#table;
    table.update(
      this.#trained.flatMap(({ parameter, weightDecay }) => {
        const { name, value, gradient, rounded } = parameter;
        const moments = this.#moments.get(name);
        if (!gradient || !moments) return [];
        const addresses = [value, gradient, moments.m, moments.v].map(({ pointer }) => pointer);
        return [{ size: value.size, words: [...addresses, rounded?.pointer ?? 0n, weightDecay] }];
      }),
    );
    this.#factor ??= Tensor.empty(this.#device, [1]);
    const total = sums?.rows(sums.shape[0] - 1, sums.shape[0]) ?? null;
    kernel.adamw_factor(total, scalars, this.#factor);
    const [beta1, beta2] = this.#betas;
    kernel.adamw_step_all(
      ...[table.records, table.pieces, scalars, this.#factor, table.pieceCount],
      ...[beta1, 1 - beta1, beta2, 1 - beta2, this.#epsilon],
    );
    return this.#factor;
  }

  #corrections(learningRate: number) {
    const [beta1, beta2] = this.#betas;
    return {
      stepSize: learningRate / (1 - beta1 ** this.steps),
      inverseRootBias: 1 / Math.sqrt(1 - beta2 ** this.steps),
    };
  }

  /** `free`, for `using`. */
  [dispose](): void {
    this.free();
  }

  /** Frees the moments. */
  free(): void {
    for (const { m, v } of this.#moments.values()) {
      m.free();
      v.free();
    }
    this.#moments.clear();
    this.#table.free();
    this.#factor?.free();
    this.#factor = null;
  }
}
