/**
 * `Run`: a training with its files. It iterates over the trainer's steps and records them, saves and evaluates when due,
 * and acts on signals and .HALT between steps. What a resumed run needs is in the trainer; this class only adds cadence.
 */
import { setImmediate } from 'node:timers/promises';
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { createTokenizer } from '../data/tokenizer.js';
import { generate } from '../infer/generate.js';
import { writeFinalModel } from '../infer/load-model.js';
import type { LiveLine } from '../live-line.js';
import { trainingFlops } from '../model/flops.js';
import type { LanguageModel } from '../model/language-model.js';
import { SaveFailed } from '../run/checkpoint/save.js';
import type { RunFolder } from '../run/folder.js';
import { readHalt, writeAnomaly, writeHalt } from '../run/paths.js';
import { differingWeights, reportNonFinite } from './anomalies.js';
import type { TrainOptions, TrainResult, TrainStatus } from './options.js';
import { RankLost } from './ranks/monitor.js';
import type { World } from './ranks/world.js';
import {
  FetchTimes,
  progressText,
  type RunRecords,
  type StepRecord,
  spikeLine,
  stepLine,
  timingLine,
} from './records.js';
import { agreeOnRequests, type SignalRequests, type StopRequests } from './signals.js';
import { NonFiniteStep, SourceFailed, type Trainer, type TrainingStep } from './trainer.js';

/** Lines for a person. Rank 0 prints what concerns the whole run; other ranks only warn about themselves. */
export interface RankLogger {
  say(line: string): void;
  warn(line: string): void;
  /** A warning about this rank, with its number unless it is rank 0. */
  warnOwn(line: string): void;
}

/** Everything a run works with. */
export interface RunParts {
  readonly config: Config;
  readonly world: World;
  readonly folder: RunFolder;
  readonly model: LanguageModel;
  readonly trainer: Trainer;
  readonly records: RunRecords;
  readonly log: RankLogger;
  readonly live: LiveLine;
  readonly requests: SignalRequests;
  readonly options: TrainOptions;
  /** The source of the batches now, for heartbeats. */
  readonly data: () => string;
  /** The step of the checkpoint that the run was resumed from. */
  readonly resumedFrom: number | null;
}

const MIB = 2 ** 20;
/** Weight of the newest step in the estimate of the time left. */
const SMOOTHING = 0.1;
const SAMPLE_TOKENS = 64;

export class Run {
  readonly #parts: RunParts;
  readonly #fetchTimes = new FetchTimes();
  #failedSaves = 0;
  #savedAt: number | null;
  /** Null until the second step. */
  #secondsPerStep: number | null = null;
  #isFirstStep = true;
  #peakFlops: number | null;

  constructor(parts: RunParts) {
    this.#parts = parts;
    this.#savedAt = parts.resumedFrom;
    this.#peakFlops = parts.options.peakFlops ?? null;
  }

  /** Trains to the end, or until it is stopped, and writes the final files. */
  async execute(isEvaluationMissing: boolean): Promise<TrainResult> {
    const { world, trainer, records, folder } = this.#parts;
    const { progress } = trainer;
    const started = performance.now();
    try {
      if (isEvaluationMissing) await this.#evaluate();
      const status = this.#weightsAgree() ? await this.#train() : 'ranks-differ';
      if (status === 'done') records.writeEvent({ step: progress.step, msg: 'stop', detail: 'done' });
      if (world.isFirst) this.#writeFinalFiles(status, (performance.now() - started) / 1000);
      // A launcher may end all ranks as soon as one has ended: wait until the files are written.
      world.agreement.wait();
      const { step, firstLoss, lastLoss, lastValLoss: valLoss } = progress;
      return { status, step, outDir: folder.path, firstLoss, lastLoss, valLoss };
    } catch (error) {
      if (error instanceof RankLost) {
        records.writeEvent({ step: progress.step, msg: 'halt', detail: error.message });
        writeAnomaly(folder.path, error.anomaly);
      }
      throw error;
    } finally {
      this.#parts.live.clear();
    }
  }

  async #train(): Promise<TrainStatus> {
    const { trainer, records, config } = this.#parts;
    const { hash_every: hashEvery, sample_every: sampleEvery } = config.train;
    try {
      for await (const trained of trainer) {
        const { step } = trained;
        this.#report(trained);
        if (isDue(step, hashEvery, config) && !this.#weightsAgree()) return 'ranks-differ';
        await this.#saveIfDue(step);
        if (isEvaluationDue(step, config)) await this.#evaluate();
        if (sampleEvery > 0 && step % sampleEvery === 0) await this.#sample();
        records.enter('between', step);
        await setImmediate(); // signals arrive here
        const requests = this.#requests();
        if (requests.save) await this.#saveOnRequest();
        const ending = await this.#ending(requests);
        if (ending) return ending;
      }
      return 'done';
    } catch (error) {
      if (error instanceof NonFiniteStep) return this.#stopNonFinite(error);
      if (error instanceof SourceFailed) return await this.#stopWithoutData(error);
      throw error;
    }
  }

  /** Writes the records of a step, and prints what a person should see of it. */
  #report(trained: TrainingStep): void {
    const { config, records, live, log, options, world } = this.#parts;
    const { step, loss, tokens, tokensPerSecond, result } = trained;
    const { steps, log_every: every } = config.train;
    const dropped = records.drops;
    if (result.comparisons.length > 0)
      log.say(
        `compare ${step} | largest distance from the reference ${Math.max(...result.comparisons).toExponential(2)}`,
      );
    if (config.runtime.debug_timing) log.say(timingLine(trained));
    if (trained.spike) this.#warn(spikeLine(trained));
    const record = this.#recordOf(trained, dropped);
    records.writeHeartbeat(record);
    if (record.attention && world.isFirst) records.writeAttention(step, record.attention);
    options.onStep?.(record);
    this.#estimate(tokens / tokensPerSecond);
    if (step === 1 || step % every === 0 || step === steps) {
      records.writeRow(record);
      live.clear();
      log.say(stepLine(record, dropped));
    }
    const left = (this.#secondsPerStep ?? Number.NaN) * (steps - step);
    live.show(progressText(step, steps, loss, tokensPerSecond, left));
  }

  /** The facts of a step as they are recorded; `dropped` log records so far. */
  #recordOf(trained: TrainingStep, dropped: number): StepRecord {
    const { model, trainer, data } = this.#parts;
    const { tokens, tokensPerSecond, result, batches } = trained;
    const { peakBytes, reservedBytes } = model.device.memory;
    this.#fetchTimes.add(trained.fetchSeconds);
    return {
      step: trained.step,
      loss: trained.loss,
      learningRate: trained.learningRate,
      tokensPerSecond,
      gradientNorm: trained.gradientNorm,
      fetchSeconds: trained.fetchSeconds,
      fetchP50Ms: this.#fetchTimes.percentileMs(0.5),
      fetchP95Ms: this.#fetchTimes.percentileMs(0.95),
      mfu: this.#mfu(batches, tokens / tokensPerSecond),
      ...result.observed,
      sparseStart: trained.sparseStart,
      memoryMib: { allocated: Math.round(peakBytes / MIB), reserved: Math.round(reservedBytes / MIB) },
      counters: {
        save_failed: this.#failedSaves,
        spike: trainer.progress.spikes,
        update_skipped: trainer.progress.skippedUpdates,
        ...result.counters,
        ...(dropped > 0 && { log_dropped: dropped }),
      },
      data: data(),
      loader: trainer.loader.telemetry?.(),
    };
  }

  /** The first step of a process compiles kernels, so it does not count. */
  #estimate(seconds: number): void {
    if (this.#isFirstStep) this.#isFirstStep = false;
    else this.#secondsPerStep = seconds * SMOOTHING + (this.#secondsPerStep ?? seconds) * (1 - SMOOTHING);
  }

  /** Share of the peak. A step that exceeds the measured peak proves it too low and raises it: the share is at most 1. */
  #mfu(batches: readonly Batch[], seconds: number): number | null {
    if (this.#peakFlops === null) return null;
    const flopsPerSecond = usedFlops(this.#parts.model, batches) / seconds;
    this.#peakFlops = Math.max(this.#peakFlops, flopsPerSecond);
    return flopsPerSecond / this.#peakFlops;
  }

  /** A checkpoint comes before an evaluation: if that runs out of memory, nothing is lost. */
  async #saveIfDue(step: number): Promise<void> {
    const { config } = this.#parts;
    const { save_every: every } = config.train;
    if (isDue(step, every, config) || (every > 0 && isEvaluationDue(step, config))) await this.#save();
  }

  async #saveOnRequest(): Promise<void> {
    const { trainer, live, log } = this.#parts;
    const { step } = trainer.progress;
    if (this.#savedAt !== step) await this.#save();
    if (this.#savedAt !== step) return; // the failure was reported
    live.clear();
    log.say(`saved the checkpoint of step ${step} (SIGUSR2)`);
  }

  /** Saves a checkpoint. If the disk refuses it, training continues and the next interval tries again. */
  async #save(): Promise<void> {
    const { folder, config, trainer, records, options, log } = this.#parts;
    const { step } = trainer.progress;
    records.enter('save', step);
    // The rows of a checkpoint must be on the disk before it is.
    const isLogged = records.flush();
    try {
      const { path, warnings } = await trainer.save(folder.path, {
        keepLast: config.train.keep_last,
        ...options.saveOptions,
      });
      this.#savedAt = step;
      // The disk took the checkpoint but not its rows a moment ago: try again before they can be lost.
      if (!isLogged) records.flush();
      records.writeEvent({ step, msg: 'checkpoint', detail: path });
      options.onCheckpoint?.({ step, path });
      for (const warning of warnings) log.warn(warning);
    } catch (error) {
      if (!(error instanceof SaveFailed)) throw error;
      this.#failedSaves += 1;
      this.#warn(`${error.message}; ${this.#afterFailedSave(step)}`);
      records.writeEvent({ step, msg: 'checkpoint', detail: `failed: ${error.message}` });
      options.onCheckpoint?.({ step, path: null });
    }
  }

  #afterFailedSave(step: number): string {
    if (step < this.#parts.config.train.steps) return 'training goes on and the next checkpoint will be tried';
    const point = this.#savedAt === null ? 'from the start' : `from step ${this.#savedAt}`;
    return `this was the last step, so --resume auto would continue ${point}`;
  }

  async #evaluate(): Promise<void> {
    const { trainer, records, live, log, options } = this.#parts;
    if (trainer.loader.validationSamples === 0) return;
    const { step } = trainer.progress;
    const evaluation = await trainer.evaluate();
    records.writeEvaluation(step, evaluation);
    options.onEvaluation?.({ step, ...evaluation });
    live.clear();
    log.say(`eval ${step} | val_loss ${evaluation.loss.toFixed(4)} | ppl ${evaluation.perplexity.toFixed(2)}`);
  }

  async #sample(): Promise<void> {
    const { config, world, model, trainer, records, live, log } = this.#parts;
    const { step } = trainer.progress;
    if (config.train.save_every > 0 && this.#savedAt !== step) await this.#save();
    if (!world.isFirst) return;
    records.enter('sample', step);
    let text = '';
    const loaded = { model, config, tokenizer: createTokenizer(config.data.tokenizer) };
    const sampling = { temperature: 0.8, seed: config.train.seed };
    for await (const piece of generate(loaded, '', { maxNewTokens: SAMPLE_TOKENS, sampling })) text += piece;
    live.clear();
    records.writeSample(step, text);
    log.say(`sample ${step} | ${JSON.stringify(text)}`);
  }

  /** What signals, the calling program and .HALT request; the same on all ranks. */
  #requests(): StopRequests {
    const { folder, requests, options, world } = this.#parts;
    const own: StopRequests = {
      halt: world.isFirst ? readHalt(folder.path) : undefined,
      stop: requests.stop ?? (options.signal?.aborted ? 'abort' : null),
      save: requests.save,
    };
    requests.save = false;
    return agreeOnRequests(own, world.agreement);
  }

  /** How the run ends before its last step, after a checkpoint; null if it continues. */
  async #ending({ halt, stop }: StopRequests): Promise<TrainStatus | null> {
    const { requests, trainer, records, live, log } = this.#parts;
    const { step } = trainer.progress;
    if (halt === undefined && stop === null) return null;
    const reason = halt === undefined ? `${stop}` : `.HALT${halt ? `: ${halt}` : ''}`;
    live.clear();
    await requests.echoed;
    if (this.#savedAt !== step) await this.#save();
    records.writeEvent({ step, msg: halt === undefined ? 'stop' : 'halt', detail: reason });
    log.say(`stopped after step ${step} by ${reason}`);
    return halt === undefined ? 'signalled' : 'halted';
  }

  #stopNonFinite({ step, result, batches }: NonFiniteStep): TrainStatus {
    const { folder, model, records, world } = this.#parts;
    const line = reportNonFinite(folder.path, step, result, batches, model.parameters, world.rank);
    records.writeEvent({ step, msg: 'halt', loss: result.loss, grad_norm: result.norm, detail: line });
    this.#warn(line);
    return 'non-finite';
  }

  /** The source failed: saves, so that the run can continue when the source is back. */
  async #stopWithoutData(error: SourceFailed): Promise<TrainStatus> {
    const { trainer, records, live, log } = this.#parts;
    const { step } = trainer.progress;
    live.clear();
    if (step > 0 && this.#savedAt !== step) await this.#save();
    records.writeEvent({ step, msg: 'loader_error', detail: error.message });
    log.warnOwn(error.message);
    return 'no-data';
  }

  /** Whether all ranks hold the same weights; if not, writes why the run ends. */
  #weightsAgree(): boolean {
    const { folder, world, model, trainer, records } = this.#parts;
    const { step } = trainer.progress;
    const problem = differingWeights(world, model.parameters);
    if (problem === null) return true;
    const line = `${problem}, after step ${step}; the last checkpoint is from before`;
    records.writeEvent({ step, msg: 'halt', detail: line });
    if (world.isFirst) {
      writeAnomaly(folder.path, 'ranks_differ');
      writeHalt(folder.path, line);
    }
    this.#warn(line);
    return false;
  }

  /** metrics.json always; the final model if the run is done. */
  #writeFinalFiles(status: TrainStatus, seconds: number): void {
    const { config, folder, model, trainer, records, world, options, log } = this.#parts;
    const { progress } = trainer;
    const { seq_len, batch_size, accumulate_grad_batches, steps } = config.train;
    records.flush();
    const lost = records.lost;
    if (lost > 0) log.warn(`${lost} log records were dropped: the file system of ${folder.path} did not take them`);
    folder.writeMetrics({
      status,
      step: progress.step,
      steps,
      first_loss: progress.firstLoss,
      last_loss: progress.lastLoss,
      val_loss: progress.lastValLoss,
      tokens_seen: progress.tokensSeen,
      spikes: progress.spikes,
      skipped_updates: progress.skippedUpdates,
      dropped_log_lines: lost,
      seconds,
      device: model.device.kind,
      device_name: model.device.name,
      dtype: model.dtype === 'bf16' ? 'bf16' : 'fp32',
      parameters: model.parameterCount,
      seq_len,
      batch_size: batch_size * accumulate_grad_batches * world.size,
      ranks: world.size,
    });
    if (status !== 'done') return;
    writeFinalModel(folder.path, model, config, { step: progress.step });
    if (options.save) writeFinalModel(options.save, model, config, { step: progress.step });
  }

  #warn(line: string): void {
    this.#parts.live.clear();
    this.#parts.log.warn(line);
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

function usedFlops({ shape }: LanguageModel, batches: readonly Batch[]): number {
  return batches.reduce((total, { cuSeqlens }) => {
    const lengths = Array.from({ length: cuSeqlens.length - 1 }, (_, i) => cuSeqlens[i + 1] - cuSeqlens[i]);
    return total + trainingFlops(shape, lengths).used;
  }, 0);
}
