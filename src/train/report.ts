/**
 * What a run reports: log files for programs (`RunRecords`), lines for a person (`RankLogger`), and the measures in both that
 * need more than one step (`StepMeter`).
 */
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { LiveLine } from '../live-line.js';
import { trainingFlops } from '../model/flops.js';
import type { LanguageModel } from '../model/language-model.js';
import type { SparseStartState } from '../model/sparse-start.js';
import { type CsvRow, FALLBACK_COUNTERS_CSV, K_STATS_CSV, TRAINING_CSV, VAL_CSV } from '../run/logs/csv.js';
import type { HeartbeatFields, SectionName } from '../run/logs/heartbeat.js';
import { type Log, openCsv, openHeartbeats, openJsonLines, openSection, openTensorboard } from '../run/logs/log.js';
import type { LogThread } from '../run/logs/log-thread.js';
import type { TensorboardEvent } from '../run/logs/tensorboard.js';
import type { RunPaths } from '../run/paths.js';
import type { Evaluation } from './evaluate.js';
import type { AttentionStatistics } from './observers.js';
import type { StepRecord, TrainOptions } from './options.js';
import type { World } from './ranks/world.js';
import type { TrainingStep } from './trainer.js';

/** Prints lines. Rank 0 prints what concerns the whole run; other ranks only warn about themselves. */
export class RankLogger {
  /** The progress line, on the terminal of rank 0. Every other line removes it first. */
  readonly live: LiveLine | null;
  readonly #say: (line: string) => void;
  readonly #warn: (line: string) => void;
  readonly #rank: number;

  constructor({ say = () => {}, warn = warnOnStderr, terminal }: TrainOptions, { rank }: Pick<World, 'rank'>) {
    this.live = rank === 0 && terminal?.isTTY ? new LiveLine(terminal) : null;
    this.#say = say;
    this.#warn = warn;
    this.#rank = rank;
  }

  readonly say = (line: string): void => {
    this.live?.clear();
    if (this.#rank === 0) this.#say(line);
  };

  readonly warn = (line: string): void => {
    this.live?.clear();
    if (this.#rank === 0) this.#warn(line);
  };

  /** A warning about this rank, with its number unless it is rank 0. */
  readonly warnOwn = (line: string): void => {
    this.live?.clear();
    this.#warn(this.#rank === 0 ? line : `rank ${this.#rank}: ${line}`);
  };
}

function warnOnStderr(line: string): void {
  console.warn(`warning: ${line}`);
}

/** Fetches that the percentiles cover. */
const RECENT_FETCHES = 256;

/** Weight of the newest step in the estimate of the time left. */
const SMOOTHING = 0.1;

/** What one step alone does not tell: percentiles of fetch times, the share of the peak, the time left. */
export class StepMeter {
  readonly #model: Pick<LanguageModel, 'shape'>;
  /** Seconds. */
  readonly #recentFetches: number[] = [];
  #peakFlops: number | null;
  #isFirstStep = true;
  /** Null until the second step. */
  #secondsPerStep: number | null = null;

  /** `peakFlops`: of the device, in FLOP/s; null if unknown. */
  constructor(model: Pick<LanguageModel, 'shape'>, peakFlops: number | null) {
    this.#model = model;
    this.#peakFlops = peakFlops;
  }

  add(step: TrainingStep): Pick<StepRecord, 'fetchP50Ms' | 'fetchP95Ms' | 'mfu'> {
    const seconds = step.tokens / step.tokensPerSecond;
    this.#recentFetches.push(step.fetchSeconds);
    if (this.#recentFetches.length > RECENT_FETCHES) this.#recentFetches.shift();
    // The first step of a process compiles kernels, so it does not count.
    if (this.#isFirstStep) this.#isFirstStep = false;
    else this.#secondsPerStep = seconds * SMOOTHING + (this.#secondsPerStep ?? seconds) * (1 - SMOOTHING);
    const sorted = [...this.#recentFetches].sort((a, b) => a - b);
    const percentileMs = (share: number) => 1000 * sorted[Math.floor(share * sorted.length)];
    return { fetchP50Ms: percentileMs(0.5), fetchP95Ms: percentileMs(0.95), mfu: this.#mfu(step.batches, seconds) };
  }

  /** NaN until it is known. */
  secondsLeft(steps: number): number {
    return (this.#secondsPerStep ?? Number.NaN) * steps;
  }

  /** Share of the peak. A step that exceeds the measured peak proves it too low and raises it: the share is at most 1. */
  #mfu(batches: readonly Batch[], seconds: number): number | null {
    if (this.#peakFlops === null) return null;
    const flops = batches.reduce((total, { cuSeqlens }) => {
      const lengths = Array.from({ length: cuSeqlens.length - 1 }, (_, i) => cuSeqlens[i + 1] - cuSeqlens[i]);
      return total + trainingFlops(this.#model.shape, lengths).used;
    }, 0);
    this.#peakFlops = Math.max(this.#peakFlops, flops / seconds);
    return flops / seconds / this.#peakFlops;
  }
}

export class RunRecords {
  #position: { readonly section: SectionName; readonly step: number } = { section: 'boot', step: 0 };
  readonly #logThread: LogThread;
  readonly #heartbeat: Log<HeartbeatFields>;
  readonly #section: Log<{ section: SectionName; step: number }>;
  readonly #training: Log<CsvRow<typeof TRAINING_CSV>> | null = null;
  readonly #val: Log<CsvRow<typeof VAL_CSV>> | null = null;
  readonly #kStats: Log<CsvRow<typeof K_STATS_CSV>> | null = null;
  readonly #counters: Log<CsvRow<typeof FALLBACK_COUNTERS_CSV>> | null = null;
  readonly #paths: RunPaths;
  readonly #rank: number;
  #attention: Log<{ step: number } & AttentionStatistics> | null = null;
  #samples: Log<{ step: number; text: string }> | null = null;
  readonly #tensorboard: Log<TensorboardEvent> | null = null;
  /** All but the section, which is not worth waiting for. */
  readonly #logs: Pick<Log<unknown>, 'drops' | 'flush' | 'close'>[];

  /** Rows after `resumedFrom` are removed: the resumed run writes them again. `logThread` does the writing. */
  constructor(
    paths: RunPaths,
    config: Config,
    { rank, size }: { readonly rank: number; readonly size: number },
    resumedFrom: number,
    logThread: LogThread,
  ) {
    this.#logThread = logThread;
    this.#paths = paths;
    this.#rank = rank;
    this.#section = openSection(paths.section(rank), rank, { logThread });
    this.#heartbeat = openHeartbeats(paths.heartbeat(rank), rank, { logThread, world: size });
    this.#logs = [this.#heartbeat];
    if (rank !== 0) return;
    if (config.runtime.csv_logs) {
      const options = { logThread, keepThrough: resumedFrom };
      this.#training = openCsv(paths.training, TRAINING_CSV, options);
      this.#val = openCsv(paths.val, VAL_CSV, options);
      this.#kStats = openCsv(paths.kStats, K_STATS_CSV, options);
      this.#counters = openCsv(paths.fallbackCounters, FALLBACK_COUNTERS_CSV, options);
      this.#logs.push(this.#training, this.#val, this.#kStats, this.#counters);
    }
    if (config.runtime.tb) {
      this.#tensorboard = openTensorboard(paths.tensorboard, { logThread, resumedFromStep: resumedFrom });
      this.#logs.push(this.#tensorboard);
    }
  }

  /** Records that were dropped because the file system failed or hung. */
  get drops(): number {
    return this.#logs.reduce((total, { drops }) => total + drops, 0);
  }

  /** At the end of a run: dropped records, and those that a hung file system still holds up. */
  get lost(): number {
    return this.drops + this.#logThread.stuck;
  }

  /** What the rank does now. */
  get position(): { readonly section: SectionName; readonly step: number } {
    return this.#position;
  }

  /** Records what the rank does from now on, for watchdogs. */
  enter(section: SectionName, step: number): void {
    this.#position = { section, step };
    this.#section.write({ section, step });
  }

  /** Records that the rank waits for others, and that it continues. */
  wait(isWaiting: boolean): void {
    const { section, step } = this.#position;
    this.#section.write({ section: isWaiting ? 'wait' : section, step });
  }

  /** A heartbeat besides those of steps: start, checkpoint, halt and the like. */
  writeEvent(fields: HeartbeatFields): void {
    this.#heartbeat.write(fields);
  }

  /** The heartbeat of a step: every step has one. Rank 0 also records the attention by layer, where that was observed. */
  writeStep(record: StepRecord): void {
    const { gates, selection, sparseStart, attention } = record;
    this.#heartbeat.write({
      step: record.step,
      msg: 'progress',
      loss: record.loss,
      toks_per_s: record.tokensPerSecond,
      dt_fetch_s: record.fetchSeconds,
      fetch_p50_ms: record.fetchP50Ms,
      fetch_p95_ms: record.fetchP95Ms,
      grad_norm: record.gradientNorm,
      ...(gates && {
        gate_entropy_mean: gates.entropyMean,
        gate_entropy_min: gates.entropyMin,
        gate_max_gate: gates.max,
        gate_max_gate_mean: gates.maxMean,
        gate_collapse_frac: gates.collapseFraction,
        gate_branch_shares: [...gates.shares],
      }),
      ...(selection && {
        sel_k_mean: selection.mean,
        sel_k_max: selection.max,
        sel_pct_at_max: selection.percentAtMax,
      }),
      ...(sparseStart && { n_sel: sparseStart.nSel, gate_released: sparseStart.releasedShare }),
      ...Object.fromEntries(Object.entries(record.counters).map(([name, count]) => [`fb_${name}`, count])),
      gpu_mem_alloc: record.memoryMib.allocated,
      gpu_mem_reserved: record.memoryMib.reserved,
      ...(record.mfu === null ? {} : { mfu: record.mfu }),
      ...(record.loader && { docs_seen: record.loader.documents, queue_fill: record.loader.queueFill }),
      data: record.data,
    });
    if (attention === null || this.#rank !== 0) return;
    this.#attention ??= this.#open(this.#paths.attention);
    this.#attention.write({ step: record.step, ...attention });
  }

  /** A line of samples.jsonl: text that the model wrote after a step. */
  writeSample(step: number, text: string): void {
    this.#samples ??= this.#open(this.#paths.samples);
    this.#samples.write({ step, text });
  }

  /** Opens a file that only some runs have. */
  #open(path: string): Log<{ step: number }> {
    const log = openJsonLines(path, { logThread: this.#logThread });
    this.#logs.push(log);
    return log;
  }

  /** CSV rows and TensorBoard events of a logged step (train.log_every). */
  writeRow(record: StepRecord): void {
    const { step, loss, learningRate, tokensPerSecond, gates, selection, sparseStart, counters } = record;
    this.#training?.write({ step, loss, lr: learningRate, toks_per_s: tokensPerSecond });
    if (selection) {
      const { mean, max, percentAtMax } = selection;
      this.#kStats?.write({ step, sel_k_mean: mean, sel_k_max: max, sel_pct_at_max: percentAtMax });
    }
    for (const [counter, count] of Object.entries(counters)) this.#counters?.write({ step, counter, count });
    this.#tensorboard?.write({
      step,
      scalars: {
        'train/loss': loss,
        'train/lr': learningRate,
        'train/toks_per_s': tokensPerSecond,
        'train/grad_norm': record.gradientNorm,
        ...(gates && {
          'gate/entropy_mean': gates.entropyMean,
          'gate/entropy_min': gates.entropyMin,
          'gate/max_gate_mean': gates.maxMean,
          'gate/max_gate': gates.max,
          'gate/collapse_frac': gates.collapseFraction,
          'gate/share_cmp': gates.shares[0],
          'gate/share_sel': gates.shares[1],
          'gate/share_win': gates.shares[2],
        }),
        ...(selection && {
          'sel/k_mean': selection.mean,
          'sel/k_max': selection.max,
          'sel/pct_at_max': selection.percentAtMax,
        }),
        ...(sparseStart && { 'sel/n_sel': sparseStart.nSel, 'gate/released': sparseStart.releasedShare }),
        'mem/allocated_mib': record.memoryMib.allocated,
        'mem/reserved_mib': record.memoryMib.reserved,
      },
    });
  }

  /** Row, TensorBoard events and heartbeat of an evaluation. */
  writeEvaluation(step: number, { loss, perplexity }: Evaluation): void {
    this.#val?.write({ step, val_loss: loss, ppl: perplexity });
    this.#tensorboard?.write({ step, scalars: { 'val/loss': loss, 'val/ppl': perplexity } });
    this.#heartbeat.write({ step, msg: 'eval', loss });
  }

  /** Before a checkpoint, whose rows must be on the disk first. False if the disk did not take them all. */
  flush(): boolean {
    return this.#logs.map((log) => log.flush()).every((isThere) => isThere);
  }

  close(): void {
    for (const log of this.#logs) log.close();
    this.#section.close();
  }
}

/** `step 0020 | loss 5.4321 | lr 3.00e-04 | toks/s 51234 | …`, the form that runbooks parse; `dropped` are log records. */
export function stepLine(record: StepRecord, dropped = 0): string {
  return [
    `step ${String(record.step).padStart(4, '0')}`,
    `loss ${record.loss.toFixed(4)}`,
    `lr ${exponent(record.learningRate)}`,
    `toks/s ${record.tokensPerSecond.toFixed(0)}`,
    ...(record.mfu === null ? [] : [`mfu ${(100 * record.mfu).toFixed(1)}%`]),
    `grad_norm ${record.gradientNorm.toFixed(2)}`,
    `fetch ${(1000 * record.fetchSeconds).toFixed(0)}ms`,
    `fetch_p50 ${record.fetchP50Ms.toFixed(0)}ms`,
    `fetch_p95 ${record.fetchP95Ms.toFixed(0)}ms`,
    ...sparseStartText(record.sparseStart),
    ...(dropped > 0 ? [`log_dropped ${dropped}`] : []),
  ].join(' | ');
}

/** The warning about a step whose loss or gradient norm was unusual. */
export function spikeLine({ step, loss, gradientNorm, spike, isSkipped }: TrainingStep): string {
  const scores = [spike!.loss, spike!.gradient].map((z) => `(z ${z.toFixed(1)})`);
  return (
    `spike at step ${step}: loss ${loss.toFixed(4)} ${scores[0]}, gradient norm ${gradientNorm.toFixed(3)} ${scores[1]}` +
    (isSkipped ? '; update skipped' : '')
  );
}

/** runtime.debug_compare: how far the kernels are from the reference. */
export function comparisonLine({ step, result }: TrainingStep): string {
  return `compare ${step} | largest distance from the reference ${Math.max(...result.comparisons).toExponential(2)}`;
}

/** runtime.debug_timing: how a step's time was spent. */
export function timingLine({ step, fetchSeconds, gradientsMs, updateMs }: TrainingStep): string {
  const [fetch, gradients, update] = [1000 * fetchSeconds, gradientsMs, updateMs].map((ms) => `${ms.toFixed(1)}ms`);
  return `timing ${step} | fetch ${fetch} | gradients ${gradients} | update ${update}`;
}

function sparseStartText(state: SparseStartState | null): string[] {
  return state ? [`n_sel ${state.nSel}`, `gate_released ${(100 * state.releasedShare).toFixed(1)}%`] : [];
}

/** 3.00e-04: two digits of exponent, as C prints it. */
function exponent(value: number): string {
  return value.toExponential(2).replace(/e([+-])(\d)$/, 'e$10$2');
}

/** h:mm:ss or m:ss. */
export function duration(seconds: number): string {
  if (!Number.isFinite(seconds)) return '?';
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  const two = (value: number) => String(value).padStart(2, '0');
  return hours > 0 ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

const BAR_WIDTH = 24;

/** The live line of a run. */
export function progressText(
  { step, loss, tokensPerSecond }: Pick<StepRecord, 'step' | 'loss' | 'tokensPerSecond'>,
  steps: number,
  secondsLeft: number,
): string {
  const filled = Math.round((BAR_WIDTH * step) / steps);
  const bar = `${'█'.repeat(filled)}${'░'.repeat(BAR_WIDTH - filled)}`;
  return `${bar} ${step}/${steps}  loss ${loss.toFixed(3)}  ${tokensPerSecond.toFixed(0)} tok/s  ${duration(secondsLeft)} left`;
}
