/**
 * One optimizer step: forward and backward over the micro-batches, the gradient's norm, clipping, the update.
 *
 * Micro-batches are weighed by how many targets they hold, so accumulated gradients are those of the one big batch.
 * A step whose loss or gradient is not finite changes nothing.
 */
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import type { Observer } from '../model/attention.js';
import { kernelOptions } from '../model/kernels.js';
import type { LanguageModel } from '../model/language-model.js';
import type { AdamW } from '../ops/adamw/op.js';
import type { AttentionCounters } from '../ops/attention/counters.js';
import { clipFactor, GradientNorms } from '../ops/gradnorm/op.js';
import type { Together } from '../ranks/together.js';
import { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import type { BatchUploader, DeviceBatch } from './batches.js';
import type { DataParallel } from './data-parallel.js';

/** What a forward and a backward pass need. */
export interface LaunchContext {
  readonly model: LanguageModel;
  readonly config: Config;
  readonly observer: Observer | undefined;
  /** Told of every comparison with the reference (runtime.debug_compare). */
  readonly onCompare?: (relativeError: number) => void;
  /** Told which attention kernels served. */
  readonly counters?: AttentionCounters;
  /** Sums gradients over all ranks, where there are several. */
  readonly parallel?: DataParallel | undefined;
}

export interface StepContext extends LaunchContext {
  readonly optimizer: AdamW;
  readonly uploader: BatchUploader;
  /** The other ranks, where there are some. */
  readonly together?: Together | undefined;
}

export interface StepGradients {
  /** Mean loss per target over all micro-batches, of all ranks. */
  readonly loss: number;
  readonly norm: number;
  /** Norm of every parameter's gradient, in the model's order. */
  readonly norms: readonly number[];
  readonly finite: boolean;
}

/**
 * Leaves the gradients of the whole step in the parameters. `targets` is the number of targets in the step over all ranks;
 * those of the batches when absent.
 */
export function computeGradients(context: StepContext, batches: readonly Batch[], targets?: number): StepGradients {
  const { uploader, parallel, together } = context;
  const held = batches.map((batch) => uploader.upload(batch));
  const weights = targetWeights(batches, targets);
  const means = launchGradients(context, held, weights);
  const { norm, each, nonFinite } = stepNorm(context);
  const own = weightedLoss(means, weights);
  const loss = together && parallel ? together.sum([own])[0] : own;
  for (const mean of means) mean.free();
  for (const batch of held) uploader.release(batch);
  return { loss, norm, norms: each, finite: Number.isFinite(loss) && nonFinite === 0 && Number.isFinite(norm) };
}

/** The norm of the gradients of all ranks: the same numbers on each, so each clips and judges alike. */
function stepNorm({ model, parallel }: StepContext) {
  const norms = new GradientNorms(model.device);
  try {
    const sums = norms.launch(parallel?.gradients ?? ownGradients(model));
    parallel?.reduceSums(sums);
    return norms.read();
  } finally {
    norms.free();
  }
}

export function ownGradients({ parameters }: LanguageModel): Tensor[] {
  return parameters.flatMap(({ gradient }) => (gradient ? [gradient] : []));
}

/** How many targets count in some batches. */
export function countTargets(batches: readonly Batch[]): number {
  return batches.reduce((total, { targetCount }) => total + targetCount, 0);
}

/** The share of every micro-batch in the step: its targets among all. */
export function targetWeights(batches: readonly Batch[], targets = countTargets(batches)): number[] {
  return batches.map(({ targetCount }) => (targets === 0 ? 0 : targetCount / targets));
}

/** Forward and backward over the micro-batches, without waiting; returns their mean losses, which the caller frees. */
export function launchGradients(
  { model, config, observer, onCompare, counters, parallel }: LaunchContext,
  batches: readonly DeviceBatch[],
  weights: readonly number[],
): Tensor[] {
  for (const parameter of model.parameters) parameter.clearGradient();
  const means = batches.map(({ ids, targets, layout }, i) => {
    parallel?.begin(i === batches.length - 1);
    const tape = new Tape(model.device);
    const mean = tape.keep(
      model.loss(tape, ids, targets, {
        layout,
        kernels: { ...kernelOptions(config), ...(onCompare && { onCompare }), ...(counters && { counters }) },
        checkpointing: config.runtime.gradient_checkpointing,
        observer,
      }),
    );
    tape.backward(mean, weights[i]);
    tape.end();
    return mean;
  });
  parallel?.finish();
  return means;
}

export function weightedLoss(means: readonly Tensor[], weights: readonly number[]): number {
  return means.reduce((loss, mean, i) => loss + mean.item() * weights[i], 0);
}

/** Applies the gradients that `computeGradients` left. */
export function applyGradients({ optimizer, config, parallel }: StepContext, norm: number, learningRate: number): void {
  const limit = config.train.grad_clip;
  optimizer.step({ learningRate, gradientScale: limit > 0 ? clipFactor(norm, limit) : 1 });
  parallel?.shareValues();
}
