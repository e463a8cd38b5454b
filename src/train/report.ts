/**
 * Reports of a run: log files for programs (`RunRecords`), lines for a person (`RankLogger`), and the measures in both
 * that need more than one step (`StepMeter`).
 */
import { freemem } from 'node:os';
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { LiveLine } from '../live-line.js';
import { trainingFlops } from '../model/flops.js';
import type { LanguageModel } from '../model/language-model.js';
import {
  type CsvRow,
  type CsvSchema,
  FALLBACK_COUNTERS_CSV,
  K_STATS_CSV,
  OWN_METRICS_CSV,
  SOURCE_METRICS_CSV,
  TRAINING_CSV,
  VAL_CSV,
} from '../run/logs/csv.js';
import { type HeartbeatFields, heartbeatMetrics, type SectionName } from '../run/logs/heartbeat.js';
import { type Log, openCsv, openHeartbeats, openJsonLines, openSection, openTensorboard } from '../run/logs/log.js';
import type { LogThread } from '../run/logs/log-thread.js';
import type { TensorboardEvent } from '../run/logs/tensorboard.js';
import {
  bySource,
  isLater,
  type MetricName,
  type OwnMetrics,
  type RunMetrics,
  SCALARS,
  scalarIn,
} from '../run/metrics.js';
import type { RunPaths } from '../run/paths.js';
import type { Evaluation } from './evaluation.js';
import type { AttentionStatistics } from './observers.js';
import type { TrainOptions } from './options.js';
import type { World } from './ranks/world.js';
import type { TrainingStep } from './trainer.js';

/**
 * Prints lines. Rank 0 prints what concerns the whole run, and keeps it in run.log; other ranks only warn about
 * themselves.
 */
export class RankLogger {
  /** The progress line, on the terminal of rank 0. Every other line removes it first. */
  readonly live: LiveLine | null;
  readonly #say: (line: string) => void;
  readonly #warn: (line: string) => void;
  readonly #rank: number;
  /** Lines that wait for `keep`, then the file. */
  #kept: string[] | Log<string> = [];

  constructor({ say = () => {}, warn = warnOnStderr, terminal }: TrainOptions, { rank }: Pick<World, 'rank'>) {
    this.live = rank === 0 && terminal?.isTTY ? new LiveLine(terminal) : null;
    this.#say = say;
    this.#warn = warn;
    this.#rank = rank;
  }

  /** Writes all lines, also those so far, to a file, until it is closed. */
  keep(log: Log<string>): () => void {
    for (const line of this.#kept as string[]) log.write(line);
    this.#kept = log;
    return () => {
      this.#kept = [];
      log.close();
    };
  }

  readonly say = (line: string): void => {
    this.live?.clear();
    if (this.#rank !== 0) return;
    this.#write(line);
    this.#say(line);
  };

  readonly warn = (line: string): void => {
    this.live?.clear();
    if (this.#rank !== 0) return;
    this.#write(`warning: ${line}`);
    this.#warn(line);
  };

  /** A warning about this rank, with its number unless it is rank 0. */
  readonly warnOwn = (line: string): void => {
    if (this.#rank === 0) this.warn(line);
    else this.#warn(`rank ${this.#rank}: ${line}`);
  };

  #write(line: string): void {
    if (Array.isArray(this.#kept)) this.#kept.push(line);
    else this.#kept.write(line);
  }
}

function warnOnStderr(line: string): void {
  console.warn(`warning: ${line}`);
}

/** Fetches that the percentiles cover. */
const RECENT_FETCHES = 256;

/** Fetches that open files and fill caches; the percentiles leave them out as soon as there are others. */
const FIRST_FETCHES = 8;

const MEMORY_MS = 1000;

/** Weight of the newest step in the estimate of the time left. */
const SMOOTHING = 0.1;

/** Measures over several steps: percentiles of fetch times, the share of the peak, the time left. */
export class StepMeter {
  readonly #model: Pick<LanguageModel, 'shape'>;
  /** Seconds. */
  readonly #recentFetches: number[] = [];
  #peakFlops: number | null;
  #steps = 0;
  #memory: RunMetrics = {};
  #memoryAt = Number.NEGATIVE_INFINITY;
  /** Null until the second step. */
  #secondsPerStep: number | null = null;

  /** `peakFlops`: of the device, in FLOP/s; null if unknown. */
  constructor(model: Pick<LanguageModel, 'shape'>, peakFlops: number | null) {
    this.#model = model;
    this.#peakFlops = peakFlops;
  }

  add(step: TrainingStep): RunMetrics {
    const seconds = step.tokens / step.tokensPerSecond;
    if (this.#steps++ === FIRST_FETCHES) this.#recentFetches.length = 0;
    this.#recentFetches.push(step.fetchSeconds);
    if (this.#recentFetches.length > RECENT_FETCHES) this.#recentFetches.shift();
    // The first step of a process compiles kernels, so it does not count.
    if (this.#steps > 1)
      this.#secondsPerStep = seconds * SMOOTHING + (this.#secondsPerStep ?? seconds) * (1 - SMOOTHING);
    const sorted = [...this.#recentFetches].sort((a, b) => a - b);
    const percentileMs = (share: number) => 1000 * sorted[Math.floor(share * sorted.length)];
    const mfu = this.#mfu(step.batches, seconds);
    return {
      fetch_p50_ms: percentileMs(0.5),
      fetch_p95_ms: percentileMs(0.95),
      ...this.#hostMemory(),
      ...(mfu !== null && { mfu }),
    };
  }

  /** Looked up every second: files of the system are read for it. */
  #hostMemory(): RunMetrics {
    const now = performance.now();
    if (now - this.#memoryAt >= MEMORY_MS) {
      this.#memoryAt = now;
      const mib = (bytes: number) => Math.round(bytes / 2 ** 20);
      const free = process.availableMemory?.() ?? freemem(); // Node 20.13 and later know control groups
      this.#memory = { host_mem_rss: mib(process.memoryUsage.rss()), host_mem_free: mib(free) };
    }
    return this.#memory;
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
  readonly #logThread: LogThread | null;
  readonly #heartbeat: Log<HeartbeatFields>;
  readonly #section: Log<{ section: SectionName; step: number }>;
  /** CSV files by their columns. */
  readonly #csv: (readonly [CsvSchema, Log<CsvRow<CsvSchema>>])[] = [];
  readonly #counters: Log<CsvRow<typeof FALLBACK_COUNTERS_CSV>> | null = null;
  readonly #paths: RunPaths;
  readonly #rank: number;
  readonly #resumedFrom: number;
  readonly #hasCsv: boolean;
  /** Opened by the first metric. */
  #own: Log<CsvRow<typeof OWN_METRICS_CSV>> | null = null;
  #sources: Log<CsvRow<typeof SOURCE_METRICS_CSV>> | null = null;
  #attention: Log<{ step: number } & AttentionStatistics> | null = null;
  #samples: Log<{ step: number; text: string }> | null = null;
  readonly #tensorboard: Log<TensorboardEvent> | null = null;
  /** All but the section, which is not worth waiting for. */
  readonly #logs: Pick<Log<unknown>, 'drops' | 'flush' | 'close'>[];

  /** Rows after `resumedFrom` are removed: the resumed run writes them again. `logThread` does the writing; with null this thread does. */
  constructor(
    paths: RunPaths,
    config: Config,
    { rank, size }: { readonly rank: number; readonly size: number },
    resumedFrom: number,
    thread: LogThread | null,
  ) {
    const logThread = thread ?? undefined;
    this.#logThread = thread;
    this.#paths = paths;
    this.#rank = rank;
    this.#resumedFrom = resumedFrom;
    this.#hasCsv = config.runtime.csv_logs && rank === 0;
    this.#section = openSection(paths.section(rank), rank, { logThread });
    this.#heartbeat = openHeartbeats(paths.heartbeat(rank), rank, { logThread, world: size });
    this.#logs = [this.#heartbeat];
    if (rank !== 0) return;
    if (config.runtime.csv_logs) {
      const options = { logThread, keepThrough: resumedFrom };
      const { training, val, kStats } = paths;
      for (const [path, schema] of [
        [training, TRAINING_CSV],
        [val, VAL_CSV],
        [kStats, K_STATS_CSV],
      ] as const)
        this.#csv.push([schema, openCsv(path, schema as CsvSchema, options)]);
      this.#counters = openCsv(paths.fallbackCounters, FALLBACK_COUNTERS_CSV, options);
      this.#logs.push(...this.#csv.map(([, log]) => log), this.#counters);
    }
    if (config.runtime.tensorboard) {
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
    return this.drops + (this.#logThread?.stuck ?? 0);
  }

  /** The current section and step of the rank. */
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
  writeStep({ step, metrics, data, result }: TrainingStep): void {
    this.#heartbeat.write({ step, msg: 'progress', ...heartbeatMetrics(metrics), data });
    if (metrics.own) this.#writeOwn(step, metrics.own);
    const { attention } = result;
    if (attention === null || this.#rank !== 0) return;
    this.#attention ??= this.#open(this.#paths.attention);
    this.#attention.write({ step, ...attention });
  }

  /** Metrics of the program's own, in every step that has some: a row of own_metrics.csv and a TensorBoard event for each. */
  #writeOwn(step: number, own: OwnMetrics): void {
    const values = Object.entries(own);
    if (values.length === 0) return;
    if (this.#hasCsv) {
      this.#own ??= this.#openCsv(this.#paths.ownMetrics, OWN_METRICS_CSV);
      for (const [metric, value] of values) this.#own.write({ step, metric, value });
    }
    this.#tensorboard?.write({
      step,
      scalars: Object.fromEntries(values.map(([name, value]) => [`own/${name}`, value])),
    });
  }

  /** Opens a CSV file that only some runs have. */
  #openCsv<Schema extends CsvSchema>(path: string, schema: Schema): Log<CsvRow<Schema>> {
    const options = { logThread: this.#logThread ?? undefined, keepThrough: this.#resumedFrom };
    const log = openCsv(path, schema, options);
    this.#logs.push(log);
    return log;
  }

  /** A line of samples.jsonl: text that the model wrote after a step. */
  writeSample(step: number, text: string): void {
    this.#samples ??= this.#open(this.#paths.samples);
    this.#samples.write({ step, text });
  }

  /** Opens a file that only some runs have. */
  #open(path: string): Log<{ step: number }> {
    const log = openJsonLines(path, { logThread: this.#logThread ?? undefined });
    this.#logs.push(log);
    return log;
  }

  /** CSV rows and TensorBoard events: of a logged step (train.log_every), or of an evaluation. */
  writeRow(step: number, metrics: RunMetrics): void {
    const values = { ...metrics, step } as Readonly<Record<string, unknown>>;
    for (const [schema, log] of this.#csv) {
      const columns = Object.entries(schema);
      // Dense attention has no columns of the selection, and evaluations have only those of val.csv.
      if (columns.some(([column, kind]) => values[column] === undefined && !isLater(kind))) continue;
      log.write(Object.fromEntries(columns.map(([column]) => [column, values[column]])) as CsvRow<CsvSchema>);
    }
    for (const [counter, count] of Object.entries(metrics.counters ?? {}))
      this.#counters?.write({ step, counter, count });
    const scalars = SCALARS.flatMap((scalar): [string, number][] => {
      const value = scalarIn(metrics, scalar);
      return scalar.tag === undefined || value === undefined ? [] : [[scalar.tag, value as number]];
    });
    for (const [metric, tag, values] of this.#rank === 0 ? bySource(metrics) : [])
      for (const [source, value] of Object.entries(values)) {
        scalars.push([tag + source, value]);
        if (!this.#hasCsv) continue;
        this.#sources ??= this.#openCsv(this.#paths.sourceMetrics, SOURCE_METRICS_CSV);
        this.#sources.write({ step, metric: `${metric}/${source}`, value });
      }
    this.#tensorboard?.write({ step, scalars: Object.fromEntries(scalars) });
  }

  /** Row, TensorBoard events and heartbeat of an evaluation. */
  writeEvaluation(step: number, { loss, perplexity, bySource: parts }: Evaluation): void {
    const metrics: RunMetrics = {
      val_loss: loss,
      ppl: perplexity,
      ...(parts && { source_val_loss: Object.fromEntries(parts.map((part) => [part.name, part.loss])) }),
    };
    this.writeRow(step, metrics);
    this.#heartbeat.write({ step, msg: 'eval', val_loss: loss, ppl: perplexity, ...heartbeatMetrics(metrics) });
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

/** Metrics in the line of a step. */
const LINE: readonly (readonly [MetricName, (value: number) => string])[] = [
  ['loss', (loss) => `loss ${loss.toFixed(4)}`],
  ['lr', (rate) => `lr ${exponent(rate)}`],
  ['toks_per_s', (rate) => `toks/s ${rate.toFixed(0)}`],
  ['mfu', (share) => `mfu ${(100 * share).toFixed(1)}%`],
  ['grad_norm', (norm) => `grad_norm ${norm.toFixed(2)}`],
  ['dt_fetch_s', (seconds) => `fetch ${(1000 * seconds).toFixed(0)}ms`],
  ['fetch_p50_ms', (ms) => `fetch_p50 ${ms.toFixed(0)}ms`],
  ['fetch_p95_ms', (ms) => `fetch_p95 ${ms.toFixed(0)}ms`],
  ['n_sel', (blocks) => `n_sel ${blocks}`],
  ['gate_released', (share) => `gate_released ${(100 * share).toFixed(1)}%`],
];

/**
 * `step 0020 | loss 5.4321 | lr 3.00e-04 | toks/s 51234 | …`, the form that runbooks parse. `isReplaced`: synthetic tokens
 * replace the data source.
 */
export function stepLine({ step, metrics }: Pick<TrainingStep, 'step' | 'metrics'>, isReplaced = false): string {
  const dropped = metrics.counters?.['log_dropped'];
  return [
    `step ${String(step).padStart(4, '0')}`,
    ...LINE.flatMap(([name, format]) => (metrics[name] === undefined ? [] : format(metrics[name] as number))),
    ...(dropped === undefined ? [] : [`log_dropped ${dropped}`]),
    ...(isReplaced ? ['SYNTHETIC data'] : []),
  ].join(' | ');
}

/** The warning about a step whose loss or gradient norm was unusual; the first one of a run says what to do. */
export function spikeLine({ step, loss, gradientNorm, spike, isSkipped, metrics }: TrainingStep): string {
  const isFirst = metrics.counters?.['spike'] === 1;
  const scores = [spike!.loss, spike!.gradient].map((z) => `(z ${z.toFixed(1)})`);
  return (
    `spike at step ${step}: loss ${loss.toFixed(4)} ${scores[0]}, gradient norm ${gradientNorm.toFixed(3)} ${scores[1]}` +
    (isSkipped ? '; update skipped' : '') +
    (isFirst ? ' (one spike needs nothing; if they repeat, lower train.lr or set train.spike_skip: true)' : '')
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
  { step, loss, tokensPerSecond }: Pick<TrainingStep, 'step' | 'loss' | 'tokensPerSecond'>,
  steps: number,
  secondsLeft: number,
): string {
  const filled = Math.round((BAR_WIDTH * step) / steps);
  const bar = `${'█'.repeat(filled)}${'░'.repeat(BAR_WIDTH - filled)}`;
  return `${bar} ${step}/${steps}  loss ${loss.toFixed(3)}  ${tokensPerSecond.toFixed(0)} tok/s  ${duration(secondsLeft)} left`;
}
