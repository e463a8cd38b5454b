/**
 * The optimizer step of a GPU: everything, the update included, is launched without waiting. The GPU clips, and skips the
 * update if the gradient is not finite. The host reads loss, norm and statistics once, at the end. From the second step of
 * the same shapes on, the whole step is one graph that is replayed.
 */

import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { CudaDevice } from '../device/cuda/cuda.js';
import type { CudaGraph } from '../device/cuda/stream.js';
import type { Device } from '../device/device.js';
import type { MemoryPool } from '../device/pool.js';
import { UsageError } from '../errors.js';
import { kernelOptions } from '../model/kernels.js';
import { AttentionCounters } from '../ops/attention/counters.js';
import { GradientNorms } from '../ops/gradnorm/op.js';
import { fp8Refusal } from '../ops/linear/fp8.js';
import { STEP_SCALARS } from '../tensor/optimizer.js';
import { Tensor } from '../tensor/tensor.js';
import { BatchPrefetch } from './batch-prefetch.js';
import { BatchUploader, type DeviceBatch } from './device-batch.js';
import { NOTHING_OBSERVED, type StepTelemetry } from './observers.js';
import {
  blocksOf,
  HostStepper,
  launchGradients,
  type StepContext,
  type StepInputs,
  type Stepper,
  type StepResult,
  targetWeights,
  telemetryOf,
  weightedLoss,
} from './step.js';

/** The fastest stepper that supports what the config asks for. */
export function createStepper(context: StepContext): Stepper {
  const { device } = context.model;
  expectFp8(context.config.runtime, device);
  return device instanceof CudaDevice && !needsHost(context.config)
    ? new DeviceStepper(device, context)
    : new HostStepper(context);
}

/** Whether the host must look at the results of a step before it continues. */
export function needsHost({ runtime, train }: Config): boolean {
  const usesReference = runtime.reference_kernels || runtime.selection_kernel === 'reference';
  return train.spike_skip || runtime.strict_asserts || runtime.debug_compare || runtime.debug_timing || usesReference;
}

/** Throws if `runtime.fp8` is set and the device or the precision has no FP8 products. */
export function expectFp8({ fp8, precision }: Config['runtime'], device: Device): void {
  if (!fp8) return;
  const refusal = fp8Refusal(device);
  if (refusal !== null) throw new UsageError(`runtime.fp8: ${refusal}; leave it out`);
  if (precision !== 'bf16')
    throw new UsageError(`runtime.fp8: needs runtime.precision bf16, not ${precision}, for everything else`);
}

/** Results of a step on the device, for the host to read. */
interface Outputs {
  readonly means: readonly Tensor[];
  readonly telemetry: StepTelemetry | null;
}

/** Objects on the device that a step uses besides the context. */
export interface StepTools {
  readonly norms: GradientNorms;
  readonly counters: AttentionCounters;
  /** Inputs of the update (`Optimizer.nextStep`). */
  readonly scalars: Tensor;
}

/** Launches a whole step, the update included, without waiting. */
export function launchStep(
  context: StepContext,
  batches: readonly DeviceBatch[],
  weights: readonly number[],
  { norms, counters, scalars }: StepTools,
): Outputs {
  const { optimizer, config, exchange, model } = context;
  // A recorded graph is the same in every step: it always samples, and only detailed steps read the samples.
  const telemetry = config.runtime.aux_stats ? telemetryOf(model) : null;
  telemetry?.begin(true);
  const kernels = { ...kernelOptions(config), counters };
  const means = launchGradients(context, batches, weights, { observer: telemetry ?? undefined, kernels });
  const sums = norms.launch(exchange.gradients);
  exchange.reduceSums(sums);
  optimizer.stepOnDevice(scalars, sums);
  exchange.shareValues();
  return { means, telemetry };
}

export class DeviceStepper implements Stepper {
  readonly update = null;
  readonly #device: CudaDevice;
  readonly #context: StepContext;
  /** A pool for the step alone: a graph must find its memory as recorded. */
  readonly #pool: MemoryPool;
  readonly #norms: GradientNorms;
  readonly #counters: AttentionCounters;
  /** Separate from the evaluation's, whose batches have other shapes: a graph must find its sequences in place. */
  readonly #uploader: BatchUploader;
  /** Calls per step that the fused attention kernels refused; a replay repeats them. */
  #refusedPerStep = 0;
  #refused = 0;
  /** Inputs of this step's update (`Optimizer.nextStep`). */
  readonly #scalars: Tensor;
  #inputs: readonly DeviceBatch[] = [];
  #shapes = '';
  readonly #prefetch: BatchPrefetch;
  #graph: CudaGraph | null = null;
  #outputs: Outputs | null = null;
  #inputsOfStep: StepInputs | null = null;

  constructor(device: CudaDevice, context: StepContext) {
    this.#device = device;
    this.#context = context;
    this.#pool = device.newPool();
    this.#prefetch = new BatchPrefetch(device);
    this.#norms = new GradientNorms(device);
    this.#counters = new AttentionCounters(device);
    this.#uploader = new BatchUploader(device, blocksOf(context.model, context.config));
    this.#scalars = Tensor.empty(device, [STEP_SCALARS]);
  }

  launch(inputs: StepInputs): void {
    const { optimizer, config } = this.#context;
    const { batches, targets, learningRate } = inputs;
    const weights = targetWeights(batches, targets);
    this.#inputsOfStep = inputs;
    const isRepeated = this.#upload(batches, weights);
    this.#scalars.write(optimizer.nextStep({ learningRate, maxNorm: config.train.grad_clip }));
    if (isRepeated && this.#mayRecord) {
      this.#graph ??= this.#record(weights);
      this.#graph.replay();
    } else {
      this.#launchInPool(weights);
    }
    this.#refused += this.#refusedPerStep;
  }

  /** Batches of other shapes need other tensors: they are uploaded by their own step. */
  prefetch(batches: readonly Batch[]): void {
    const { targets } = this.#inputsOfStep!;
    const isSame = batches.length > 0 && this.#shapesOf(batches, targetWeights(batches, targets)) === this.#shapes;
    if (isSame) this.#prefetch.send(batches);
    else this.#prefetch.drop();
  }

  read(): StepResult {
    const { means, telemetry } = this.#outputs!;
    const { agreement, optimizer } = this.#context;
    const { batches, targets, isDetailed } = this.#inputsOfStep!;
    const { norm, each, nonFinite } = this.#norms.read();
    const [loss] = agreement.sum([weightedLoss(means, targetWeights(batches, targets))]);
    const { metrics, attention } = telemetry?.read(isDetailed ? batches[0] : null) ?? NOTHING_OBSERVED;
    const finite = Number.isFinite(loss) && nonFinite === 0 && Number.isFinite(norm);
    if (!finite) optimizer.steps -= 1; // the device has skipped the update
    const counters = { ...this.#counters.read(), attention_portable: this.#refused };
    return { loss, norm, norms: each, finite, metrics: { ...metrics, counters }, attention, comparisons: [] };
  }

  free(): void {
    this.#device.synchronize();
    this.#forget();
    this.#releaseInputs();
    this.#prefetch.free();
    this.#norms.free();
    this.#counters.free();
    this.#uploader.free();
    this.#scalars.free();
    this.#device.dropPool(this.#pool);
  }

  /** Whether this step may be recorded. With document masks, shapes differ between ranks. */
  get #mayRecord(): boolean {
    const { config, exchange } = this.#context;
    return config.runtime.cuda_graph && (exchange.allowsUnequalShapes || !config.data.document_mask);
  }

  /** Copies the batches to where the step reads them; false if their shapes are new. */
  #upload(batches: readonly Batch[], weights: readonly number[]): boolean {
    const shapes = this.#shapesOf(batches, weights);
    if (shapes !== this.#shapes) {
      this.#forget();
      this.#releaseInputs();
      this.#inputs = batches.map((batch) => this.#uploader.upload(batch));
      this.#shapes = shapes;
      return false;
    }
    if (this.#prefetch.take(batches, this.#inputs)) return true;
    batches.forEach(({ inputs, targets }, i) => {
      this.#inputs[i].ids.write(inputs);
      this.#inputs[i].targets.write(targets);
    });
    return true;
  }

  /** Key of a recorded graph: sequence lengths, the weight of each micro-batch, and the number of blocks. */
  #shapesOf(batches: readonly Batch[], weights: readonly number[]): string {
    const lengths = batches.map(({ cuSeqlens }, i) => `${cuSeqlens.join()} ${weights[i]}`);
    return [...lengths, this.#context.model.shape?.nsa.nSel].join('|');
  }

  #record(weights: readonly number[]): CudaGraph {
    return this.#device.withPool(this.#pool, () => {
      this.#freeOutputs();
      return this.#device.record(() => {
        this.#outputs = this.#launch(weights);
      });
    });
  }

  #launchInPool(weights: readonly number[]): void {
    this.#device.withPool(this.#pool, () => {
      this.#freeOutputs();
      this.#outputs = this.#launch(weights);
    });
  }

  #launch(weights: readonly number[]): Outputs {
    const before = this.#counters.portable;
    const outputs = launchStep(this.#context, this.#inputs, weights, {
      norms: this.#norms,
      counters: this.#counters,
      scalars: this.#scalars,
    });
    this.#refusedPerStep = this.#counters.portable - before;
    return outputs;
  }

  #forget(): void {
    this.#graph?.free();
    this.#graph = null;
    this.#freeOutputs();
  }

  #freeOutputs(): void {
    for (const mean of this.#outputs?.means ?? []) mean.free();
    this.#outputs?.telemetry?.free();
    this.#outputs = null;
  }

  #releaseInputs(): void {
    for (const batch of this.#inputs) this.#uploader.release(batch);
    this.#inputs = [];
  }
}
