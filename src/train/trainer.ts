/** `Trainer`: one optimizer step after another over any model and data. `train` (train.ts) adds files, signals and logs. */
import { parseConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { canFallBack, type Loader } from '../data/loader.js';
import { ExitCode, TrefoilError, UsageError } from '../errors.js';
import { type SparseStart, sparseStartOf } from '../model/sparse-start.js';
import { trainedParameters } from '../model/trainable.js';
import type { SavedCheckpoint, SaveOptions } from '../run/checkpoint/save.js';
import type { SaveThread } from '../run/checkpoint/save-thread.js';
import type { SectionName } from '../run/logs/heartbeat.js';
import { expectOwnMetrics, type OwnMetrics, type RunMetrics } from '../run/metrics.js';
import type { Optimizer } from '../tensor/optimizer.js';
import { FetchInterrupted, NonFiniteStep, SourceFailed } from './anomalies.js';
import {
  baseHash,
  beginSaving,
  findResumePoint,
  type PendingSave,
  restoreTrainingState,
  saveTrainingState,
  type TrainingProgress,
  type TrainingState,
} from './checkpoint.js';
import { createExchange } from './data-parallel.js';
import { BatchUploader } from './device-batch.js';
import { createStepper } from './device-stepper.js';
import { type Evaluation, evaluate, mixedEvaluation } from './evaluation.js';
import type { GradientExchange } from './gradient-exchange.js';
import { completeBatch, DataEnded, IterableLoader, type TokenBatch } from './iterable-loader.js';
import { singleWorld, type World } from './ranks/world.js';
import { learningRate, warmupSteps } from './schedule.js';
import {
  blocksOf,
  countTargets,
  createOptimizer,
  type LossFunction,
  type StepContext,
  type StepGradients,
  type Stepper,
  type StepResult,
  type TrainableModel,
} from './step.js';
import { TrainerRecords } from './trainer-records.js';
import { openTrainingData } from './training-data.js';

/** Batches from anywhere: an iterable, a loader, or the data source of a config. */
export type BatchSource = AsyncIterable<TokenBatch> | Iterable<TokenBatch> | Loader | Config;

/**
 * State of the detection of spikes: running mean and variance with exponential decay. Plain data, so
 * that a checkpoint holds it as it is, and a resumed run detects the same spikes.
 */
export interface Spikes {
  readonly loss: { count: number; mean: number; variance: number };
  readonly gradient: { count: number; mean: number; variance: number };
}

/** A spike of the loss or of the gradient norm. */
export interface Spike {
  /** z-scores of the loss and of the gradient norm. */
  readonly loss: number;
  readonly gradient: number;
}

/** Options of `Trainer`. */
export interface TrainerOptions {
  readonly model: TrainableModel;
  /** A loader or an iterable stays the caller's; the source of a config is opened with the first step. */
  readonly data: BatchSource;
  /** Accumulation, clipping, spike detection and kernels. Default: the config of `data`, or all defaults. */
  readonly config?: Config;
  /** Steps to train in all. Default: `train.steps` of a given config; without one, until the data ends. */
  readonly steps?: number;
  /** Default: the config's (`train.optimizer`). The trainer frees only its own. */
  readonly optimizer?: Optimizer;
  /** The learning rate of a step, counted from 1. Default: the config's schedule, or `train.lr` if `steps` is unbounded. */
  readonly schedule?: (step: number) => number;
  /** Replaces the model's loss. */
  readonly loss?: LossFunction;
  /** Replaces the whole optimizer step. Default: the fastest that supports the config. */
  readonly stepper?: (context: StepContext) => Stepper;
  /** The ranks of the run (`openWorld`). Default: this process alone. */
  readonly world?: World;
  /** Asked while the trainer waits for data: true ends the wait of all ranks with a FetchInterrupted. */
  readonly isInterrupted?: () => boolean;
  /** Called when the trainer starts to fetch, step, evaluate or save. */
  readonly onSection?: (section: SectionName, step: number) => void;
  /** A folder for heartbeats, CSV files and TensorBoard, as of `train`: `trefoil status` and the dashboard show the run. */
  readonly recordTo?: string;
}

/** One optimizer step. */
export interface TrainingStep {
  /** Counted from 1. */
  readonly step: number;
  /** Mean loss per target in nats, over all micro-batches of all ranks. */
  readonly loss: number;
  readonly learningRate: number;
  /** Before clipping. */
  readonly gradientNorm: number;
  /** Tokens of all ranks. */
  readonly tokens: number;
  readonly tokensPerSecond: number;
  readonly fetchSeconds: number;
  /** Milliseconds spent on gradients and on the update. */
  readonly gradientsMs: number;
  readonly updateMs: number;
  /** z-scores, if the loss or the gradient norm was unusual (train.spike_z). */
  readonly spike: Spike | null;
  /** Whether the update was skipped because of a spike (train.spike_skip). */
  readonly isSkipped: boolean;
  /** All numbers of the step, by the names that the files of a run use (docs/reference/metrics.md). */
  readonly metrics: RunMetrics;
  /** Norms by parameter, comparisons, statistics of the attention by layer. */
  readonly result: StepResult;
  /** The source of the batches: `synthetic` if that replaces a source that failed, `iterable` for batches of a program. */
  readonly data: string;
  readonly batches: readonly Batch[];
}

/** Steps between statistics of the attention by layer, which cost a copy from the device. */
const DETAIL_EVERY = 20;

/** Time between two looks for an interruption, in milliseconds. */
const INTERRUPT_MS = 250;

interface Fetched {
  readonly batches: readonly Batch[];
  /** Targets of all ranks that count for the loss. */
  readonly targets: number;
  /** Tokens of all ranks, those with an ignored target included. */
  readonly tokens: number;
  /** When fetching began, and how long it took. */
  readonly started: number;
  readonly fetchSeconds: number;
}

/**
 * Trains a model step by step:
 *
 *     const trainer = new Trainer({ model, data, steps: 300 });
 *     for await (const { step, loss } of trainer) console.log(step, loss);
 *
 * It writes no files except with `save` and `recordTo`, installs no signal handlers and prints nothing.
 */
export class Trainer implements TrainingState, AsyncIterable<TrainingStep> {
  readonly model: TrainableModel;
  readonly config: Config;
  readonly world: World;
  readonly optimizer: Optimizer;
  readonly exchange: GradientExchange;
  readonly spikes: Spikes = {
    loss: { count: 0, mean: 0, variance: 0 },
    gradient: { count: 0, mean: 0, variance: 0 },
  };
  readonly steps: number;
  readonly base: string | null;
  readonly progress: TrainingProgress = {
    step: 0,
    firstLoss: null,
    lastLoss: null,
    lastValLoss: null,
    tokensSeen: 0,
    spikes: 0,
    skippedUpdates: 0,
  };
  readonly #options: TrainerOptions;
  readonly #schedule: (step: number) => number;
  /** Steps in which the learning rate rises: loss and gradient change too fast for statistics of spikes. */
  readonly #warmup: number;
  readonly #uploader: BatchUploader;
  readonly #stepper: Stepper;
  /** The schedule from dense to sparse attention (train.gate_release_steps, train.n_sel_from). */
  readonly #sparseStart: SparseStart | null;
  #loader: Loader | null = null;
  /** Metrics of the program's own in the newest step, or before the first one. */
  #own: Record<string, number> = {};
  #records: TrainerRecords | null = null;

  constructor(options: TrainerOptions) {
    const { model, data, world = singleWorld() } = options;
    const given = options.config ?? (isConfig(data) ? data : null);
    const config = given ?? parseConfig({});
    this.#options = options;
    this.model = model;
    this.config = config;
    this.world = world;
    this.steps = options.steps ?? given?.train.steps ?? Number.POSITIVE_INFINITY;
    const { steps } = this;
    const rate = (step: number) => learningRate(step, { ...config.train, steps });
    this.#warmup = options.schedule || !Number.isFinite(steps) ? 0 : warmupSteps({ ...config.train, steps });
    this.#schedule = options.schedule ?? (Number.isFinite(steps) ? rate : () => config.train.lr);
    this.exchange = createExchange(world, model.device, trainedParameters(model.parameters, config), config);
    this.base = baseHash(model);
    this.optimizer = options.optimizer ?? createOptimizer(model, this.exchange, config);
    this.#uploader = new BatchUploader(model.device, blocksOf(model, config));
    this.#sparseStart = sparseStartOf(model, config);
    const { optimizer, exchange } = this;
    const context = { model, config, optimizer, exchange, uploader: this.#uploader, agreement: world.agreement };
    this.#stepper = (options.stepper ?? createStepper)({ ...context, loss: options.loss });
    if (config.train.spike_skip && !this.#stepper.update)
      throw new UsageError('train.spike_skip: this stepper cannot reject a step; leave out one of the two');
    if (!isConfig(data)) this.#loader = 'evalBatches' in data ? data : new IterableLoader(data);
  }

  /** The loader of the batches; opened by the first step if `data` is a config. */
  get loader(): Loader {
    if (!this.#loader) throw new UsageError('Trainer: the data of the config is not open yet; take a step first');
    return this.#loader;
  }

  /** All remaining steps. Leaving the loop keeps the position: another loop continues. */
  async *[Symbol.asyncIterator](): AsyncGenerator<TrainingStep> {
    for (let step = await this.step(); step !== null; step = await this.step()) yield step;
  }

  /** Trains one step; null if `steps` are done or the data has ended. Throws NonFiniteStep and SourceFailed. */
  async step(): Promise<TrainingStep | null> {
    const records = this.#openRecords();
    records?.flush();
    try {
      if (this.progress.step < this.steps) {
        const fetched = await this.#fetch(await this.#open());
        if (fetched) {
          const trained = this.#train(fetched);
          records?.hold(trained);
          return trained;
        }
      }
      records?.end(null);
      return null;
    } catch (error) {
      records?.end(error);
      throw error;
    }
  }

  /**
   * Adds numbers of the program's own to the metrics of the newest step (of the first one, before it). A later value of a
   * name replaces an earlier one. They are in `metrics.own` of the step, and in the files of `train` and `recordTo`.
   */
  log(values: OwnMetrics): void {
    expectOwnMetrics('Trainer.log', values);
    Object.assign(this.#own, values);
  }

  /** The mean loss on `batches`; by default on the validation part of the data (`train.eval_batches`). */
  async evaluate(batches?: Iterable<TokenBatch>): Promise<Evaluation> {
    const { config, model, world, progress } = this;
    const loader = await this.#open();
    this.#enter('eval', progress.step);
    this.#sparseStart?.setBlocks(progress.step);
    const count = config.train.eval_batches;
    if (!batches) await this.#readyToEvaluate(loader, count);
    const losses = (given: Iterable<Batch>) =>
      evaluate(model, this.#uploader, given, config, world.agreement, this.#options.loss);
    const { validationSources: sources } = loader;
    const evaluation = batches
      ? losses(Array.from(batches, completeBatch))
      : sources
        ? mixedEvaluation(sources.map((source) => ({ ...source, ...losses(loader.evalBatches(count, source.name)) })))
        : losses(loader.evalBatches(count));
    if (evaluation.targets === 0)
      throw new UsageError('Trainer.evaluate: no validation data; set data.val_fraction or pass batches');
    progress.lastValLoss = evaluation.loss;
    return evaluation;
  }

  /** Saves a checkpoint under `folder`/checkpoints: weights, optimizer, data position, statistics. All ranks call it. */
  async save(folder: string, options: SaveOptions = {}): Promise<SavedCheckpoint> {
    await this.#open();
    this.#enter('save', this.progress.step);
    return saveTrainingState(folder, this, options);
  }

  /**
   * Begins to save and returns when the state is copied (`beginSaving`); null if `save` must do it. All ranks call it.
   * `thread`: on rank 0, the thread that writes.
   */
  beginSave(folder: string, options: SaveOptions, thread: SaveThread | null): PendingSave | null {
    return beginSaving(folder, this, options, thread);
  }

  /**
   * Continues from a checkpoint: the newest sound one of `folder` ('auto'), or the one at a path. Returns its step; null
   * if 'auto' finds none. Training then gives the same losses, bit for bit, as without the interruption.
   */
  async resume(folder: string, which = 'auto'): Promise<number | null> {
    const point = findResumePoint(folder, which, this.config, this.world);
    if (!point) return null;
    await this.#open();
    restoreTrainingState(point, this);
    return point.found.step;
  }

  /** Frees device memory of the trainer; the model, and an optimizer or loader that was passed in, stay. */
  free(): void {
    this.#records?.close();
    this.#stepper.free();
    this.#uploader.free();
    if (!this.#options.optimizer) this.optimizer.free();
    this.exchange.free();
    if (isConfig(this.#options.data)) this.#loader?.close();
  }

  #enter(section: SectionName, step: number): void {
    this.#options.onSection?.(section, step);
    this.#records?.enter(section, step);
  }

  #openRecords(): TrainerRecords | null {
    const { recordTo } = this.#options;
    if (recordTo !== undefined) this.#records ??= new TrainerRecords(recordTo, this);
    return this.#records;
  }

  async #open(): Promise<Loader> {
    const { data } = this.#options;
    if (!this.#loader && isConfig(data)) {
      const rank = { rank: this.world.rank, world: this.world.size };
      const ignore = () => {};
      this.#loader = await openTrainingData(data, ignore, ignore, { rank });
    }
    return this.loader;
  }

  async #readyToEvaluate(loader: Loader, batches: number): Promise<void> {
    let failure: TrefoilError | null = null;
    try {
      await loader.readyToEvaluate?.(batches);
    } catch (error) {
      if (!(error instanceof TrefoilError)) throw error;
      failure = error;
    }
    const [failures] = this.world.agreement.max([Number(failure !== null)]);
    if (failures > 0) throw sourceFailed(failure);
  }

  /** The micro-batches of a step. Waiting for them leaves the thread free, so that signals are handled meanwhile. */
  async #fetch(loader: Loader): Promise<Fetched | null> {
    const { config, world, progress } = this;
    const started = performance.now();
    this.#enter('fetch', progress.step + 1);
    const before = loader.state();
    const batches: Batch[] = [];
    let failure: TrefoilError | null = null;
    try {
      while (batches.length < config.train.accumulate_grad_batches) {
        if (!(await this.#ready(loader))) break;
        batches.push(loader.next());
      }
    } catch (error) {
      if (!(error instanceof TrefoilError)) throw error;
      failure = error;
    }
    const fetchSeconds = (performance.now() - started) / 1000;
    const own = [countTargets(batches), batches.reduce((total, { inputs }) => total + inputs.length, 0)];
    const isShort = failure === null && batches.length < config.train.accumulate_grad_batches;
    const problems = [Number(failure !== null), Number(isShort)];
    const [targets, tokens, failures, interrupts] = world.agreement.sum([...own, ...problems]);
    if (failures + interrupts === 0) return { batches, targets, tokens, started, fetchSeconds };
    // Some micro-batches may have been taken, but the step did not happen.
    loader.restore(before);
    if (interrupts > 0) throw new FetchInterrupted(`step ${progress.step + 1}: stopped while waiting for data`);
    if (failure instanceof DataEnded) return null;
    const gaveUp = sourceFailed(failure);
    if (!canFallBack(loader)) throw gaveUp;
    loader.fallBack!(gaveUp);
    return await this.#fetch(loader);
  }

  /** Waits for a batch; false if the wait was interrupted. */
  async #ready(loader: Loader): Promise<boolean> {
    const { isInterrupted } = this.#options;
    if (!loader.ready) return true;
    const ready = loader.ready(1).then(() => true);
    if (!isInterrupted) return await ready;
    let timer: NodeJS.Timeout | undefined;
    const interrupted = new Promise<boolean>((resolve) => {
      timer = setInterval(() => isInterrupted() && resolve(false), INTERRUPT_MS);
    });
    try {
      return await Promise.race([ready, interrupted]);
    } finally {
      clearInterval(timer);
      ready.catch(() => {}); // after an interruption its error is of no interest
    }
  }

  #train({ batches, targets, tokens, started, fetchSeconds }: Fetched): TrainingStep {
    const { config, progress } = this;
    const stepper = this.#stepper;
    const step = progress.step + 1;
    this.#enter('step', step);
    if (progress.step > 0) this.#own = {};
    const rate = this.#schedule(step);
    const computing = performance.now();
    this.#sparseStart?.enter(step);
    const isDetailed = step === 1 || step % DETAIL_EVERY === 0 || step === this.steps;
    stepper.launch({ batches, targets, learningRate: rate, isDetailed });
    if (stepper.prefetch && step < this.steps) stepper.prefetch(this.loader.lookAhead?.(batches.length) ?? []);
    const result = stepper.read();
    const updating = performance.now();
    if (!result.finite) throw new NonFiniteStep(step, result, batches);
    const spike = step <= this.#warmup ? null : detectSpike(this.spikes, result, config.train.spike_z);
    const isSkipped = spike !== null && config.train.spike_skip;
    if (!isSkipped) stepper.update?.();
    const ended = performance.now();
    progress.step = step;
    progress.firstLoss ??= result.loss;
    progress.lastLoss = result.loss;
    progress.tokensSeen += tokens;
    progress.spikes += Number(spike !== null);
    progress.skippedUpdates += Number(isSkipped);
    const { loss, norm, metrics } = result;
    const tokensPerSecond = (1000 * tokens) / (ended - started);
    return {
      step,
      loss,
      learningRate: rate,
      gradientNorm: norm,
      tokens,
      fetchSeconds,
      tokensPerSecond,
      spike,
      isSkipped,
      metrics: {
        loss,
        lr: rate,
        toks_per_s: tokensPerSecond,
        dt_fetch_s: fetchSeconds,
        grad_norm: norm,
        ...metrics,
        ...this.#sparseStart?.metrics(step),
        own: this.#own,
        counters: { spike: progress.spikes, update_skipped: progress.skippedUpdates, ...metrics.counters },
      },
      result,
      data: this.loader.source ?? config.data.source,
      batches,
      gradientsMs: updating - computing,
      updateMs: ended - updating,
    };
  }
}

/** `failure` of this rank; null if another rank's source failed. */
function sourceFailed(failure: TrefoilError | null): SourceFailed {
  const message = failure?.message ?? 'the data source of another rank gave up';
  return new SourceFailed(message, ExitCode.dataSource, { cause: failure });
}

function isConfig(data: BatchSource): data is Config {
  return 'train' in data && 'data' in data;
}

type RunningStatistics = Spikes['loss'];

/** Values needed before a z-score is meaningful. */
const WARMUP = 20;
/** Weight of the past in the running statistics. */
const MEMORY = 0.98;

/** The z-score of a value against the values before it; 0 until there are enough of them. */
function zScore({ count, mean, variance }: RunningStatistics, value: number): number {
  return count < WARMUP || variance === 0 ? 0 : (value - mean) / Math.sqrt(variance);
}

/** Adds a value. Spikes are added too; otherwise a new level would stay a spike for ever. */
function addValue(statistics: RunningStatistics, value: number): void {
  statistics.count += 1;
  const weight = Math.max(1 - MEMORY, 1 / statistics.count);
  const difference = value - statistics.mean;
  statistics.mean += weight * difference;
  statistics.variance = (1 - weight) * (statistics.variance + weight * difference * difference);
}

/** Adds a step; returns its z-scores if one of them is at least `threshold`. */
export function detectSpike(
  spikes: Spikes,
  { loss, norm }: Pick<StepGradients, 'loss' | 'norm'>,
  threshold: number,
): Spike | null {
  const scores = { loss: zScore(spikes.loss, loss), gradient: zScore(spikes.gradient, norm) };
  addValue(spikes.loss, loss);
  addValue(spikes.gradient, norm);
  return Math.max(scores.loss, scores.gradient) < threshold ? null : scores;
}
