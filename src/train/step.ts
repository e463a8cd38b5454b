/**
 * One optimizer step: forward and backward over the micro-batches, the gradient norm, clipping, the update.
 *
 * Micro-batches are weighted by their number of targets, so accumulated gradients equal those of one large batch. A step
 * whose loss or gradient is not finite changes nothing.
 *
 * This file holds the step that the host controls (`HostStepper`), batches on the device, and a step's view of the other
 * ranks for a run of one process. `DeviceStepper` (device-stepper.ts) launches everything, the update included, without
 * waiting for the GPU.
 */
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import type { Device } from '../device/device.js';
import { kernelOptions } from '../model/kernels.js';
import type { ForwardOptions } from '../model/language-model.js';
import { computeDtype, type ModelShape } from '../model/shape.js';
import { AdamW } from '../ops/adamw/op.js';
import { type SparseLayout, type SparseOptions, sparseLayout } from '../ops/attention/nsa.js';
import { Sequences } from '../ops/common/sequences.js';
import { clipFactor, GradientNorms } from '../ops/gradnorm/op.js';
import { Muon } from '../ops/muon/op.js';
import type { Optimizer, Trainable } from '../tensor/optimizer.js';
import type { Parameter } from '../tensor/parameter.js';
import { Tape } from '../tensor/tape.js';
import { Tensor } from '../tensor/tensor.js';
import { NOTHING_OBSERVED, type Observed, StepTelemetry, strictObserver } from './observers.js';
import type { Agreement } from './ranks/agreement.js';

/** What training needs of a model; `LanguageModel` is one. */
export interface TrainableModel {
  readonly device: Device;
  readonly parameters: readonly Parameter[];
  /** The mean loss over the targets of a batch, a scalar. */
  loss(tape: Tape, ids: Tensor, targets: Tensor, options: ForwardOptions): Tensor;
  /** The loss of every target [T], without gradients, for evaluation. */
  losses(ids: Tensor, targets: Tensor, options: ForwardOptions): Tensor;
  /** The layout of compressed blocks, and the checks of runtime.strict_asserts, depend on it. */
  readonly shape: ModelShape;
  /** Changes `shape.nsa.nSel`, for `train.n_sel_from`. */
  setSelectedBlocks?(nSel: number): void;
}

/** Computes the mean loss of a batch on the device, a scalar that the tape can differentiate. */
export type LossFunction = (tape: Tape, batch: DeviceBatch, options: ForwardOptions) => Tensor;

/** Sums gradients over ranks, or does nothing in a run of one process. `DataParallel` documents the order of calls. */
export interface GradientExchange {
  /** What this rank's optimizer updates: parameters, or this rank's parts of them. */
  readonly trained: readonly Trainable[];
  /** The gradients whose norms this rank computes. */
  readonly gradients: readonly Tensor[];
  /** Whether each rank keeps only a part of the optimizer's state (ZeRO-1). */
  readonly isSharded: boolean;
  /** Whether a step may be recorded as a graph although batches of the ranks may differ in shape. */
  readonly allowsUnequalShapes: boolean;
  /** Called before each backward pass; `isLast` for the last one of a step, after which gradients are exchanged. */
  begin(isLast: boolean): void;
  /** Waits until all gradients are exchanged. */
  finish(): void;
  /** Adds sums over all ranks, in place. */
  reduceSums(sums: Tensor): void;
  /** Gives every rank the values that other ranks have updated. */
  shareValues(): void;
  /** Frees the buffers of the exchange. */
  free(): void;
}

/** The gradients of a run of one process: nothing to exchange. */
export class LocalGradients implements GradientExchange {
  readonly trained: readonly Parameter[];
  readonly isSharded = false;
  readonly allowsUnequalShapes = true;

  constructor(parameters: readonly Parameter[]) {
    this.trained = parameters;
  }

  get gradients(): readonly Tensor[] {
    return this.trained.flatMap(({ gradient }) => (gradient ? [gradient] : []));
  }

  begin(): void {}
  finish(): void {}
  reduceSums(): void {}
  shareValues(): void {}
  free(): void {}
}

/** The agreement of a run of one process: every rank knows what this one knows. */
export class SingleAgreement implements Agreement {
  sum(values: readonly number[]): number[] {
    return [...values];
  }
  max(values: readonly number[]): number[] {
    return [...values];
  }
  wait(): void {}
  gather(text: string): string[] {
    return [text];
  }
  share(text: string): string {
    return text;
  }
  async firstThenOthers<Result>(action: () => Result | Promise<Result>): Promise<Result> {
    return await action();
  }
}

/** A batch on the device. */
export interface DeviceBatch {
  readonly ids: Tensor;
  readonly targets: Tensor;
  readonly layout: SparseLayout;
}

interface HeldLayout {
  readonly layout: SparseLayout;
  holders: number;
}

/**
 * Uploads batches. A layout is kept while a batch uses it. The newest is also kept afterwards, because without document
 * masks all batches share one layout.
 */
export class BatchUploader {
  readonly #device: Device;
  readonly #block: { readonly l: number; readonly d: number };
  /** The last one is the newest. */
  #layouts: HeldLayout[] = [];

  constructor(device: Device, block: { readonly l: number; readonly d: number }) {
    this.#device = device;
    this.#block = block;
  }

  /** The tensors are valid until `release`. */
  upload({ inputs, targets, cuSeqlens }: Pick<Batch, 'inputs' | 'targets' | 'cuSeqlens'>): DeviceBatch {
    const layout = this.#layoutOf(cuSeqlens);
    return {
      ids: Tensor.from(this.#device, inputs, [inputs.length], 'i32'),
      targets: Tensor.from(this.#device, targets, [targets.length], 'i32'),
      layout,
    };
  }

  /** Gives the memory of a batch back for the next one. */
  release({ ids, targets, layout }: DeviceBatch): void {
    ids.free();
    targets.free();
    const held = this.#layouts.find((one) => one.layout === layout);
    if (held) held.holders -= 1;
    this.#forgetUnused();
  }

  /** Frees all memory of the uploader. */
  free(): void {
    for (const { layout } of this.#layouts) freeLayout(layout);
    this.#layouts = [];
  }

  #layoutOf(offsets: Int32Array): SparseLayout {
    const isSame = ({ layout }: HeldLayout) =>
      layout.tokens.starts.length === offsets.length && layout.tokens.starts.every((start, i) => start === offsets[i]);
    const held = this.#layouts.find(isSame) ?? {
      layout: sparseLayout(Sequences.fromOffsets(this.#device, offsets), this.#block),
      holders: 0,
    };
    held.holders += 1;
    this.#layouts = [...this.#layouts.filter((one) => one !== held), held];
    this.#forgetUnused();
    return held.layout;
  }

  #forgetUnused(): void {
    const newest = this.#layouts.at(-1);
    const isUnused = (one: HeldLayout) => one.holders === 0 && one !== newest;
    for (const { layout } of this.#layouts.filter(isUnused)) freeLayout(layout);
    this.#layouts = this.#layouts.filter((one) => !isUnused(one));
  }
}

function freeLayout({ tokens, blocks }: SparseLayout): void {
  tokens.free();
  blocks.free();
}

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

/** What one training step is given. */
export interface StepInputs {
  /** The micro-batches of this rank. */
  readonly batches: readonly Batch[];
  /** Targets of the step over all ranks; by default those of the batches. */
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

/** What one training step returns. */
export interface StepResult extends StepGradients {
  readonly observed: Observed;
  /** Relative errors against the reference (runtime.debug_compare). */
  readonly comparisons: readonly number[];
  /** How often each attention kernel ran since the start; empty where there is no choice. */
  readonly counters: Readonly<Record<string, number>>;
}

/** An optimizer step in parts: `launch`, optionally `prefetch`, `read`, then `update` unless the step is rejected. */
export interface Stepper {
  /** Starts the forward and backward passes. */
  launch(inputs: StepInputs): void;
  /** Starts copying the batches of the next step while the device computes. */
  prefetch?(batches: readonly Batch[]): void;
  /** Waits for the results of `launch`. */
  read(): StepResult;
  /** Applies the gradients. A stepper whose device has already applied them has nothing left to do. */
  update(): void;
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
    this.#telemetry = runtime.aux_stats ? new StepTelemetry(context.model) : null;
  }

  launch(inputs: StepInputs): void {
    const { model, config, uploader } = this.#context;
    this.#inputs = inputs;
    this.#comparisons = [];
    this.#telemetry?.begin(inputs.isDetailed ?? false);
    const telemetry = this.#telemetry ?? undefined;
    const observer = config.runtime.strict_asserts ? strictObserver(model.shape, telemetry) : telemetry;
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
    return { loss, norm, norms: each, finite, observed, comparisons: this.#comparisons, counters: {} };
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
  const means = batches.map((batch, i) => {
    exchange.begin(i === batches.length - 1);
    const tape = new Tape(model.device, { fp8: config.runtime.fp8 });
    const options: ForwardOptions = {
      layout: batch.layout,
      kernels,
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
