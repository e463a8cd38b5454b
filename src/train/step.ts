/**
 * One optimizer step: forward and backward over the micro-batches, the gradient norm, clipping, the update.
 *
 * Micro-batches are weighted by their number of targets, so accumulated gradients equal those of one large batch. A step
 * whose loss or gradient is not finite changes nothing.
 *
 * This file holds the step that the host controls. `DeviceStepper` (device-step.ts) launches everything, the update
 * included, without waiting for the GPU.
 */
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import type { Device } from '../device/device.js';
import type { Observer } from '../model/attention.js';
import { kernelOptions } from '../model/kernels.js';
import type { ForwardOptions } from '../model/language-model.js';
import type { ModelShape } from '../model/shape.js';
import { AdamW } from '../ops/adamw/op.js';
import type { AttentionCounters } from '../ops/attention/counters.js';
import { type GateStatistics, gateSums, summarizeGates } from '../ops/attention/gate/op.js';
import { type SelectionStatistics, selectionCounts, summarizeSelection } from '../ops/attention/selection-counts/op.js';
import { sampleSelection } from '../ops/attention/selection-sample/op.js';
import { forcedBlocks } from '../ops/attention/shape.js';
import { clipFactor, GradientNorms } from '../ops/gradnorm/op.js';
import { Muon } from '../ops/muon/op.js';
import type { Optimizer, Trainable } from '../tensor/optimizer.js';
import type { Parameter } from '../tensor/parameter.js';
import { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import { type AttentionStatistics, attentionStatistics } from './attention-statistics.js';
import type { BatchUploader, DeviceBatch } from './batches.js';
import { type Agreement, SingleAgreement } from './ranks/agreement.js';

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
    dtype: runtime.precision === 'bf16' && model.device.kind === 'cuda' ? 'bf16' : 'f32',
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
  #inputs: StepInputs | null = null;
  #norm = 0;
  #telemetry: StepTelemetry | null = null;
  #comparisons: number[] = [];
  #held: readonly DeviceBatch[] = [];
  #means: readonly Tensor[] = [];

  constructor(context: StepContext) {
    this.#context = context;
  }

  launch(inputs: StepInputs): void {
    const { model, config, uploader } = this.#context;
    const { runtime } = config;
    this.#inputs = inputs;
    this.#comparisons = [];
    this.#telemetry = runtime.aux_stats
      ? new StepTelemetry(model.device, model.shape, inputs.isDetailed ?? false)
      : null;
    const telemetry = this.#telemetry ?? undefined;
    this.#held = inputs.batches.map((batch) => uploader.upload(batch));
    const options: ForwardExtras = {
      observer: runtime.strict_asserts ? strictObserver(model.shape, telemetry) : telemetry,
      ...(runtime.debug_compare && { onCompare: (error: number) => void this.#comparisons.push(error) }),
    };
    this.#means = launchGradients(this.#context, this.#held, targetWeights(inputs.batches, inputs.targets), options);
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

/** What one step adds to the options of its forward passes. */
export interface ForwardExtras {
  readonly observer: ForwardOptions['observer'];
  /** Receives the relative error of every comparison with the reference (runtime.debug_compare). */
  readonly onCompare?: (relativeError: number) => void;
  /** Counts which attention kernels ran. */
  readonly counters?: AttentionCounters;
}

/** Forward and backward over the micro-batches, without waiting; returns their mean losses, which the caller frees. */
export function launchGradients(
  { model, config, exchange, loss }: Pick<StepContext, 'model' | 'config' | 'exchange' | 'loss'>,
  batches: readonly DeviceBatch[],
  weights: readonly number[],
  { observer, ...kernels }: ForwardExtras = { observer: undefined },
): Tensor[] {
  for (const parameter of model.parameters) parameter.clearGradient();
  const means = batches.map((batch, i) => {
    exchange.begin(i === batches.length - 1);
    const tape = new Tape(model.device, { fp8: config.runtime.fp8 });
    const options: ForwardOptions = {
      layout: batch.layout,
      kernels: { ...kernelOptions(config), ...kernels },
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

/** Statistics observed during a step. */
export interface Observed {
  /** Over all layers, heads and tokens; null for dense attention. */
  readonly gates: GateStatistics | null;
  /** Selected blocks per token; null for dense attention. */
  readonly selection: SelectionStatistics | null;
  /** By layer; null for dense attention and in steps without details. */
  readonly attention: AttentionStatistics | null;
}

/** What a step observed that collects nothing. */
export const NOTHING_OBSERVED: Observed = { gates: null, selection: null, attention: null };

/** Pairs of neighbouring tokens that the statistics of the selection are computed from. */
const SAMPLED_PAIRS = 128;

/**
 * Collects during the forward passes of one step. Nine numbers per layer stay on the device for the gates, and, if `sampled`,
 * a few kilobytes per layer for the selection of the first micro-batch.
 */
export class StepTelemetry implements Observer {
  readonly #device: Device;
  readonly #gateSums: Tensor[] = [];
  readonly #shape: ModelShape;
  readonly #isSampled: boolean;
  readonly #samples: Tensor[] = [];
  #selection: Tensor | null = null;

  constructor(device: Device, shape: ModelShape, isSampled: boolean) {
    this.#device = device;
    this.#shape = shape;
    this.#isSampled = isSampled;
  }

  gates(_layer: number, gates: Tensor): void {
    this.#gateSums.push(gateSums(this.#device, gates));
  }

  /** The number of selected blocks depends on sequence lengths only, so one layer stands for all. */
  selected(layer: number, selected: Tensor): void {
    if (layer === 0) this.#selection ??= selectionCounts(this.#device, selected);
    // Recomputed layers and later micro-batches call again: the first call of each layer counts.
    if (this.#isSampled && layer === this.#samples.length)
      this.#samples.push(sampleSelection(this.#device, selected, SAMPLED_PAIRS));
  }

  /**
   * Reads what was collected. A replayed graph fills the same memory again. `detailed`: the first micro-batch, if statistics
   * by layer are wanted.
   */
  read(detailed: Batch | null): Observed {
    const sums = this.#gateSums.map((tensor) => tensor.read());
    const gates = sums.length === 0 ? null : summarizeGates(sums);
    const selection = this.#selection && summarizeSelection(this.#selection.read());
    const attention = detailed && this.#samples.length > 0 ? this.#layers(sums, detailed) : null;
    return { gates, selection, attention };
  }

  #layers(sums: readonly ArrayLike<number>[], batch: Batch): AttentionStatistics {
    const { nKvGroups: groups, nsa } = this.#shape;
    const layers = this.#samples.map((sample, i) => ({ gates: sums[i], selection: sample.read() }));
    return attentionStatistics(layers, { groups, slots: nsa.nSel, blockSize: nsa.lSel, ...forcedBlocks(nsa) }, batch);
  }

  free(): void {
    for (const tensor of [...this.#gateSums, ...this.#samples]) tensor.free();
    this.#selection?.free();
    this.#gateSums.length = 0;
    this.#samples.length = 0;
    this.#selection = null;
  }
}

const SUM_TOLERANCE = 1e-5;

/** Checks the invariants of gates and selections in every forward pass, then calls `next`. A violation throws. */
export function strictObserver(shape: ModelShape, next?: Observer): Observer {
  return {
    gates(layer, gates) {
      const values = gates.read();
      for (let i = 0; i < values.length; i += 3) {
        const [a, b, c] = [values[i], values[i + 1], values[i + 2]];
        const sum = a + b + c;
        const isValid =
          a >= 0 && b >= 0 && c >= 0 && (shape.nsa.gate === 'sigmoid' ? sum <= 3 : Math.abs(sum - 1) < SUM_TOLERANCE);
        if (!isValid) throw new Error(`layer ${layer}: gates [${a}, ${b}, ${c}] of row ${i / 3} are not valid weights`);
      }
      next?.gates?.(layer, gates);
    },
    selected(layer, selected) {
      const [, , slots] = selected.shape;
      const blocks = selected.read();
      for (let row = 0; row < blocks.length; row += slots) {
        let previous = -1;
        for (let slot = 0; slot < slots && blocks[row + slot] >= 0; slot++) {
          if (blocks[row + slot] <= previous)
            throw new Error(
              `layer ${layer}: the selection [${blocks.slice(row, row + slots).join(', ')}] is not ascending`,
            );
          previous = blocks[row + slot];
        }
        if (shape.nsa.initBlocks > 0 && blocks[row] !== 0)
          throw new Error(`layer ${layer}: a selection does not contain block 0`);
      }
      next?.selected?.(layer, selected);
    },
  };
}
