/** What a run writes about its steps: CSV files, heartbeats, TensorBoard events. Lines for a person are in report.ts. */
import type { Config } from '../config/schema.js';
import type { LoaderTelemetry } from '../data/loader.js';
import type { SparseStartState } from '../model/sparse-start.js';
import type { GateStatistics } from '../ops/attention/gate/op.js';
import type { SelectionStatistics } from '../ops/attention/selection-counts/op.js';
import { type CsvRow, FALLBACK_COUNTERS_CSV, K_STATS_CSV, TRAINING_CSV, VAL_CSV } from '../run/logs/csv.js';
import type { HeartbeatFields, SectionName } from '../run/logs/heartbeat.js';
import { type Log, openCsv, openHeartbeats, openJsonLines, openSection, openTensorboard } from '../run/logs/log.js';
import type { LogThread } from '../run/logs/log-thread.js';
import type { TensorboardEvent } from '../run/logs/tensorboard.js';
import type { RunPaths } from '../run/paths.js';
import type { Evaluation } from './evaluate.js';
import type { AttentionStatistics } from './observers.js';

/** The facts of one optimizer step, as a run records them. */
export interface StepRecord {
  readonly step: number;
  /** Mean loss per target in nats, over all ranks. */
  readonly loss: number;
  readonly learningRate: number;
  readonly tokensPerSecond: number;
  /** Before clipping. */
  readonly gradientNorm: number;
  readonly fetchSeconds: number;
  readonly fetchP50Ms: number;
  readonly fetchP95Ms: number;
  readonly mfu: number | null;
  readonly gates: GateStatistics | null;
  readonly selection: SelectionStatistics | null;
  /** By layer; null for dense attention and in most steps. */
  readonly attention: AttentionStatistics | null;
  /** The schedule from dense to sparse attention; null without one. */
  readonly sparseStart: SparseStartState | null;
  readonly memoryMib: { readonly allocated: number; readonly reserved: number };
  /** Counters of failures, fallbacks and attention kernels since the start, by name. */
  readonly counters: Readonly<Record<string, number>>;
  /** The source of the batch: `synthetic` if that replaces a source that failed. */
  readonly data: string;
  /** State of a loader that reads ahead. */
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
