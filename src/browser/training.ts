/** Training in a page: one optimizer step after another, with the bits of `trefoil train`. */
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import type { Loader } from '../data/loader.js';
import { openNeedle, openStories, openSynthetic } from '../data/pipeline/generated-source.js';
import { NumberedLoader } from '../data/pipeline/numbered-loader.js';
import type { Tokenizer } from '../data/tokenizer.js';
import { TrefoilError, UsageError } from '../errors.js';
import { type SparseStart, sparseStartOf } from '../model/sparse-start.js';
import { trainedParameters } from '../model/trainable.js';
import type { RunMetrics } from '../run/metrics.js';
import type { Optimizer } from '../tensor/optimizer.js';
import { BatchUploader } from '../train/device-batch.js';
import { evaluate } from '../train/evaluation.js';
import { LocalGradients } from '../train/gradient-exchange.js';
import { SingleAgreement } from '../train/ranks/agreement.js';
import { learningRate } from '../train/schedule.js';
import { blocksOf, createOptimizer, HostStepper, type StepContext, type TrainableModel } from '../train/step.js';

/** Where the batches of a training come from. */
export interface BrowserBatches {
  /** The next batch. */
  next(): Batch;
}

/** Options of `Training`. */
export interface TrainingOptions {
  readonly model: TrainableModel;
  readonly config: Config;
  readonly batches: BrowserBatches;
}

/** One optimizer step. */
export interface BrowserStep {
  /** Counted from 1. */
  readonly step: number;
  /** Mean loss per target in nats. */
  readonly loss: number;
  readonly learningRate: number;
  /** Before clipping. */
  readonly gradientNorm: number;
  readonly tokens: number;
  /** Statistics of gates and selection, by the names of docs/reference/metrics.md. */
  readonly metrics: RunMetrics;
}

/** The batches of a source that makes its samples: `stories`, `needle` or `synthetic`. */
export function openBatches(config: Config, tokenizer: Tokenizer): Loader {
  const { source, vocab_size: vocabulary } = config.data;
  const size = vocabulary ?? tokenizer.vocabSize;
  if (source === 'stories') return new NumberedLoader(config, {}, openStories(config, tokenizer, undefined));
  if (source === 'needle') return new NumberedLoader(config, {}, openNeedle(config, size, undefined));
  if (source === 'synthetic') return new NumberedLoader(config, {}, openSynthetic(config, size, undefined));
  throw new UsageError(
    `data.source: a browser has stories, needle and synthetic, not ${source}; give batches of your own`,
  );
}

/** Trains a model step by step. */
export class Training {
  readonly #model: TrainableModel;
  readonly #config: Config;
  readonly #batches: BrowserBatches;
  readonly #optimizer: Optimizer;
  readonly #uploader: BatchUploader;
  readonly #stepper: HostStepper;
  readonly #sparseStart: SparseStart | null;
  #step = 0;

  constructor({ model, config, batches }: TrainingOptions) {
    this.#model = model;
    this.#config = config;
    this.#batches = batches;
    const exchange = new LocalGradients(trainedParameters(model.parameters, config));
    this.#optimizer = createOptimizer(model, exchange, config);
    this.#uploader = new BatchUploader(model.device, blocksOf(model, config));
    this.#sparseStart = sparseStartOf(model, config);
    const parts = { model, config, optimizer: this.#optimizer, uploader: this.#uploader };
    const context: StepContext = { ...parts, exchange, agreement: new SingleAgreement() };
    this.#stepper = new HostStepper(context);
  }

  /** Steps that are done. */
  get steps(): number {
    return this.#step;
  }

  /** Trains one step; null if `train.steps` are done. */
  step(): BrowserStep | null {
    const { train } = this.#config;
    if (this.#step >= train.steps) return null;
    const step = this.#step + 1;
    const batches = Array.from({ length: train.accumulate_grad_batches }, () => this.#batches.next());
    const rate = learningRate(step, train);
    this.#sparseStart?.enter(step);
    this.#stepper.launch({ batches, learningRate: rate });
    const { loss, norm, finite, metrics } = this.#stepper.read();
    if (!finite) throw new TrefoilError(`step ${step}: the loss or a gradient is not finite; lower train.lr`);
    this.#stepper.update();
    this.#step = step;
    const tokens = batches.reduce((total, { inputs }) => total + inputs.length, 0);
    return { step, loss, learningRate: rate, gradientNorm: norm, tokens, metrics };
  }

  /** The mean loss per target on batches, in nats; changes nothing. */
  evaluate(batches: Iterable<Batch>): number {
    return evaluate(this.#model, this.#uploader, batches, this.#config).loss;
  }

  /** Frees device memory of the training; the model stays. */
  free(): void {
    this.#stepper.free();
    this.#uploader.free();
    this.#optimizer.free();
  }
}
