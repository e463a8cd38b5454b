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
import { clipFactor, gradientNorm } from '../ops/gradnorm/op.js';
import type { AttentionCounters } from '../ops/nsa-counters.js';
import { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import type { BatchUploader, DeviceBatch } from './batches.js';

/** What a forward and a backward pass need. */
export interface LaunchContext {
  readonly model: LanguageModel;
  readonly config: Config;
  readonly observer: Observer | undefined;
  /** Told of every comparison with the reference (runtime.debug_compare). */
  readonly onCompare?: (relativeError: number) => void;
  /** Told which attention kernels served. */
  readonly counters?: AttentionCounters;
}

export interface StepContext extends LaunchContext {
  readonly optimizer: AdamW;
  readonly uploader: BatchUploader;
}

export interface StepGradients {
  /** Mean loss per target over all micro-batches. */
  readonly loss: number;
  readonly norm: number;
  /** Norm of every parameter's gradient, in the model's order. */
  readonly norms: readonly number[];
  readonly finite: boolean;
}

/** Leaves the gradients of the whole step in the parameters. */
export function computeGradients(context: StepContext, batches: readonly Batch[]): StepGradients {
  const { model, uploader } = context;
  const held = batches.map((batch) => uploader.upload(batch));
  const weights = targetWeights(batches);
  const means = launchGradients(context, held, weights);
  const gradients = model.parameters.flatMap(({ gradient }) => (gradient ? [gradient] : []));
  const { norm, each, nonFinite } = gradientNorm(model.device, gradients);
  const loss = weightedLoss(means, weights);
  for (const mean of means) mean.free();
  for (const batch of held) uploader.release(batch);
  return { loss, norm, norms: each, finite: Number.isFinite(loss) && nonFinite === 0 && Number.isFinite(norm) };
}

/** The share of every micro-batch in the step: its targets among all. */
export function targetWeights(batches: readonly Batch[]): number[] {
  const targets = batches.reduce((total, { targetCount }) => total + targetCount, 0);
  return batches.map(({ targetCount }) => (targets === 0 ? 0 : targetCount / targets));
}

/** Forward and backward over the micro-batches, without waiting; returns their mean losses, which the caller frees. */
export function launchGradients(
  { model, config, observer, onCompare, counters }: LaunchContext,
  batches: readonly DeviceBatch[],
  weights: readonly number[],
): Tensor[] {
  for (const parameter of model.parameters) parameter.clearGradient();
  return batches.map(({ ids, targets, layout }, i) => {
    const tape = new Tape(model.device);
    const mean = tape.keep(
      model.loss(tape, ids, targets, {
        layout,
        kernels: { ...kernelOptions(config), ...(onCompare && { onCompare }), ...(counters && { counters }) },
        checkpointing: config.runtime.gradient_checkpointing,
        observer,
      }),
    );
    tape.seedFilled(mean, weights[i]);
    tape.backward();
    tape.end();
    return mean;
  });
}

export function weightedLoss(means: readonly Tensor[], weights: readonly number[]): number {
  return means.reduce((loss, mean, i) => loss + mean.item() * weights[i], 0);
}

/** Applies the gradients that `computeGradients` left. */
export function applyGradients({ optimizer, config }: StepContext, norm: number, learningRate: number): void {
  const limit = config.train.grad_clip;
  optimizer.step({ learningRate, gradientScale: limit > 0 ? clipFactor(norm, limit) : 1 });
}
