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
import { Tape } from '../tensor/tape.js';
import type { BatchUploader } from './batches.js';

export interface StepContext {
  readonly model: LanguageModel;
  readonly optimizer: AdamW;
  readonly uploader: BatchUploader;
  readonly config: Config;
  readonly observer: Observer | undefined;
  /** Told of every comparison with the reference (runtime.debug_compare). */
  readonly onCompare?: (relativeError: number) => void;
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
  const { model, uploader, config, observer } = context;
  const targets = batches.reduce((total, { targetCount }) => total + targetCount, 0);
  for (const parameter of model.parameters) parameter.clearGradient();
  let loss = 0;
  for (const batch of batches) {
    const weight = targets === 0 ? 0 : batch.targetCount / targets;
    const onDevice = uploader.upload(batch);
    const tape = new Tape(model.device);
    const mean = model.loss(tape, onDevice.ids, onDevice.targets, {
      layout: onDevice.layout,
      kernels: { ...kernelOptions(config), ...(context.onCompare && { onCompare: context.onCompare }) },
      checkpointing: config.runtime.gradient_checkpointing,
      observer,
    });
    loss += mean.item() * weight;
    tape.seed(mean, [weight]);
    tape.backward();
    tape.end();
    uploader.release(onDevice);
  }
  const gradients = model.parameters.flatMap(({ gradient }) => (gradient ? [gradient] : []));
  const { norm, each, nonFinite } = gradientNorm(model.device, gradients);
  return { loss, norm, norms: each, finite: Number.isFinite(loss) && nonFinite === 0 && Number.isFinite(norm) };
}

/** Applies the gradients that `computeGradients` left. */
export function applyGradients({ optimizer, config }: StepContext, norm: number, learningRate: number): void {
  const limit = config.train.grad_clip;
  optimizer.step({ learningRate, gradientScale: limit > 0 ? clipFactor(norm, limit) : 1 });
}
