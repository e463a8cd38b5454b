/**
 * The training loop: fetch, step, record, save, evaluate, and listen to signals and .HALT between steps.
 *
 * It owns no file formats and no kernels. Everything it changes is in `TrainingState`, so a checkpoint of that is all a
 * resumed run needs to give the same losses bit for bit.
 */
import { setImmediate } from 'node:timers/promises';
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { TrefoilError } from '../errors.js';
import { trainingFlops } from '../model/flops.js';
import type { SaveOptions } from '../run/checkpoint-save.js';
import { SaveFailed } from '../run/checkpoint-save.js';
import { readHalt, writeAnomaly, writeHalt } from '../run/run-paths.js';
import type { SectionName } from '../run/section.js';
import { reportNonFinite } from './anomaly.js';
import type { BatchUploader } from './batches.js';
import { saveTrainingState, type TrainingState } from './checkpoints.js';
import { evaluate } from './evaluate.js';
import { FetchTimes } from './fetch-times.js';
import { countTargets, type StepGradients } from './optimizer-step.js';
import { type LiveLine, stepLine } from './progress.js';
import { differingWeights, type Ranks } from './ranks.js';
import type { CheckpointRecord, EvaluationRecord, RunRecords, StepRecord } from './records.js';
import { learningRate } from './schedule.js';
import type { SignalRequests } from './signals.js';
import type { Position } from './stackdump.js';
import type { Stepper, StepResult } from './stepper.js';
import { agreeOnWishes, type Wishes } from './wishes.js';

export type TrainStatus = 'done' | 'halted' | 'signalled' | 'non-finite' | 'no-data' | 'ranks-differ';

export interface LoopContext {
  readonly outDir: string;
  readonly config: Config;
  /** What the batches really come from, now; every heartbeat says it. */
  readonly data: () => string;
  readonly state: TrainingState;
  readonly uploader: BatchUploader;
  readonly stepper: Stepper;
  /** Null for a single process. */
  readonly ranks: Ranks | null;
  readonly records: RunRecords;
  readonly requests: SignalRequests;
  /** The program that called for the training wants it to stop. */
  readonly isAborted: () => boolean;
  /** Peak of the device in FLOP/s, for MFU; null when it was not measured. */
  readonly peakFlops: number | null;
  readonly live: LiveLine;
  /** Lines for a person. */
  readonly say: (line: string) => void;
  readonly warn: (line: string) => void;
  /** Told where the loop is, for stack dumps and watchdogs. */
  readonly position: { step: number; section: string } & Position;
  readonly saveOptions?: SaveOptions;
  readonly onStep?: (record: StepRecord) => void;
  readonly onEvaluation?: (record: EvaluationRecord) => void;
  readonly onCheckpoint?: (record: CheckpointRecord) => void;
  /** A text the model continues, for train.sample_every. */
  readonly sample?: () => Promise<string>;
}

interface Fetched {
  readonly batches: readonly Batch[];
  /** Over all ranks. */
  readonly targets: number;
  readonly tokens: number;
  /** When fetching began: the time of the step counts from there. */
  readonly started: number;
}

const MIB = 2 ** 20;
const SMOOTHING = 0.1;

export class TrainingLoop {
  readonly #context: LoopContext;
  readonly #fetchTimes = new FetchTimes();
  readonly #counters: Record<string, number> = { save_failed: 0, spike: 0, update_skipped: 0 };
  #savedAt: number | null;
  #secondsPerStep: number | null = null;
  #peakFlops: number | null;

  /** `savedAt`: the step of the checkpoint the run came from. */
  constructor(context: LoopContext, savedAt: number | null) {
    this.#context = context;
    this.#savedAt = savedAt;
    this.#peakFlops = context.peakFlops;
    const { progress } = context.state;
    this.#counters['spike'] = progress.spikes;
    this.#counters['update_skipped'] = progress.skippedUpdates;
  }

  async run(): Promise<TrainStatus> {
    const { config, state } = this.#context;
    const { progress } = state;
    while (progress.step < config.train.steps) {
      const fetched = await this.#fetch();
      if (fetched instanceof TrefoilError) return this.#sourceGaveUp(fetched);
      if (!this.#step(fetched)) return 'non-finite';
      if (!this.weightsAgree()) return 'ranks-differ';
      this.#saveIfDue();
      await this.#evaluateIfDue();
      await this.#sampleIfDue();
      this.#enter('between');
      await setImmediate(); // signals arrive here
      const wishes = this.#wishes();
      if (wishes.save && this.#savedAt !== progress.step) this.save();
      const ending = await this.#ending(wishes);
      if (ending) return ending;
    }
    return 'done';
  }

  /** Whether all ranks hold the same weights, where it is time to look; if not, the run has written down why it ends. */
  weightsAgree(isDue = this.#hashDue()): boolean {
    const { ranks, state, records, warn, live, outDir } = this.#context;
    if (!ranks || !isDue) return true;
    const problem = differingWeights(ranks, state.model.parameters);
    if (problem === null) return true;
    const { step } = state.progress;
    const line = `${problem}, after step ${step}; the last checkpoint is from before`;
    live.clear();
    records.event({ step, msg: 'halt', detail: line });
    if (ranks.world.isFirst) {
      writeAnomaly(outDir, 'ranks_differ');
      writeHalt(outDir, line);
      warn(line);
    }
    return false;
  }

  #hashDue(): boolean {
    const { hash_every: every, steps } = this.#context.config.train;
    const { step } = this.#context.state.progress;
    return every > 0 && (step % every === 0 || step === steps);
  }

  /** Whether an evaluation belongs to this step. A resumed run asks for the one its checkpoint was followed by. */
  evaluationDue(step: number): boolean {
    const { eval_every: every, steps } = this.#context.config.train;
    return step > 0 && every > 0 && (step % every === 0 || step === steps);
  }

  async evaluateNow(): Promise<void> {
    const { config, state, uploader, records, ranks, say, live } = this.#context;
    if (state.loader.validationSamples === 0) return;
    this.#enter('eval');
    await state.loader.readyToEvaluate?.(config.train.eval_batches);
    const batches = state.loader.evalBatches(config.train.eval_batches);
    const evaluation = evaluate(state.model, uploader, batches, config, ranks?.world.together);
    state.progress.lastValLoss = evaluation.loss;
    records.evaluated(state.progress.step, evaluation);
    this.#context.onEvaluation?.({ step: state.progress.step, ...evaluation });
    live.clear();
    say(
      `eval ${state.progress.step} | val_loss ${evaluation.loss.toFixed(4)} | ppl ${evaluation.perplexity.toFixed(2)}`,
    );
  }

  /** Saves a checkpoint. A disk that does not take it is a warning: training goes on and the next interval tries again. */
  save(): boolean {
    const { outDir, config, state, ranks, records, warn, live } = this.#context;
    const { step } = state.progress;
    this.#enter('save');
    const isLogged = records.flush();
    try {
      const options = { keepLast: config.train.keep_last, ...this.#context.saveOptions };
      const { path, warnings } = saveTrainingState(outDir, state, config, options, ranks);
      this.#savedAt = step;
      // The disk took the checkpoint and not its rows a moment ago: a kill now must not lose them.
      if (!isLogged) records.flush();
      records.event({ step, msg: 'checkpoint', detail: path });
      this.#context.onCheckpoint?.({ step, path });
      if (!ranks || ranks.world.isFirst) for (const warning of warnings) warn(warning);
      return true;
    } catch (error) {
      if (!(error instanceof SaveFailed)) throw error;
      this.#counters['save_failed'] += 1;
      live.clear();
      if (!ranks || ranks.world.isFirst)
        warn(`${error.message}; training goes on and the next checkpoint will be tried`);
      records.event({ step, msg: 'checkpoint', detail: `failed: ${error.message}` });
      this.#context.onCheckpoint?.({ step, path: null });
      return false;
    }
  }

  get savedAt(): number | null {
    return this.#savedAt;
  }

  /** Tells stack dumps and watchdogs where the loop is. */
  #enter(section: SectionName, step: number = this.#context.state.progress.step): void {
    Object.assign(this.#context.position, { section, step });
    this.#context.records.enter(section, step);
  }

  /** The micro-batches of a step. Waiting for them leaves the thread free, so that signals are heard meanwhile. */
  async #fetch(): Promise<Fetched | TrefoilError> {
    const { config, state } = this.#context;
    const { loader } = state;
    const started = performance.now();
    this.#enter('fetch', state.progress.step + 1);
    const before = loader.state();
    const batches: Batch[] = [];
    let failure: TrefoilError | null = null;
    try {
      while (batches.length < config.train.accumulate_grad_batches) {
        await loader.ready?.(1);
        batches.push(loader.next());
      }
    } catch (error) {
      if (!(error instanceof TrefoilError)) throw error;
      failure = error;
    }
    this.#fetchTimes.add((performance.now() - started) / 1000);
    const own = [countTargets(batches), batches.reduce((total, { inputs }) => total + inputs.length, 0)];
    const { together } = this.#context.ranks?.world ?? {};
    const [targets, tokens, failures] = together ? together.sum([...own, Number(failure !== null)]) : own;
    if (failure === null && failures > 0) failure = new TrefoilError('the data source of another rank gave up');
    if (failure === null) return { batches, targets, tokens, started };
    // Some micro-batches may have been taken: the step did not happen, so neither did they.
    loader.restore(before);
    return failure;
  }

  /** A source that stays dead ends the run, with a checkpoint from which it goes on when the source is back. */
  #sourceGaveUp(error: TrefoilError): TrainStatus {
    const { state, records, warn, live } = this.#context;
    const { step } = state.progress;
    live.clear();
    if (step > 0 && this.#savedAt !== step) this.save();
    records.event({ step, msg: 'loader_error', detail: error.message });
    warn(error.message);
    return 'no-data';
  }

  /** One optimizer step; false when its numbers were not finite and nothing was changed. */
  #step({ batches, targets, tokens, started }: Fetched): boolean {
    const { config, state, stepper, ranks, outDir, say, warn, live, records } = this.#context;
    const { model, progress } = state;
    const step = progress.step + 1;
    this.#enter('step', step);
    const computing = performance.now();
    const rate = learningRate(step, config.train);
    const accept = (gradients: StepGradients) => !this.#isSkipped(gradients);
    const { accumulate_grad_batches: count, steps } = config.train;
    const ahead = () => (step < steps ? (state.loader.lookAhead?.(count) ?? []) : []);
    const result = stepper.step({ batches, targets, learningRate: rate, accept, ahead });
    if (result.comparisons.length > 0)
      say(`compare ${step} | largest distance from the reference ${Math.max(...result.comparisons).toExponential(2)}`);
    if (!result.finite) {
      live.clear();
      const rank = ranks?.world.rank ?? 0;
      const line = reportNonFinite(outDir, step, result, batches, model.parameters, rank);
      records.event({ step, msg: 'halt', loss: result.loss, grad_norm: result.norm, detail: line });
      if (rank === 0) warn(line);
      return false;
    }
    if (config.runtime.debug_timing) say(timingLine(step, computing - started, result));
    progress.step = step;
    progress.firstLoss ??= result.loss;
    progress.lastLoss = result.loss;
    progress.tokensSeen += tokens;
    this.#record(result, rate, tokens, (performance.now() - started) / 1000, batches);
    return true;
  }

  /** Scores the step against what came before, counts spikes, and says whether its update is left out. */
  #isSkipped({ loss, norm }: StepGradients): boolean {
    const { config, state, ranks, warn, live } = this.#context;
    const { spikes, progress } = state;
    const scores = { loss: spikes.loss.score(loss), gradient: spikes.gradient.score(norm) };
    spikes.loss.add(loss);
    spikes.gradient.add(norm);
    const worst = Math.max(scores.loss, scores.gradient);
    if (worst < config.train.spike_z) return false;
    progress.spikes += 1;
    this.#counters['spike'] += 1;
    live.clear();
    const line =
      `spike at step ${progress.step + 1}: loss ${loss.toFixed(4)} (z ${scores.loss.toFixed(1)}), ` +
      `gradient norm ${norm.toFixed(3)} (z ${scores.gradient.toFixed(1)})${config.train.spike_skip ? '; update skipped' : ''}`;
    if (!ranks || ranks.world.isFirst) warn(line);
    if (!config.train.spike_skip) return false;
    progress.skippedUpdates += 1;
    this.#counters['update_skipped'] += 1;
    return true;
  }

  #record(result: StepResult, rate: number, tokens: number, seconds: number, batches: readonly Batch[]): void {
    const { config, state, records, live, say } = this.#context;
    const { model, progress } = state;
    const { peakBytes, reservedBytes } = model.device.memory;
    const { step } = progress;
    const { steps, log_every: every } = config.train;
    const dropped = records.drops;
    const record: StepRecord = {
      step,
      loss: result.loss,
      learningRate: rate,
      tokensPerSecond: tokens / seconds,
      gradientNorm: result.norm,
      fetchSeconds: this.#fetchTimes.lastSeconds,
      fetchP50Ms: this.#fetchTimes.percentileMs(0.5),
      fetchP95Ms: this.#fetchTimes.percentileMs(0.95),
      mfu: this.#mfu(this.#usedFlops(batches) / seconds),
      ...result.observed,
      memoryMib: { allocated: Math.round(peakBytes / MIB), reserved: Math.round(reservedBytes / MIB) },
      counters: { ...this.#counters, ...result.counters, ...(dropped > 0 && { log_dropped: dropped }) },
      data: this.#context.data(),
      loader: state.loader.telemetry?.(),
    };
    records.progress(record);
    this.#context.onStep?.(record);
    this.#secondsPerStep =
      this.#secondsPerStep === null ? seconds : this.#secondsPerStep + SMOOTHING * (seconds - this.#secondsPerStep);
    if (step === 1 || step % every === 0 || step === steps) {
      records.logged(record);
      live.clear();
      const { tokensPerSecond, mfu, fetchP50Ms, fetchP95Ms } = record;
      const fetchMs = record.fetchSeconds * 1000;
      say(
        stepLine({
          ...{ step, loss: result.loss, learningRate: rate, tokensPerSecond, mfu },
          ...{ gradientNorm: result.norm, fetchMs, fetchP50Ms, fetchP95Ms, dropped },
        }),
      );
    }
    live.show(step, steps, result.loss, record.tokensPerSecond, this.#secondsPerStep * (steps - step));
  }

  /** Share of the peak. A step that exceeds the measured peak proves it too low and raises it: the share is at most 1. */
  #mfu(flopsPerSecond: number): number | null {
    if (this.#peakFlops === null) return null;
    this.#peakFlops = Math.max(this.#peakFlops, flopsPerSecond);
    return flopsPerSecond / this.#peakFlops;
  }

  #usedFlops(batches: readonly Batch[]): number {
    const { shape } = this.#context.state.model;
    return batches.reduce((total, { cuSeqlens }) => {
      const lengths = Array.from({ length: cuSeqlens.length - 1 }, (_, i) => cuSeqlens[i + 1] - cuSeqlens[i]);
      return total + trainingFlops(shape, lengths).used;
    }, 0);
  }

  /** A checkpoint comes before an evaluation: should that run out of memory, nothing is lost. */
  #saveIfDue(): void {
    const { config, state } = this.#context;
    const { save_every: every, steps } = config.train;
    const { step } = state.progress;
    if (every > 0 && (step % every === 0 || step === steps || this.evaluationDue(step))) this.save();
  }

  /** What signals, the program and .HALT ask for; with several ranks what they ask of any of them. */
  #wishes(): Wishes {
    const { outDir, requests, isAborted, ranks } = this.#context;
    const isFirst = !ranks || ranks.world.isFirst;
    const own: Wishes = {
      halt: isFirst ? readHalt(outDir) : undefined,
      stop: requests.stop ?? (isAborted() ? 'abort' : null),
      save: requests.save,
    };
    requests.save = false;
    return ranks ? agreeOnWishes(own, ranks.world.together) : own;
  }

  async #evaluateIfDue(): Promise<void> {
    if (this.evaluationDue(this.#context.state.progress.step)) await this.evaluateNow();
  }

  async #sampleIfDue(): Promise<void> {
    const { config, state, ranks, sample, say, live } = this.#context;
    const { sample_every: every } = config.train;
    if (!sample || every === 0 || state.progress.step % every !== 0) return;
    if (config.train.save_every > 0 && this.#savedAt !== state.progress.step) this.save();
    if (ranks && !ranks.world.isFirst) return;
    this.#enter('sample');
    const text = await sample();
    live.clear();
    say(`sample ${state.progress.step} | ${JSON.stringify(text)}`);
  }

  /** Why the run ends before its last step, after a checkpoint; null when it goes on. */
  async #ending({ halt, stop }: Wishes): Promise<TrainStatus | null> {
    const { requests, state, records, say, live } = this.#context;
    const { step } = state.progress;
    if (halt === undefined && stop === null) return null;
    const reason = halt === undefined ? `${stop}` : `.HALT${halt ? `: ${halt}` : ''}`;
    live.clear();
    await requests.echoed;
    if (this.#savedAt !== step) this.save();
    records.event({ step, msg: halt === undefined ? 'stop' : 'halt', detail: reason });
    say(`stopped after step ${step} by ${reason}`);
    return halt === undefined ? 'signalled' : 'halted';
  }
}

/** runtime.debug_timing: where a step's time went. */
function timingLine(step: number, fetchMs: number, { gradientsMs, totalMs }: StepResult): string {
  const [fetch, gradients, update] = [fetchMs, gradientsMs, totalMs - gradientsMs].map((ms) => `${ms.toFixed(1)}ms`);
  return `timing ${step} | fetch ${fetch} | gradients ${gradients} | update ${update}`;
}
