/**
 * One optimizer step as the loop sees it. The host's stepper waits for the loss and the gradient norm before it lets the
 * update happen; the device's (device-stepper.ts) leaves that decision to the GPU and waits once, at the end.
 */
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { CudaDevice } from '../device/cuda/cuda.js';
import type { LanguageModel } from '../model/language-model.js';
import type { AdamW } from '../ops/adamw/op.js';
import type { Together } from '../ranks/together.js';
import type { BatchUploader } from './batches.js';
import type { DataParallel } from './data-parallel.js';
import { DeviceStepper } from './device-stepper.js';
import { applyGradients, computeGradients, type StepGradients } from './optimizer-step.js';
import { strictObserver } from './strict.js';
import { type Observed, StepTelemetry } from './telemetry.js';

export interface StepperContext {
  readonly model: LanguageModel;
  readonly optimizer: AdamW;
  readonly uploader: BatchUploader;
  readonly config: Config;
  /** Where there are several ranks: what sums their gradients, and how they agree on the rest. */
  readonly parallel?: DataParallel | undefined;
  readonly together?: Together | undefined;
}

export interface StepRequest {
  readonly batches: readonly Batch[];
  /** Targets of the step over all ranks; those of the batches when absent. */
  readonly targets?: number | undefined;
  readonly learningRate: number;
  /** Asked when loss and gradients are finite; false leaves the update out. */
  readonly accept: (gradients: StepGradients) => boolean;
  /** The batches of the step after this one, for a stepper that has time while its device computes; none at the end. */
  readonly ahead?: () => readonly Batch[];
}

export interface StepResult extends StepGradients {
  readonly observed: Observed;
  /** Distances from the reference, with runtime.debug_compare. */
  readonly comparisons: readonly number[];
  /** Which attention kernels served, since the run began; empty where there is no choice. */
  readonly counters: Readonly<Record<string, number>>;
  /** Milliseconds until the gradients were there, and in all. */
  readonly gradientsMs: number;
  readonly totalMs: number;
}

export interface Stepper {
  step(request: StepRequest): StepResult;
  free(): void;
}

/** The fastest stepper that can do what the config asks for. */
export function createStepper(context: StepperContext): Stepper {
  const { device } = context.model;
  if (device instanceof CudaDevice && !needsHost(context.config)) return new DeviceStepper(device, context);
  return new HostStepper(context);
}

/** What only works when the host looks at every step before it goes on. */
function needsHost({ runtime, train }: Config): boolean {
  const reference = runtime.force_parity || runtime.selection_kernel === 'reference';
  return train.spike_skip || runtime.strict_asserts || runtime.debug_compare || runtime.debug_timing || reference;
}

export class HostStepper implements Stepper {
  readonly #context: StepperContext;

  constructor(context: StepperContext) {
    this.#context = context;
  }

  step({ batches, targets, learningRate, accept }: StepRequest): StepResult {
    const { model, config } = this.#context;
    const { runtime } = config;
    const started = performance.now();
    const telemetry = runtime.aux_stats ? new StepTelemetry(model.device) : undefined;
    const observer = runtime.strict_asserts ? strictObserver(model.shape, telemetry) : telemetry;
    const comparisons: number[] = [];
    const onCompare = runtime.debug_compare ? { onCompare: (error: number) => void comparisons.push(error) } : {};
    const context = { ...this.#context, observer, ...onCompare };
    const gradients = computeGradients(context, batches, targets);
    const gradientsMs = performance.now() - started;
    const observed = telemetry?.read() ?? { gates: null, selection: null };
    telemetry?.free();
    if (gradients.finite && accept(gradients)) applyGradients(context, gradients.norm, learningRate);
    return { ...gradients, observed, comparisons, counters: {}, gradientsMs, totalMs: performance.now() - started };
  }

  free(): void {}
}
