/**
 * Training speed: whole optimizer steps (forward, backward, gradient norm, update) on random tokens, as `train` runs
 * them. The median step counts: a shared machine's slow moments do not move it.
 */
import type { Config } from '../config/schema.js';
import { type Batch, packBatch } from '../data/batch.js';
import { SyntheticSamples } from '../data/synthetic.js';
import { createTokenizer } from '../data/tokenizer.js';
import type { Device } from '../device/device.js';
import { trainingFlops } from '../model/flops.js';
import { LanguageModel } from '../model/language-model.js';
import { type ModelShape, modelShape } from '../model/shape.js';
import { AdamW } from '../ops/adamw/op.js';
import { chooseSelectionKernel } from '../ops/selected/op.js';
import { BatchUploader } from '../train/batches.js';
import { applyGradients, computeGradients, kernelOptions, type StepContext } from '../train/optimizer-step.js';

/** One row of the table; the names are those of `bench train --json`. */
export interface TrainRow {
  readonly config: string;
  readonly attention: 'nsa' | 'dense';
  /** What served the selected branch, `dense` without one. */
  readonly kernel: string;
  readonly S: number;
  readonly batch: number;
  readonly tokens_per_s: number;
  readonly ms_step: number;
  /** Operations the maths needs (docs/benchmarks.md) over what the measured peak could do in that time. */
  readonly mfu: number;
  /** The same with attention counted as dense and not causal, the convention of the PaLM paper. */
  readonly mfu_palm: number;
  readonly peak_mem_mib: number;
  readonly params: number;
}

export interface TrainCase {
  /** What the row is called. */
  readonly name: string;
  readonly config: Config;
}

export interface TrainMeasurement {
  /** Steps that are timed, after the warm-up. */
  readonly steps: number;
  readonly peakGflops: number;
  /** Memory the device's kernels hold beside tensors, in bytes. */
  readonly scratchBytes?: () => number;
  /** Called between the warm-up and the timed steps. */
  readonly onWarm?: () => void;
}

/** The first step fills the pool and compiles kernels, the second still meets cold memory. */
const WARMUP_STEPS = 2;
const MIB = 2 ** 20;

export function caseShape({ config }: TrainCase): ModelShape {
  const { model, data } = config;
  return modelShape(config, model.vocab_size ?? data.vocab_size ?? createTokenizer(data.tokenizer).vocabSize);
}

/** Sequences of one micro-batch, without document masks: all of one length. */
export function caseLengths({ config: { train } }: TrainCase): number[] {
  return new Array<number>(train.batch_size).fill(train.seq_len);
}

export function measureTraining(device: Device, benchCase: TrainCase, options: TrainMeasurement): TrainRow {
  const { config } = benchCase;
  const { train } = config;
  const shape = caseShape(benchCase);
  device.pool.trim();
  device.pool.resetPeak();
  const model = new LanguageModel(device, shape, train.seed);
  const trained = model.parameters.map((parameter) => ({ parameter, weightDecay: train.weight_decay }));
  const optimizer = new AdamW(device, trained, { betas: train.betas, epsilon: train.eps });
  const uploader = new BatchUploader(device, config.nsa);
  const context: StepContext = { model, optimizer, uploader, config, observer: undefined };
  const batches = syntheticBatches(config, shape.vocab_size);
  const step = () => {
    const start = performance.now();
    applyGradients(context, computeGradients(context, batches).norm, train.lr);
    device.synchronize();
    return performance.now() - start;
  };
  for (let i = 0; i < WARMUP_STEPS; i++) step();
  options.onWarm?.();
  const ms = median(Array.from({ length: options.steps }, step));
  const peakBytes = device.pool.peakBytesInUse + (options.scratchBytes?.() ?? 0);
  const params = model.parameterCount;
  uploader.free();
  optimizer.free();
  model.free();
  const lengths = caseLengths(benchCase);
  const flops = trainingFlops(shape, lengths);
  const share = (operations: number) => (operations * batches.length) / (ms * options.peakGflops * 1e6);
  return {
    config: benchCase.name,
    attention: shape.attention,
    kernel: shape.attention === 'dense' ? 'dense' : chooseSelectionKernel(train.seq_len, kernelOptions(config)),
    S: train.seq_len,
    batch: train.batch_size * batches.length,
    tokens_per_s: (batches.length * lengths.length * train.seq_len * 1000) / ms,
    ms_step: ms,
    mfu: share(flops.used),
    mfu_palm: share(flops.palm),
    peak_mem_mib: peakBytes / MIB,
    params,
  };
}

function syntheticBatches({ train }: Config, vocabulary: number): Batch[] {
  const samples = new SyntheticSamples(vocabulary, train.seed, 'train');
  return Array.from({ length: train.accumulate_grad_batches }, (_, micro) => {
    const rows = Array.from({ length: train.batch_size }, (_, row) => samples.locate(micro * train.batch_size + row));
    return packBatch(samples, rows, { sequenceLength: train.seq_len, documentMask: false });
  });
}

function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
