/**
 * One optimizer step: forward and backward over the micro-batches, the gradient norm, clipping, the update.
 *
 * Micro-batches are weighted by their number of targets, so accumulated gradients equal those of one large batch. A step
 * whose loss or gradient is not finite changes nothing.
 *
 * `HostStepper` controls the step from the host. `DeviceStepper` (device-stepper.ts) launches everything, the update
 * included, without waiting for the GPU.
 */
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import type { Device } from '../device/device.js';
import type { Adapter } from '../model/adapters.js';
import { kernelOptions } from '../model/kernels.js';
import type { ForwardOptions } from '../model/language-model.js';
import { computeDtype, type ModelShape } from '../model/shape.js';
import { AdamW } from '../ops/adamw/op.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import { clipFactor, GradientNorms } from '../ops/gradnorm/op.js';
import { Muon } from '../ops/muon/op.js';
import type { RunMetrics } from '../run/metrics.js';
import type { Optimizer } from '../tensor/optimizer.js';
import type { Parameter } from '../tensor/parameter.js';
import { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import type { BatchUploader, DeviceBatch } from './device-batch.js';
import { type GradientExchange, LocalGradients } from './gradient-exchange.js';
import { type AttentionStatistics, NOTHING_OBSERVED, StepTelemetry, strictObserver } from './observers.js';
import { type Agreement, SingleAgreement } from './ranks/agreement.js';

/** The part of a model that training uses. `LanguageModel` is one; another needs only the first three members. */
export interface TrainableModel {
  readonly device: Device;
  readonly parameters: readonly Parameter[];
  /** Adapters: a checkpoint of a model with some holds them alone. */
  readonly adapters?: readonly Adapter[];
  /** The mean loss over the targets of a batch, a scalar. */
  loss(tape: Tape, ids: Tensor, targets: Tensor, options: ForwardOptions): Tensor;
  /** The loss of every target [T], without gradients, for evaluation. Default: `loss` of every batch. */
  losses?(ids: Tensor, targets: Tensor, options: ForwardOptions): Tensor;
  /** Sizes of its attention, for statistics of gates and selection by layer. Without it there are none. */
  readonly shape?: ModelShape;
  /** Changes `shape.nsa.nSel`, for `train.n_sel_from`. */
  setSelectedBlocks?(nSel: number): void;
}

/** Computes the mean loss of a batch on the device, a scalar that the tape can differentiate. */
export type LossFunction = (tape: Tape, batch: DeviceBatch, options: ForwardOptions) => Tensor;

/** The optimizer of what this rank trains, with the config's settings. Only tensors with two or more dimensions decay. */
export function createOptimizer(
  model: TrainableModel,
  exchange: Pick<GradientExchange, 'trained'>,
  { train, runtime }: Config,
): Optimizer {
  const matrices = new Set(model.parameters.filter(({ value }) => value.shape.length >= 2).map(({ name }) => name));
  const trained = exchange.trained.map((parameter) => ({
    parameter,
    weightDecay: matrices.has(parameter.name) ? train.weight_decay : 0,
  }));
  const adamw = { betas: train.betas, epsilon: train.eps };
  if (train.optimizer === 'adamw') return new AdamW(model.device, trained, adamw);
  return new Muon(model.device, trained, {
    ...adamw,
    momentum: train.muon_momentum,
    learningRateRatio: train.muon_lr_ratio,
    dtype: computeDtype(runtime, model.device.kind),
  });
}

/** Everything a step works with. */
export interface StepContext {
  readonly model: TrainableModel;
  readonly config: Config;
  readonly optimizer: Optimizer;
  readonly uploader: BatchUploader;
  readonly exchange: GradientExchange;
  readonly agreement: Agreement;
  /** Replaces the model's own loss. */
  readonly loss?: LossFunction | undefined;
}

/** The context of a step in one process. */
export function localContext(
  parts: Pick<StepContext, 'model' | 'config' | 'optimizer' | 'uploader' | 'loss'>,
): StepContext {
  return { ...parts, exchange: new LocalGradients(parts.model.parameters), agreement: new SingleAgreement() };
}

/** Inputs of one training step. */
export interface StepInputs {
  /** The micro-batches of this rank. */
  readonly batches: readonly Batch[];
  /** Targets of the step that count for the loss, over all ranks; by default those of the batches. */
  readonly targets?: number;
  readonly learningRate: number;
  /** Whether statistics of the attention by layer are wanted. */
  readonly isDetailed?: boolean;
}

/** Loss and gradient norm of a step. */
export interface StepGradients {
  /** Mean loss per target over all micro-batches of all ranks. */
  readonly loss: number;
  readonly norm: number;
  /** Norm of the gradient of each parameter, in the model's order. */
  readonly norms: readonly number[];
  /** Whether loss and gradients are finite. */
  readonly finite: boolean;
}

/** The result of one training step. */
export interface StepResult extends StepGradients {
  /** Metrics of gates and selection, and counters of the kernels that ran, where there is a choice. */
  readonly metrics: RunMetrics;
  /** By layer; null for dense attention and in steps without details. */
  readonly attention: AttentionStatistics | null;
  /** Relative errors against the reference (runtime.debug_compare). */
  readonly comparisons: readonly number[];
}

/** An optimizer step in parts: `launch`, optionally `prefetch`, `read`, then `update` if there is one. */
export interface Stepper {
  /** Starts the forward and backward passes. */
  launch(inputs: StepInputs): void;
  /** Starts copying the batches of the next step while the device computes. */
  prefetch?(batches: readonly Batch[]): void;
  /** Waits for the results of `launch`. */
  read(): StepResult;
  /** Applies the gradients; without this call the step is rejected. Null if `launch` applies them: no step can be rejected. */
  readonly update: (() => void) | null;
  /** Frees what the stepper holds on the device. */
  free(): void;
}

/** Runs training steps from the host. */
export class HostStepper implements Stepper {
  readonly #context: StepContext;
  readonly #kernels: SparseOptions;
  readonly #telemetry: StepTelemetry | null;
  #inputs: StepInputs | null = null;
  #norm = 0;
  #comparisons: number[] = [];
  #held: readonly DeviceBatch[] = [];
  #means: readonly Tensor[] = [];

  constructor(context: StepContext) {
    const { runtime } = context.config;
    const onCompare = (error: number) => void this.#comparisons.push(error);
    this.#context = context;
    this.#kernels = { ...kernelOptions(context.config), ...(runtime.debug_compare && { onCompare }) };
    this.#telemetry = runtime.aux_stats ? telemetryOf(context.model) : null;
  }

  launch(inputs: StepInputs): void {
    const { model, config, uploader } = this.#context;
    this.#inputs = inputs;
    this.#comparisons = [];
    this.#telemetry?.begin(inputs.isDetailed ?? false, inputs.batches[0]);
    const telemetry = this.#telemetry ?? undefined;
    const { shape } = model;
    const observer = config.runtime.strict_asserts && shape ? strictObserver(shape, telemetry) : telemetry;
    this.#held = inputs.batches.map((batch) => uploader.upload(batch));
    const weights = targetWeights(inputs.batches, inputs.targets);
    this.#means = launchGradients(this.#context, this.#held, weights, { observer, kernels: this.#kernels });
  }

  read(): StepResult {
    const { exchange, uploader, agreement, model } = this.#context;
    const { batches, targets, isDetailed } = this.#inputs!;
    const norms = new GradientNorms(model.device);
    const sums = norms.launch(exchange.gradients);
    exchange.reduceSums(sums);
    const { norm, each, nonFinite } = norms.read();
    norms.free();
    const [loss] = agreement.sum([weightedLoss(this.#means, targetWeights(batches, targets))]);
    for (const mean of this.#means) mean.free();
    for (const batch of this.#held) uploader.release(batch);
    const observed = this.#telemetry?.read(isDetailed ? batches[0] : null) ?? NOTHING_OBSERVED;
    this.#telemetry?.free();
    this.#norm = norm;
    const finite = Number.isFinite(loss) && nonFinite === 0 && Number.isFinite(norm);
    return { loss, norm, norms: each, finite, ...observed, comparisons: this.#comparisons };
  }

  update(): void {
    const { optimizer, config, exchange } = this.#context;
    const { grad_clip: limit } = config.train;
    const { learningRate } = this.#inputs!;
    optimizer.step({ learningRate, gradientScale: limit > 0 ? clipFactor(this.#norm, limit) : 1 });
    exchange.shareValues();
  }

  /** Holds nothing on the device. */
  free(): void {}
}

/** Null for a model that does not say its shape. */
export function telemetryOf(model: Pick<TrainableModel, 'device' | 'shape'>): StepTelemetry | null {
  // The model itself: the number of selected blocks in its shape may change between steps.
  return model.shape ? new StepTelemetry(model as typeof model & { readonly shape: ModelShape }) : null;
}

/** Sizes of compressed blocks, by which sequences are laid out. */
export function blocksOf(
  { shape }: Pick<TrainableModel, 'shape'>,
  { nsa }: Config,
): { readonly l: number; readonly d: number } {
  return shape?.nsa ?? nsa;
}

/** Targets that count in some batches. */
export function countTargets(batches: readonly Batch[]): number {
  return batches.reduce((total, { targetCount }) => total + targetCount, 0);
}

/** The weight of each micro-batch in the step: its share of all targets. */
export function targetWeights(batches: readonly Batch[], targets = countTargets(batches)): number[] {
  return batches.map(({ targetCount }) => (targets === 0 ? 0 : targetCount / targets));
}

export function weightedLoss(means: readonly Tensor[], weights: readonly number[]): number {
  return means.reduce((loss, mean, i) => loss + mean.item() * weights[i], 0);
}

/** Forward and backward over the micro-batches, without waiting; returns their mean losses, which the caller frees. */
export function launchGradients(
  { model, config, exchange, loss }: Pick<StepContext, 'model' | 'config' | 'exchange' | 'loss'>,
  batches: readonly DeviceBatch[],
  weights: readonly number[],
  { observer, kernels = kernelOptions(config) }: Pick<ForwardOptions, 'observer' | 'kernels'> = {},
): Tensor[] {
  for (const parameter of model.parameters) parameter.clearGradient();
  const { scorer_loss: scorer } = config.train;
  const means = batches.map((batch, i) => {
    exchange.begin(i === batches.length - 1);
    const tape = new Tape(model.device, { fp8: config.runtime.fp8 });
    const options: ForwardOptions = {
      lengths: batch.sequences,
      // A micro-batch weighs as much in the scorer loss as in the loss.
      kernels: scorer > 0 ? { ...kernels, scorerWeight: scorer * weights[i] } : kernels,
      checkpointing: config.runtime.gradient_checkpointing,
      observer,
    };
    const mean = tape.release(loss ? loss(tape, batch, options) : model.loss(tape, batch.ids, batch.targets, options));
    tape.backward(mean, weights[i]);
    tape.end();
    return mean;
  });
  exchange.finish();
  return means;
}
