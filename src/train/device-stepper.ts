/**
 * The optimizer step of a GPU: everything is launched without waiting, the update included; the GPU itself clips, and
 * leaves the update out when the gradient is not finite. The host reads loss, norm and statistics once, at the end, and
 * before that sends the batches of the next step on their way. From the second step of the same shapes on, the whole step
 * is one graph that is replayed.
 */
import type { Batch } from '../data/batch.js';
import { CopyQueue } from '../device/cuda/copy-queue.js';
import type { CudaDevice } from '../device/cuda/cuda.js';
import type { CudaGraph } from '../device/cuda/stream.js';
import type { MemoryPool } from '../device/pool.js';
import { STEP_SCALARS } from '../ops/adamw/op.js';
import { AttentionCounters } from '../ops/attention/counters.js';
import { GradientNorms } from '../ops/gradnorm/op.js';
import { Tensor } from '../tensor/tensor.js';
import { BatchUploader, type DeviceBatch } from './batches.js';
import { launchGradients, ownGradients, targetWeights, weightedLoss } from './optimizer-step.js';
import type { Stepper, StepperContext, StepRequest, StepResult } from './stepper.js';
import { StepTelemetry } from './telemetry.js';

/** What a step leaves on the device for the host to read. */
interface Outputs {
  readonly means: readonly Tensor[];
  readonly telemetry: StepTelemetry | null;
}

export class DeviceStepper implements Stepper {
  readonly #device: CudaDevice;
  readonly #context: StepperContext;
  /** Memory of the step alone: a graph must find it as it was recorded. */
  readonly #pool: MemoryPool;
  readonly #norms: GradientNorms;
  readonly #counters: AttentionCounters;
  /** Its own: an evaluation's batches have other shapes, and a graph must find its layout where it was. */
  readonly #uploader: BatchUploader;
  /** Calls of one step that the fused attention kernels refused: a replay repeats them. */
  #refusedPerStep = 0;
  #refused = 0;
  /** The numbers of this step's update. */
  readonly #scalars: Tensor;
  #inputs: readonly DeviceBatch[] = [];
  #shapes = '';
  /** How the batches of the next step come while this one runs, and which they are. */
  #queue: CopyQueue | null = null;
  #sent: readonly Batch[] = [];
  #graph: CudaGraph | null = null;
  #outputs: Outputs | null = null;

  constructor(device: CudaDevice, context: StepperContext) {
    this.#device = device;
    this.#context = context;
    this.#pool = device.newPool();
    this.#norms = new GradientNorms(device);
    this.#counters = new AttentionCounters(device);
    this.#uploader = new BatchUploader(device, context.config.nsa);
    this.#scalars = Tensor.empty(device, [STEP_SCALARS]);
  }

  step({ batches, targets, learningRate, accept, ahead }: StepRequest): StepResult {
    const started = performance.now();
    const { optimizer, config } = this.#context;
    const weights = targetWeights(batches, targets);
    const isRepeated = this.#upload(batches, weights);
    this.#scalars.write(optimizer.nextStep({ learningRate, maxNorm: config.train.grad_clip }));
    if (isRepeated && this.#mayRecord) {
      this.#graph ??= this.#record(weights);
      this.#graph.replay();
    } else {
      this.#launchInPool(weights);
    }
    this.#refused += this.#refusedPerStep;
    this.#send(ahead?.() ?? [], targets);
    const result = this.#read(weights);
    if (result.finite) accept(result);
    else optimizer.steps -= 1; // the device changed nothing
    const ms = performance.now() - started;
    return { ...result, comparisons: [], gradientsMs: ms, totalMs: ms };
  }

  free(): void {
    this.#device.synchronize();
    this.#forget();
    this.#releaseInputs();
    this.#freeQueue();
    this.#norms.free();
    this.#counters.free();
    this.#uploader.free();
    this.#scalars.free();
    this.#device.dropPool(this.#pool);
  }

  /** Whether this step may be a graph. Ranks must do alike, and with document masks their shapes differ. */
  get #mayRecord(): boolean {
    const { config, parallel } = this.#context;
    return config.runtime.cuda_graph && !(parallel && config.data.document_mask);
  }

  /** Puts the batches where the step reads them; false when their shapes are new. */
  #upload(batches: readonly Batch[], weights: readonly number[]): boolean {
    const shapes = shapesOf(batches, weights);
    if (shapes !== this.#shapes) {
      this.#forget();
      this.#releaseInputs();
      this.#inputs = batches.map((batch) => this.#uploader.upload(batch));
      this.#shapes = shapes;
      return false;
    }
    if (batches.every((batch, i) => batch === this.#sent[i])) {
      this.#queue!.take(this.#inputs.flatMap(({ ids, targets }) => [ids, targets].map(placeOf)));
      this.#sent = [];
      return true;
    }
    batches.forEach(({ inputs, targets }, i) => {
      this.#inputs[i].ids.write(inputs);
      this.#inputs[i].targets.write(targets);
    });
    return true;
  }

  /** Begins to copy the next step's batches. Those of other shapes need other tensors: they are uploaded in their turn. */
  #send(batches: readonly Batch[], targets: number | undefined): void {
    this.#sent = [];
    if (batches.length === 0 || shapesOf(batches, targetWeights(batches, targets)) !== this.#shapes) return;
    const pieces = batches.flatMap(({ inputs, targets }) => [inputs, targets].map(bytesOf));
    const total = pieces.reduce((sum, { byteLength }) => sum + byteLength, 0);
    if (this.#queue === null || this.#queue.capacity < total) {
      this.#freeQueue();
      this.#queue = new CopyQueue(this.#device, total);
    }
    this.#queue.send(pieces);
    this.#sent = batches;
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
    const { model, optimizer, config, parallel } = this.#context;
    const telemetry = config.runtime.aux_stats ? new StepTelemetry(this.#device) : null;
    const observer = telemetry ?? undefined;
    const counters = this.#counters;
    const before = counters.portable;
    const means = launchGradients({ model, config, observer, counters, parallel }, this.#inputs, weights);
    this.#refusedPerStep = counters.portable - before;
    const sums = this.#norms.launch(parallel?.gradients ?? ownGradients(model));
    parallel?.reduceSums(sums);
    optimizer.stepOnDevice(this.#scalars, sums);
    parallel?.shareValues();
    return { means, telemetry };
  }

  #read(weights: readonly number[]) {
    const { means, telemetry } = this.#outputs!;
    const { together } = this.#context;
    const { norm, each, nonFinite } = this.#norms.read();
    const own = weightedLoss(means, weights);
    const loss = together ? together.sum([own])[0] : own;
    const observed = telemetry?.read() ?? { gates: null, selection: null };
    const finite = Number.isFinite(loss) && nonFinite === 0 && Number.isFinite(norm);
    const counters = { ...this.#counters.read(), attention_portable: this.#refused };
    return { loss, norm, norms: each, finite, observed, counters };
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

  #freeQueue(): void {
    if (this.#queue) this.#device.synchronize();
    this.#queue?.free();
    this.#queue = null;
    this.#sent = [];
  }
}

/** What a graph is made for: lengths, and the share of each micro-batch. */
function shapesOf(batches: readonly Batch[], weights: readonly number[]): string {
  return batches.map(({ cuSeqlens }, i) => `${cuSeqlens.join()} ${weights[i]}`).join('|');
}

function placeOf({ pointer, bytes }: Tensor): { address: bigint; bytes: number } {
  return { address: pointer, bytes };
}

function bytesOf({ buffer, byteOffset, byteLength }: Int32Array): Uint8Array {
  return new Uint8Array(buffer, byteOffset, byteLength);
}
