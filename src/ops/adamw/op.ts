/**
 * AdamW: Adam with bias correction and decoupled weight decay, in one pass over each parameter. The gradient is
 * multiplied on the way in, so clipping costs nothing.
 */
import { type Device, defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import type { Parameter } from '../../tensor/parameter.js';
import { Tensor } from '../../tensor/tensor.js';

const kernels = defineKernels(import.meta.url, {
  adamw_step: ['ptr', 'ptr', 'ptr', 'ptr', 'i64', 'f32', 'f32', 'f32', 'f32', 'f32', 'f32', 'f32', 'f32', 'f32'],
});

export interface AdamWOptions {
  readonly betas?: readonly [number, number];
  readonly epsilon?: number;
}

/** A parameter and how fast it shrinks: every step takes learningRate * weightDecay of it away. */
export interface TrainedParameter {
  readonly parameter: Parameter;
  readonly weightDecay: number;
}

export interface AdamWStep {
  readonly learningRate: number;
  /** What gradients are multiplied by before anything else: the clip factor. */
  readonly gradientScale?: number;
}

interface Moments {
  readonly m: Tensor;
  readonly v: Tensor;
}

export class AdamW {
  readonly #device: Device;
  readonly #trained: readonly TrainedParameter[];
  readonly #moments = new Map<string, Moments>();
  readonly #betas: readonly [number, number];
  readonly #epsilon: number;
  /** Steps taken so far. A checkpoint keeps it beside `state` and sets it on resume. */
  steps = 0;

  constructor(device: Device, trained: readonly TrainedParameter[], options: AdamWOptions = {}) {
    this.#device = device;
    this.#trained = trained;
    this.#betas = options.betas ?? [0.9, 0.95];
    this.#epsilon = options.epsilon ?? 1e-8;
    const names = new Set(trained.map(({ parameter }) => parameter.name));
    if (names.size < trained.length) throw new UsageError('AdamW: two parameters have the same name');
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

  /** Updates every parameter that has a gradient. */
  step({ learningRate, gradientScale = 1 }: AdamWStep): void {
    this.steps += 1;
    const kernel = this.#device.kernels(kernels);
    const [beta1, beta2] = this.#betas;
    const stepSize = learningRate / (1 - beta1 ** this.steps);
    const inverseRootBias = 1 / Math.sqrt(1 - beta2 ** this.steps);
    for (const { parameter, weightDecay } of this.#trained) {
      const { name, value, gradient } = parameter;
      const moments = this.#moments.get(name);
      if (!gradient || !moments) continue;
      const shrink = learningRate * weightDecay;
      kernel.adamw_step(
        value,
        gradient,
        moments.m,
        moments.v,
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
    }
  }

  free(): void {
    for (const { m, v } of this.#moments.values()) {
      m.free();
      v.free();
    }
    this.#moments.clear();
  }
}
