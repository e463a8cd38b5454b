/**
 * Training speed: whole optimizer steps (forward, backward, gradient norm, update) on random tokens, as `train` runs
 * them. Reports the median step, which outliers on a shared machine do not affect.
 */
import type { Config } from '../config/schema.js';
import { type Batch, packBatch } from '../data/batch.js';
import { UniformSamples } from '../data/synthetic/uniform.js';
import type { CudaDevice } from '../device/cuda/cuda.js';
import type { Device } from '../device/device.js';
import { recomputedFlops, trainingFlops } from '../model/flops.js';
import { selectionKernel } from '../model/kernels.js';
import { LanguageModel } from '../model/language-model.js';
import { computeDtype, type StepPrecision, stepPrecision } from '../model/shape.js';
import { BatchUploader } from '../train/device-batch.js';
import { createStepper } from '../train/device-stepper.js';
import { createOptimizer, localContext, type Stepper } from '../train/step.js';
import { median } from './timing.js';
import { caseLengths, caseShape, type TrainCase } from './train-cases.js';
import { type ProfileRow, profileRows } from './train-profile.js';

/** The median step, its operations and its memory. */
export interface StepTime {
  readonly attention: 'nsa' | 'dense';
  /** Kernel of the selected branch; `tiled` for dense attention. */
  readonly kernel: string;
  readonly S: number;
  /** Sequences of one step, all micro-batches together. */
  readonly batch: number;
  readonly ms: number;
  /** Steps behind the median. */
  readonly steps: number;
  /** Operations of one step in both conventions (model/flops.ts); `executed` adds those of gradient checkpointing to `used`. */
  readonly flops: { readonly used: number; readonly palm: number; readonly executed: number };
  /** Peak of tensors and kernel workspace. */
  readonly peakBytes: number;
  readonly params: number;
  readonly layers: number;
  readonly precision: StepPrecision;
}

/** How long to measure: at least `least` steps, more while they fit into `ms`. */
export interface StepBudget {
  readonly least: number;
  readonly ms: number;
}

/** The first step compiles kernels and fills the pool, the second meets untouched memory or records the graph. */
const WARMUP_STEPS = 3;
const MAX_STEPS = 100;

/** Called around the measured steps. */
export interface StepHooks {
  /** Called after the steps that are not measured. */
  onWarm?(): void;
  /** Called after the last measured step. */
  onDone?(steps: number): void;
}

/** Times whole training steps. */
export function benchTraining(
  device: Device,
  benchCase: TrainCase,
  budget: StepBudget,
  hooks: StepHooks = {},
): StepTime {
  return withStepper(device, benchCase, ({ stepper, batches, model }) => {
    const { config } = benchCase;
    const { train, runtime } = config;
    const { shape } = model;
    const times = timeSteps(() => takeStep(stepper, batches, train.lr), device, budget, hooks);
    const lengths = caseLengths(benchCase);
    const { used, palm } = trainingFlops(shape, lengths);
    const again = runtime.gradient_checkpointing ? recomputedFlops(shape, lengths, model.dtype === 'bf16') : 0;
    const of = (operations: number) => operations * batches.length;
    return {
      attention: shape.attention,
      kernel: shape.attention === 'dense' ? 'tiled' : selectionKernel(config, device, train.seq_len),
      S: train.seq_len,
      batch: train.batch_size * batches.length,
      ms: median(times),
      steps: times.length,
      flops: { used: of(used), palm: of(palm), executed: of(used + again) },
      peakBytes: device.memory.peakBytes + ('scratchBytes' in device ? Number(device.scratchBytes) : 0),
      params: model.parameterCount,
      layers: shape.nLayers,
      precision: stepPrecision(runtime, device.kind),
    };
  });
}

interface BenchRun {
  readonly model: LanguageModel;
  readonly stepper: Stepper;
  readonly batches: readonly Batch[];
}

/** A model, its optimizer and random batches for the length of `use`. */
function withStepper<T>(device: Device, benchCase: TrainCase, use: (run: BenchRun) => T): T {
  const { config } = benchCase;
  const { train, runtime } = config;
  const shape = caseShape(benchCase);
  device.pool.trim();
  device.pool.resetPeak();
  const dtype = computeDtype(runtime, device.kind);
  const model = new LanguageModel(device, shape, train.seed, dtype);
  const optimizer = createOptimizer(model, { trained: model.parameters }, config);
  const uploader = new BatchUploader(device, config.nsa);
  const stepper = createStepper(localContext({ model, optimizer, uploader, config }));
  try {
    return use({ model, stepper, batches: syntheticBatches(config, shape.vocabSize) });
  } finally {
    stepper.free();
    uploader.free();
    optimizer.free();
    model.free();
    device.pool.trim();
  }
}

function takeStep(stepper: Stepper, batches: readonly Batch[], learningRate: number): void {
  stepper.launch({ batches, learningRate });
  stepper.read();
  stepper.update?.();
}

const PROFILED_STEPS = 3;

/** Where the time of a step goes on the GPU: launched kernel by kernel, not replayed, between events. */
export function profileCudaStep(device: CudaDevice, benchCase: TrainCase): ProfileRow[] {
  const { config } = benchCase;
  const eager = { ...benchCase, config: { ...config, runtime: { ...config.runtime, cuda_graph: false } } };
  return withStepper(device, eager, ({ stepper, batches }) => {
    const step = () => takeStep(stepper, batches, config.train.lr);
    for (let i = 0; i < WARMUP_STEPS; i++) step();
    const started = performance.now();
    const entries = device.profile(() => {
      for (let i = 0; i < PROFILED_STEPS; i++) step();
    });
    const wall = performance.now() - started;
    return profileRows(entries, wall, PROFILED_STEPS);
  });
}

function timeSteps(run: () => void, device: Device, budget: StepBudget, hooks: StepHooks): number[] {
  const step = () => {
    const start = performance.now();
    run();
    device.synchronize();
    return performance.now() - start;
  };
  for (let i = 0; i < WARMUP_STEPS; i++) step();
  hooks.onWarm?.();
  const times: number[] = [];
  let spent = 0;
  while (times.length < budget.least || (spent < budget.ms && times.length < MAX_STEPS)) {
    const ms = step();
    times.push(ms);
    spent += ms;
  }
  hooks.onDone?.(times.length);
  return times;
}

function syntheticBatches({ train }: Config, vocabulary: number): Batch[] {
  const samples = new UniformSamples(vocabulary, train.seed, 'train');
  return Array.from({ length: train.accumulate_grad_batches }, (_, micro) => {
    const rows = Array.from({ length: train.batch_size }, (_, row) => samples.locate(micro * train.batch_size + row));
    return packBatch(samples, rows, { sequenceLength: train.seq_len, documentMask: false });
  });
}
