/** All that a run writes about itself while it goes: CSV files, heartbeats, TensorBoard events. */
import type { Config } from '../config/schema.js';
import type { LoaderTelemetry } from '../data/loader.js';
import type { GateStatistics } from '../ops/attention/gate/op.js';
import type { SelectionStatistics } from '../ops/attention/selection-counts/op.js';
import { CsvWriter, FALLBACK_COUNTERS_CSV, K_STATS_CSV, TRAINING_CSV, VAL_CSV } from '../run/csv.js';
import { type HeartbeatFields, HeartbeatWriter } from '../run/heartbeat.js';
import type { LogThread } from '../run/logs/log-thread.js';
import type { RunPaths } from '../run/run-paths.js';
import { type SectionName, SectionWriter } from '../run/section.js';
import { TensorboardWriter } from '../run/tensorboard.js';
import type { Evaluation } from './evaluate.js';

export interface StepRecord {
  readonly step: number;
  readonly loss: number;
  readonly learningRate: number;
  readonly tokensPerSecond: number;
  readonly gradientNorm: number;
  readonly fetchSeconds: number;
  readonly fetchP50Ms: number;
  readonly fetchP95Ms: number;
  readonly mfu: number | null;
  readonly gates: GateStatistics | null;
  readonly selection: SelectionStatistics | null;
  readonly memoryMib: { readonly allocated: number; readonly reserved: number };
  /** How often something slower or else stood in for what was asked, by name. */
  readonly counters: Readonly<Record<string, number>>;
  readonly data: string;
  /** Of a loader that reads ahead. */
  readonly loader?: LoaderTelemetry | undefined;
}

/** A completed evaluation. */
export interface EvaluationRecord extends Evaluation {
  readonly step: number;
}

/** An attempt to save a checkpoint. */
export interface CheckpointRecord {
  readonly step: number;
  /** The checkpoint's folder; null if the disk did not take it, in which case training continues. */
  readonly path: string | null;
}

export class RunRecords {
  readonly #logThread: LogThread;
  readonly #heartbeat: HeartbeatWriter;
  readonly #section: SectionWriter;
  readonly #training: CsvWriter<typeof TRAINING_CSV> | null = null;
  readonly #val: CsvWriter<typeof VAL_CSV> | null = null;
  readonly #kStats: CsvWriter<typeof K_STATS_CSV> | null = null;
  readonly #counters: CsvWriter<typeof FALLBACK_COUNTERS_CSV> | null = null;
  readonly #tensorboard: TensorboardWriter | null = null;
  readonly #writers: { flush(): boolean; close(): void; readonly drops: number }[];

  /** Rows after `resumedFrom` are removed: the resumed run writes them again. `logThread` does the writing. */
  constructor(
    paths: RunPaths,
    config: Config,
    { rank, world }: { readonly rank: number; readonly world: number },
    resumedFrom: number | null,
    logThread: LogThread,
  ) {
    this.#logThread = logThread;
    this.#section = new SectionWriter(paths.section(rank), rank, { logThread });
    this.#heartbeat = new HeartbeatWriter(paths.heartbeat(rank), rank, { logThread, world });
    this.#writers = [this.#heartbeat];
    if (rank !== 0) return;
    if (config.runtime.csv_logs) {
      const options = { logThread, keepThrough: resumedFrom ?? 0 };
      this.#training = new CsvWriter(paths.training, TRAINING_CSV, options);
      this.#val = new CsvWriter(paths.val, VAL_CSV, options);
      this.#kStats = new CsvWriter(paths.kStats, K_STATS_CSV, options);
      this.#counters = new CsvWriter(paths.fallbackCounters, FALLBACK_COUNTERS_CSV, options);
      this.#writers.push(this.#training, this.#val, this.#kStats, this.#counters);
    }
    if (config.runtime.tb) {
      const resumed = resumedFrom === null ? {} : { resumedFromStep: resumedFrom };
      this.#tensorboard = new TensorboardWriter(paths.tensorboard, { logThread, ...resumed });
      this.#writers.push(this.#tensorboard);
    }
  }

  /** Records that were dropped because the file system failed or hung. */
  get drops(): number {
    return this.#writers.reduce((total, { drops }) => total + drops, 0);
  }

  /** At the end of a run: dropped records, and those that a hung file system still holds up. */
  get lost(): number {
    return this.drops + this.#logThread.stuck;
  }

  /** Records what the rank does from now on, for watchdogs. */
  enter(section: SectionName, step: number): void {
    this.#section.enter(section, step);
  }

  event(fields: HeartbeatFields): void {
    this.#heartbeat.write(fields);
  }

  /** A heartbeat for every step. */
  progress(record: StepRecord): void {
    const { gates, selection } = record;
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
      ...Object.fromEntries(Object.entries(record.counters).map(([name, count]) => [`fb_${name}`, count])),
      gpu_mem_alloc: record.memoryMib.allocated,
      gpu_mem_reserved: record.memoryMib.reserved,
      ...(record.mfu === null ? {} : { mfu: record.mfu }),
      ...(record.loader && { docs_seen: record.loader.documents, queue_fill: record.loader.queueFill }),
      data: record.data,
    });
  }

  /** Rows and events for the steps that are logged. */
  logged(record: StepRecord): void {
    const { step, loss, learningRate, tokensPerSecond, gates, selection, counters } = record;
    this.#training?.append({ step, loss, lr: learningRate, toks_per_s: tokensPerSecond });
    if (selection) {
      const { mean, max, percentAtMax } = selection;
      this.#kStats?.append({ step, sel_k_mean: mean, sel_k_max: max, sel_pct_at_max: percentAtMax });
    }
    for (const [counter, count] of Object.entries(counters)) this.#counters?.append({ step, counter, count });
    this.#tensorboard?.scalars(step, {
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
      'mem/allocated_mib': record.memoryMib.allocated,
      'mem/reserved_mib': record.memoryMib.reserved,
    });
  }

  evaluated(step: number, { loss, perplexity }: Evaluation): void {
    this.#val?.append({ step, val_loss: loss, ppl: perplexity });
    this.#tensorboard?.scalars(step, { 'val/loss': loss, 'val/ppl': perplexity });
    this.#heartbeat.write({ step, msg: 'eval', loss });
  }

  /** Before a checkpoint, whose rows must be on the disk first. False if the disk did not take them all. */
  flush(): boolean {
    return this.#writers.map((writer) => writer.flush()).every((isThere) => isThere);
  }

  /** Waits for the log thread, but not for a file system that hangs. */
  close(): void {
    for (const writer of this.#writers) writer.close();
    this.#section.close();
    this.#logThread.close();
  }
}
