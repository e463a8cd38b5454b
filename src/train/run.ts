/**
 * `Run`: a training with its files. It iterates over the trainer's steps and records them, saves and evaluates when due,
 * and acts on signals and .HALT between steps. What a resumed run needs is in the trainer; this class only adds cadence.
 */
import { existsSync } from 'node:fs';
import { setImmediate } from 'node:timers/promises';
import type { Config } from '../config/schema.js';
import { canFallBack } from '../data/loader.js';
import { createTokenizer } from '../data/tokenizer.js';
import { writeAdapter } from '../exchange/adapter.js';
import { explainFileError, isFileSystemError } from '../files.js';
import { generate } from '../infer/generate.js';
import { writeFinalModel } from '../infer/load.js';
import { isPlainObject } from '../json-values.js';
import type { LanguageModel } from '../model/language-model.js';
import { keepCheckpoint, type SavedCheckpoint, SaveFailed } from '../run/checkpoint/save.js';
import { SaveThread } from '../run/checkpoint/save-thread.js';
import type { RunFolder } from '../run/folder.js';
import type { OwnMetrics } from '../run/metrics.js';
import { readMark } from '../run/paths.js';
import { FetchInterrupted, NonFiniteStep, reportDifferingWeights, reportNonFinite, SourceFailed } from './anomalies.js';
import type { PendingSave } from './checkpoint.js';
import type { Ending, RunEnds } from './ends.js';
import type { Evaluation } from './evaluation.js';
import type { TrainOptions, TrainResult } from './options.js';
import type { World } from './ranks/world.js';
import {
  comparisonLine,
  progressText,
  type RankLogger,
  type RunRecords,
  StepMeter,
  spikeLine,
  stepLine,
  timingLine,
} from './report.js';
import type { SignalWatch } from './signals.js';
import type { Trainer, TrainingStep } from './trainer.js';

/** Everything a run works with. */
export interface RunParts {
  readonly folder: RunFolder;
  readonly model: LanguageModel;
  readonly trainer: Trainer;
  readonly records: RunRecords;
  readonly ends: RunEnds;
  readonly log: RankLogger;
  readonly signals: SignalWatch;
  readonly options: TrainOptions;
}

/** Requests to a run between two steps, by a signal, the calling program's AbortSignal or .HALT. */
interface Requests {
  /** The reason in .HALT. */
  readonly halt: string | undefined;
  readonly stop: (typeof STOPS)[number] | null;
  readonly save: boolean;
  /** The checkpoint that was being written is on the disk, or was refused. */
  readonly isSaved: boolean;
}

const STOPS = ['abort', 'SIGINT', 'SIGTERM', 'SIGHUP'] as const;
const MIB = 2 ** 20;
const SAMPLE_TOKENS = 64;

export class Run {
  readonly #config: Config;
  readonly #world: World;
  readonly #folder: RunFolder;
  readonly #model: LanguageModel;
  readonly #trainer: Trainer;
  readonly #records: RunRecords;
  readonly #ends: RunEnds;
  readonly #log: RankLogger;
  readonly #signals: SignalWatch;
  readonly #options: TrainOptions;
  readonly #meter: StepMeter;
  readonly #started = performance.now();
  #failedSaves = 0;
  /**
   * The step of the newest checkpoint, also if it is still being written. A training that does not begin at step 0 was
   * resumed from one.
   */
  #savedAt: number | null;
  /** Writes checkpoints while training goes on (train.async_save); on rank 0. */
  #thread: SaveThread | null = null;
  #pending: PendingSave | null = null;
  /** `#savedAt` before the checkpoint that is being written: what holds if the disk refuses it. */
  #savedBefore: number | null = null;
  /** Whether the rows of the checkpoint that is being written are on the disk. */
  #isLogged = true;
  #hasWarnedOfMemory = false;
  /** Seconds that training waited for a checkpoint since the last step. */
  #pause = 0;

  constructor({ folder, model, trainer, records, ends, log, signals, options }: RunParts) {
    this.#config = trainer.config;
    this.#world = trainer.world;
    this.#folder = folder;
    this.#model = model;
    this.#trainer = trainer;
    this.#records = records;
    this.#ends = ends;
    this.#log = log;
    this.#signals = signals;
    this.#options = options;
    this.#meter = new StepMeter(model, options.peakFlops ?? null);
    this.#savedAt = trainer.progress.step || null;
  }

  /** Trains to the end, or until it is stopped, and writes the final files. */
  async execute(isEvaluationMissing: boolean): Promise<TrainResult> {
    const { progress } = this.#trainer;
    try {
      if (this.#savesAside && this.#world.isFirst) this.#thread = await SaveThread.start();
      const ending = this.#differingWeights() ?? (await this.#train(isEvaluationMissing));
      await this.#settle();
      if (this.#world.isFirst) this.#writeFinalFiles(ending);
      this.#ends.write(ending);
      // A launcher may end all ranks as soon as one has ended: wait until the files are written.
      this.#world.agreement.wait();
      const { step, firstLoss, lastLoss, lastValLoss: valLoss } = progress;
      return { status: ending.status, step, outDir: this.#folder.path, firstLoss, lastLoss, valLoss };
    } finally {
      this.#log.live?.clear();
      await this.#pending?.finish(); // after an error
      this.#thread?.close();
    }
  }

  /** Whether checkpoints are written in a thread. A function, which tests pass, cannot go there. */
  get #savesAside(): boolean {
    const { async_save: isAsync, save_every: every } = this.#config.train;
    const isSharded = this.#trainer.exchange.isSharded;
    return isAsync && every > 0 && !isSharded && this.#options.saveOptions?.onWrite === undefined;
  }

  async #train(isEvaluationMissing: boolean): Promise<Ending> {
    const { hash_every: hashEvery, sample_every: sampleEvery } = this.#config.train;
    try {
      if (isEvaluationMissing) await this.#evaluate();
      for await (const trained of this.#trainer) {
        const { step } = trained;
        this.#report(trained);
        const differing = isDue(step, hashEvery, this.#config) ? this.#differingWeights() : null;
        if (differing) return differing;
        if (this.#isSaveDue(step)) await this.#save();
        if (isEvaluationDue(step, this.#config)) await this.#evaluate();
        if (sampleEvery > 0 && step % sampleEvery === 0) await this.#sample();
        this.#records.enter('between', step);
        await setImmediate(); // signals arrive here, and the news that a checkpoint is written
        const requests = this.#takeRequests();
        if (requests.isSaved) await this.#settle();
        if (requests.save) await this.#saveOnRequest(step);
        const ending = await this.#ending(step, requests);
        if (ending) return ending;
      }
      return { status: 'done', detail: 'done' };
    } catch (error) {
      if (error instanceof FetchInterrupted) return await this.#stopFetching(error);
      if (error instanceof NonFiniteStep) return this.#stopNonFinite(error);
      if (error instanceof SourceFailed) return await this.#stopWithoutData(error);
      throw error;
    }
  }

  /** Writes the records of a step, and prints what a person should see of it. */
  #report(trained: TrainingStep): void {
    const { step, result } = trained;
    const { steps, log_every: every } = this.#config.train;
    if (result.comparisons.length > 0) this.#log.say(comparisonLine(trained));
    if (this.#config.runtime.debug_timing) this.#log.say(timingLine(trained));
    if (trained.spike) this.#log.warn(spikeLine(trained));
    const dropped = this.#records.drops;
    const record = this.#recordOf(trained, dropped);
    const own: unknown = this.#options.onStep?.(record);
    if (isPlainObject(own)) this.#trainer.log(own as OwnMetrics);
    this.#records.writeStep(record);
    this.#pause = 0;
    if (step === 1 || step % every === 0 || step === steps) {
      this.#records.writeRow(step, record.metrics);
      this.#log.say(stepLine(record, record.data !== this.#config.data.source && record.data === 'synthetic'));
    }
    this.#log.live?.show(progressText(record, steps, this.#meter.secondsLeft(steps - step)));
  }

  /** Adds what only a run knows to the metrics of a step; `dropped` log records so far. */
  #recordOf(trained: TrainingStep, dropped: number): TrainingStep {
    const { loader } = this.#trainer;
    const { usedBytes, peakBytes, reservedBytes } = this.#model.device.memory;
    const telemetry = loader.telemetry?.();
    const sources = loader.sources?.();
    return {
      ...trained,
      metrics: {
        ...trained.metrics,
        ...this.#meter.add(trained),
        counters: {
          save_failed: this.#failedSaves,
          ...trained.metrics.counters,
          ...(dropped > 0 && { log_dropped: dropped }),
        },
        gpu_mem_alloc: Math.round(usedBytes / MIB),
        gpu_mem_peak: Math.round(peakBytes / MIB),
        gpu_mem_reserved: Math.round(reservedBytes / MIB),
        ...(this.#pause > 0 && { save_pause_s: this.#pause }),
        ...(telemetry && { docs_seen: telemetry.documents, queue_fill: telemetry.queueFill }),
        ...(sources && {
          source_tokens: Object.fromEntries(sources.map(({ name, tokens }) => [name, tokens])),
          source_epoch: Object.fromEntries(sources.map(({ name, epoch }) => [name, epoch])),
        }),
      },
    };
  }

  /**
   * Returns and clears the requests since the last step. Ranks must act alike: a request to one of them is a request to
   * all.
   */
  #takeRequests(): Requests {
    const { agreement, isFirst } = this.#world;
    const { pending } = this.#signals;
    const { halt: path } = this.#folder.paths;
    const halt = isFirst && existsSync(path) ? readMark(path) : undefined;
    const stop = pending.stop ?? (this.#options.signal?.aborted ? 'abort' : null);
    const own = [
      Number(halt !== undefined),
      stop === null ? 0 : 1 + STOPS.indexOf(stop),
      Number(pending.save),
      Number(this.#pending?.isDone ?? false),
    ];
    pending.save = false;
    const [halts, stops, saves, saved] = agreement.max(own);
    return {
      halt: halts > 0 ? agreement.share(halt ?? '') : undefined,
      stop: stops > 0 ? STOPS[stops - 1] : null,
      save: saves > 0,
      isSaved: saved > 0,
    };
  }

  async #saveOnRequest(step: number): Promise<void> {
    await this.#saveNow(step);
    if (this.#savedAt !== step) return; // the failure was reported already
    const kept = this.#world.isFirst ? this.#keep(step) : '';
    this.#log.say(`saved the checkpoint of step ${step} (SIGUSR2); ${kept}`);
  }

  /** Marks a checkpoint that was asked for, so that it is not deleted; returns how long it will be there. */
  #keep(step: number): string {
    try {
      keepCheckpoint(this.#folder.path, step);
      return 'it stays until you delete it';
    } catch (error) {
      if (!isFileSystemError(error)) throw error;
      const { keep_last: kept } = this.#config.train;
      return `it goes after ${kept} newer ones (train.keep_last): ${explainFileError(error)}`;
    }
  }

  /** Makes sure that there is a checkpoint of this step, the one after which training is. */
  async #saveNow(step: number): Promise<void> {
    await this.#settle();
    if (this.#savedAt !== step) await this.#save();
    await this.#settle();
  }

  /**
   * Saves a checkpoint, or begins to: then training waits for the copy alone. One is written at a time. If the disk refuses
   * it, training continues and the next interval tries again.
   */
  async #save(): Promise<void> {
    const { step } = this.#trainer.progress;
    await this.#settle();
    const started = performance.now();
    this.#records.enter('save', step);
    // The rows of a checkpoint must be on the disk before it is.
    this.#isLogged = this.#records.flush();
    this.#savedBefore = this.#savedAt;
    const options = { keepLast: this.#config.train.keep_last, ...this.#options.saveOptions };
    this.#pending = this.#savesAside ? this.#trainer.beginSave(this.#folder.path, options, this.#thread) : null;
    if (this.#pending) this.#savedAt = step;
    else {
      if (this.#thread && !this.#hasWarnedOfMemory)
        this.#log.warn('no memory for a copy of the state: training waits until a checkpoint is written');
      this.#hasWarnedOfMemory = true;
      await this.#conclude(step, this.#trainer.save(this.#folder.path, options));
    }
    this.#pause += (performance.now() - started) / 1000;
  }

  /** Waits for the checkpoint that is being written, if there is one. */
  async #settle(): Promise<void> {
    const pending = this.#pending;
    if (pending === null) return;
    const started = performance.now();
    if (!pending.isDone) this.#records.enter('save', pending.step);
    await this.#conclude(pending.step, pending.settle());
    this.#pending = null;
    this.#pause += (performance.now() - started) / 1000;
  }

  /** Records how a save ended. */
  async #conclude(step: number, saving: Promise<SavedCheckpoint>): Promise<void> {
    try {
      const { path, warnings } = await saving;
      this.#savedAt = step;
      // The disk took the checkpoint but not its rows a moment ago: try again before they can be lost.
      if (!this.#isLogged) this.#records.flush();
      this.#records.writeEvent({ step, msg: 'checkpoint', detail: path });
      this.#options.onCheckpoint?.({ step, path });
      for (const warning of warnings) this.#log.warn(warning);
    } catch (error) {
      if (!(error instanceof SaveFailed)) throw error;
      this.#savedAt = this.#savedBefore;
      this.#failedSaves += 1;
      this.#log.warn(`${error.message}; ${this.#afterFailedSave(step)}`);
      this.#records.writeEvent({ step, msg: 'checkpoint', detail: `failed: ${error.message}` });
      this.#options.onCheckpoint?.({ step, path: null });
    }
  }

  #afterFailedSave(step: number): string {
    if (step < this.#config.train.steps) return 'training goes on and the next checkpoint will be tried';
    const point = this.#savedAt === null ? 'from the start' : `from step ${this.#savedAt}`;
    return `this was the last step, so --resume auto would continue ${point}`;
  }

  async #evaluate(): Promise<void> {
    const { loader } = this.#trainer;
    if (loader.validationSamples === 0) return;
    await this.#settle(); // what runs out of memory here must not cost the checkpoint
    const { step } = this.#trainer.progress;
    let evaluation: Evaluation;
    try {
      evaluation = await this.#trainer.evaluate();
    } catch (error) {
      if (!(error instanceof SourceFailed) || !canFallBack(loader)) throw error;
      loader.fallBack!(error);
      return;
    }
    this.#records.writeEvaluation(step, evaluation);
    this.#options.onEvaluation?.({ step, ...evaluation });
    const parts = evaluation.bySource?.map(({ name, loss }) => ` | ${name} ${loss.toFixed(4)}`) ?? [];
    this.#log.say(
      `eval ${step} | val_loss ${evaluation.loss.toFixed(4)} | ppl ${evaluation.perplexity.toFixed(2)}${parts.join('')}`,
    );
  }

  async #sample(): Promise<void> {
    const { step } = this.#trainer.progress;
    const { data, train } = this.#config;
    if (train.save_every > 0) await this.#saveNow(step);
    if (!this.#world.isFirst) return;
    this.#records.enter('sample', step);
    let text = '';
    const loaded = { model: this.#model, config: this.#config, tokenizer: createTokenizer(data.tokenizer) };
    const sampling = { temperature: 0.8, seed: train.seed };
    for await (const piece of generate(loaded, '', { maxNewTokens: SAMPLE_TOKENS, sampling })) text += piece;
    this.#records.writeSample(step, text);
    this.#log.say(`sample ${step} | ${JSON.stringify(text)}`);
  }

  /** How the run ends before its last step, after a checkpoint; null if it continues. */
  async #ending(step: number, { halt, stop }: Requests): Promise<Ending | null> {
    if (halt === undefined && stop === null) return null;
    const reason = halt === undefined ? `${stop}` : `.HALT${halt ? `: ${halt}` : ''}`;
    this.#log.live?.clear();
    await this.#signals.echoed;
    await this.#saveNow(step);
    this.#log.say(`stopped after step ${step} by ${reason}`);
    return { status: halt === undefined ? 'signalled' : 'halted', detail: reason };
  }

  /** A request to stop came while the run waited for data. A .HALT that is gone again still counts. */
  async #stopFetching({ message }: FetchInterrupted): Promise<Ending> {
    const requests = this.#takeRequests();
    const { step } = this.#trainer.progress;
    return (await this.#ending(step, requests)) ?? { status: 'halted', detail: message };
  }

  #stopNonFinite({ step, result, batches }: NonFiniteStep): Ending {
    const { rank } = this.#world;
    const trained = this.#model.parameters.filter(({ isFrozen }) => !isFrozen);
    const line = reportNonFinite(this.#folder.path, step, result, batches, trained, rank);
    this.#log.warn(line);
    return { status: 'non-finite', detail: line, refused: { step, loss: result.loss, grad_norm: result.norm } };
  }

  /** The source failed: saves, so that the run can continue when the source is back. */
  async #stopWithoutData(error: SourceFailed): Promise<Ending> {
    const { step } = this.#trainer.progress;
    if (step > 0) await this.#saveNow(step);
    this.#records.writeEvent({ step, msg: 'loader_error', detail: error.message });
    this.#log.warnOwn(error.message);
    return { status: 'no-data', detail: error.message };
  }

  /** The end of the run if not all ranks hold the same weights. */
  #differingWeights(): Ending | null {
    const { step } = this.#trainer.progress;
    const line = reportDifferingWeights(this.#folder.path, step, this.#model.parameters, this.#world);
    if (line === null) return null;
    this.#log.warn(line);
    return { status: 'ranks-differ', detail: line };
  }

  /** The content of metrics.json besides the end. */
  readonly facts = () => {
    const { progress } = this.#trainer;
    const { device, dtype, parameterCount } = this.#model;
    const { seq_len, batch_size, accumulate_grad_batches, steps } = this.#config.train;
    return {
      step: progress.step,
      steps,
      first_loss: progress.firstLoss,
      last_loss: progress.lastLoss,
      val_loss: progress.lastValLoss,
      tokens_seen: progress.tokensSeen,
      spikes: progress.spikes,
      skipped_updates: progress.skippedUpdates,
      dropped_log_lines: this.#records.lost,
      seconds: (performance.now() - this.#started) / 1000,
      device: device.kind,
      device_name: device.name,
      dtype: dtype === 'bf16' ? 'bf16' : 'fp32',
      parameters: parameterCount,
      seq_len,
      batch_size: batch_size * accumulate_grad_batches * this.#world.size,
      ranks: this.#world.size,
    };
  };

  /** The final model if the run is done. */
  #writeFinalFiles({ status }: Ending): void {
    const { path } = this.#folder;
    this.#records.flush();
    const { lost } = this.#records;
    if (lost > 0) this.#log.warn(`${lost} log records were dropped: the file system of ${path} did not take them`);
    if (status !== 'done') return;
    const { save } = this.#options;
    const { adapters } = this.#model;
    const { lora, init_from: base } = this.#config.train;
    for (const target of save ? [path, save] : [path])
      if (lora !== null && base !== null) writeAdapter(target, adapters, { ...lora, base });
      else writeFinalModel(target, this.#model, this.#config, { step: this.#trainer.progress.step });
  }

  /** A checkpoint comes before an evaluation: if that runs out of memory, nothing is lost. */
  #isSaveDue(step: number): boolean {
    const { save_every: every } = this.#config.train;
    return isDue(step, every, this.#config) || (every > 0 && isEvaluationDue(step, this.#config));
  }
}

/** Whether something with the period `every` is due at a step; the last step always is. 0 disables it. */
function isDue(step: number, every: number, { train }: Config): boolean {
  return every > 0 && (step % every === 0 || step === train.steps);
}

/** Also for a resumed run, whose checkpoint may lack the evaluation that should have followed it. */
export function isEvaluationDue(step: number, config: Config): boolean {
  return step > 0 && isDue(step, config.train.eval_every, config);
}
