/**
 * Every number that a run reports about its steps, defined once. Heartbeats, CSV files, TensorBoard, the charts of the
 * dashboard, limits of the health rules and docs/reference/metrics.md are derived from this table: a new metric is one entry
 * here and the code that computes it. The order is that of the fields in a heartbeat and of the columns in a CSV file: an
 * entry with a new column goes after that of the file's last one. Only the line of a step in the terminal is a list of its
 * own: `LINE` in src/train/report.ts.
 *
 * Pages in a browser import this module too, so it uses nothing of Node.
 */

import { UsageError } from '../errors.js';

/** How the values of a CSV column are printed: `tenths` is for rates and times, which are never compared bit for bit. */
type NumberKind = 'integer' | 'float32' | 'tenths';
/** A column that files of an earlier version lack. Its cell is empty, and not read, where the value is not known. */
type LaterKind = `${NumberKind}?`;
export type ColumnKind = NumberKind | LaterKind | 'text';
export const isLater = (kind: ColumnKind): kind is LaterKind => kind.endsWith('?');
/** CSV files whose columns are metrics, as `RunPaths` names them. */
export type CsvFile = 'training' | 'val' | 'kStats';

/** A chart of the dashboard; the metrics name it. */
export interface ChartSpec {
  readonly page: 'run' | 'attention';
  readonly title: string;
  readonly unit?: string;
  readonly format: 'number' | 'short' | 'percent';
  /** Can be drawn on a logarithmic axis. Other charts begin at 0. */
  readonly log?: boolean;
}

/** In the order of the pages. */
export const CHARTS = {
  loss: { page: 'run', title: 'Loss', unit: 'nats per token', format: 'number', log: true },
  gradient: { page: 'run', title: 'Gradient norm', format: 'number', log: true },
  rate: { page: 'run', title: 'Learning rate', format: 'number', log: true },
  throughput: { page: 'run', title: 'Throughput', unit: 'tokens/s', format: 'short' },
  mfu: { page: 'run', title: 'MFU', unit: 'share of the peak', format: 'percent' },
  memory: { page: 'run', title: 'Memory', unit: 'MiB', format: 'short' },
  fetch: { page: 'run', title: 'Fetch time', unit: 'ms', format: 'number' },
  gates: { page: 'run', title: 'Gates', unit: 'share of each branch', format: 'percent' },
  entropy: { page: 'attention', title: 'Gate entropy', unit: 'nats, at most 1.10', format: 'number' },
  shares: { page: 'attention', title: 'Branch shares', format: 'percent' },
  collapse: { page: 'attention', title: 'Collapsed gates', unit: 'share of tokens and heads', format: 'percent' },
  blocks: { page: 'attention', title: 'Selected blocks', unit: 'per token and group', format: 'number' },
  sourceLoss: { page: 'run', title: 'Validation loss by source', unit: 'nats per token', format: 'number', log: true },
  sourceTokens: { page: 'run', title: 'Training tokens by source', format: 'short' },
  sourceEpochs: { page: 'run', title: 'Epochs by source', format: 'number' },
  scorer: { page: 'attention', title: 'Scorer loss', unit: 'nats', format: 'number', log: true },
} as const satisfies Readonly<Record<string, ChartSpec>>;
export type ChartName = keyof typeof CHARTS;

/** Where a number is shown besides heartbeats. */
interface Shown {
  /** Tag of TensorBoard. */
  readonly tag?: string;
  /** Its label by chart. */
  readonly chart?: Readonly<Partial<Record<ChartName, string>>>;
}

/** A warning when the newest value is too large. Rules that need more than that are functions of src/watch/rules.ts. */
export interface Limit {
  readonly rule: string;
  /** A number, or the name of a threshold that has a flag (src/watch/thresholds.ts). */
  readonly atLeast: number | string;
  /** Meaning and remedy. */
  readonly advice: string;
  /** Steps of a process before it is judged. */
  readonly after?: number;
}

export interface Metric extends Shown {
  /** One sentence. */
  readonly meaning: string;
  readonly unit?: string;
  /** The module that computes it. `#train` of trainer.ts, `#recordOf` of run.ts or observers.ts puts it into the record. */
  readonly source: string;
  /** false: heartbeats of steps leave it out. */
  readonly heartbeat?: false;
  /**
   * How its column is printed, by CSV file. `?` at the end of a kind: where the value is not known, the cell is empty;
   * without it the whole row is left out. A new column needs the `?`, since files of earlier runs lack it.
   */
  readonly csv?: Readonly<Partial<Record<CsvFile, ColumnKind>>>;
  /**
   * A number for each of several names that the run chooses: a field `PREFIX_NAME` of heartbeats. With a chart, also a row
   * `METRIC/NAME` of source_metrics.csv, a tag of TensorBoard and a curve for each name.
   */
  readonly named?: { readonly prefix: string; readonly tag?: string; readonly chart?: ChartName };
  /** The elements of a metric that is a list, by name. */
  readonly parts?: Readonly<Record<string, Shown>>;
  /** Health rules that judge it. */
  readonly rules?: readonly string[];
  readonly limit?: Limit;
  /** Rules ignore heartbeats that have this other metric: the schedule it reports closes the gates on purpose. */
  readonly pausedBy?: string;
}

const STEP = 'src/train/step.ts';
const TRAINER = 'src/train/trainer.ts';
const OBSERVERS = 'src/train/observers.ts';
const RUN = 'src/train/run.ts';
const REPORT = 'src/train/report.ts';
const SCHEDULE = 'src/model/sparse-start.ts';
const EVALUATE = 'src/train/evaluate.ts';
const MIXTURE = 'src/data/pipeline/mixture.ts';

export const METRICS = {
  loss: {
    meaning: 'Mean loss per target, over all micro-batches of all ranks.',
    unit: 'nats',
    source: STEP,
    csv: { training: 'float32' },
    tag: 'train/loss',
    chart: { loss: 'training' },
    rules: ['loss', 'loss_flatline'],
  },
  lr: {
    meaning: 'Learning rate of the step.',
    source: TRAINER,
    heartbeat: false,
    csv: { training: 'float32' },
    tag: 'train/lr',
    chart: { rate: 'rate' },
  },
  toks_per_s: {
    meaning: 'Tokens of all ranks per second, fetching included.',
    unit: 'tokens/s',
    source: TRAINER,
    csv: { training: 'tenths' },
    tag: 'train/toks_per_s',
    chart: { throughput: 'tokens/s' },
    rules: ['throughput', 'flatline'],
  },
  dt_fetch_s: {
    meaning: 'Wait for the batches of the step.',
    unit: 's',
    source: TRAINER,
    rules: ['fetch', 'fetch_stall'],
  },
  save_pause_s: {
    meaning:
      'Wait for a checkpoint between the step before and this one: for its copy (train.async_save), or until it is written.',
    unit: 's',
    source: RUN,
  },
  fetch_p50_ms: {
    meaning: 'Median of the newest 256 waits, without the first 8 of a process.',
    unit: 'ms',
    source: REPORT,
    chart: { fetch: 'p50' },
  },
  fetch_p95_ms: {
    meaning: '95th percentile of the newest 256 waits, without the first 8 of a process.',
    unit: 'ms',
    source: REPORT,
    chart: { fetch: 'p95' },
    limit: {
      rule: 'fetch_p95',
      atLeast: 'fetchP95',
      after: 32,
      advice: 'Some fetches are slow. Add data.workers, or prepare the data with trefoil data prepare.',
    },
  },
  grad_norm: {
    meaning: 'Norm of all gradients before clipping.',
    source: STEP,
    tag: 'train/grad_norm',
    chart: { gradient: 'norm' },
    rules: ['grad_zero', 'grad_spike', 'gradients'],
  },
  gate_entropy_mean: {
    meaning: 'Mean entropy of the gates, over layers, heads and tokens.',
    unit: 'nats',
    source: OBSERVERS,
    tag: 'gate/entropy_mean',
    chart: { entropy: 'mean' },
    rules: ['gate_entropy'],
    pausedBy: 'gate_released',
  },
  gate_entropy_min: {
    meaning: 'Smallest entropy of a gate.',
    unit: 'nats',
    source: OBSERVERS,
    tag: 'gate/entropy_min',
    chart: { entropy: 'smallest' },
  },
  gate_max_gate: { meaning: 'Largest gate of all layers, heads and tokens.', source: OBSERVERS, tag: 'gate/max_gate' },
  gate_max_gate_mean: {
    meaning: 'Mean of the largest of the three gates.',
    source: OBSERVERS,
    tag: 'gate/max_gate_mean',
    limit: {
      rule: 'gate_max',
      atLeast: 'gateMax',
      advice: 'The largest gate is close to 1 on average: one branch dominates.',
    },
    pausedBy: 'gate_released',
  },
  gate_collapse_frac: {
    meaning: 'Share of the gates that have collapsed onto one branch.',
    source: OBSERVERS,
    tag: 'gate/collapse_frac',
    chart: { collapse: 'collapsed' },
    rules: ['gate_collapse'],
    pausedBy: 'gate_released',
  },
  gate_branch_shares: {
    meaning: 'Mean gate of the compressed, the selected and the window branch.',
    source: OBSERVERS,
    parts: {
      share_cmp: { tag: 'gate/share_cmp', chart: { gates: 'compressed', shares: 'compressed' } },
      share_sel: { tag: 'gate/share_sel', chart: { gates: 'selected', shares: 'selected' } },
      share_win: { tag: 'gate/share_win', chart: { gates: 'window', shares: 'window' } },
    },
  },
  sel_k_mean: {
    meaning: 'Blocks that a token selects, on average over tokens and groups.',
    unit: 'blocks',
    source: OBSERVERS,
    csv: { kStats: 'float32' },
    tag: 'sel/k_mean',
    chart: { blocks: 'mean' },
    rules: ['selection'],
  },
  sel_k_max: {
    meaning: 'Most blocks that a token selects.',
    unit: 'blocks',
    source: OBSERVERS,
    csv: { kStats: 'integer' },
    tag: 'sel/k_max',
  },
  sel_pct_at_max: {
    meaning: 'Share of tokens and groups that select that many.',
    unit: '%',
    source: OBSERVERS,
    csv: { kStats: 'float32' },
    tag: 'sel/pct_at_max',
  },
  scorer_loss: {
    meaning:
      'Distance of the importance of chosen blocks from the attention they got (train.scorer_loss), mean of layers.',
    unit: 'nats',
    source: OBSERVERS,
    tag: 'sel/scorer_loss',
    chart: { scorer: 'mean of layers' },
  },
  n_sel: {
    meaning: 'Blocks that a token may select, while the schedule from dense to sparse attention lasts.',
    unit: 'blocks',
    source: SCHEDULE,
    tag: 'sel/n_sel',
  },
  gate_released: {
    meaning: 'Weight that this schedule has given to the compressed and the window branch.',
    source: SCHEDULE,
    tag: 'gate/released',
  },
  counters: {
    meaning: 'Counters of events, each in a field `fb_NAME`.',
    source: RUN,
    named: { prefix: 'fb_' },
  },
  gpu_mem_alloc: {
    meaning: 'Memory of the tensors that are on the device after the step.',
    unit: 'MiB',
    source: RUN,
    tag: 'mem/allocated_mib',
    chart: { memory: 'allocated' },
  },
  gpu_mem_peak: {
    meaning: 'Peak of the memory of all tensors on the device, since the start of the process.',
    unit: 'MiB',
    source: RUN,
    tag: 'mem/peak_mib',
    chart: { memory: 'peak' },
  },
  gpu_mem_reserved: {
    meaning: 'Memory that the pools of the device hold.',
    unit: 'MiB',
    source: RUN,
    tag: 'mem/reserved_mib',
    chart: { memory: 'reserved' },
    rules: ['memory'],
  },
  host_mem_rss: { meaning: 'Memory of the process on the host, every second.', unit: 'MiB', source: REPORT },
  host_mem_free: {
    meaning: 'Memory of the host (or of its control group) that is left for the process, every second.',
    unit: 'MiB',
    source: REPORT,
  },
  mfu: { meaning: 'Useful arithmetic, as a share of the peak of the device.', source: REPORT, chart: { mfu: 'mfu' } },
  docs_seen: { meaning: 'Documents that a loader which reads ahead has read in this process.', source: RUN },
  queue_fill: { meaning: 'Batches that it holds ready.', source: RUN },
  own: {
    meaning:
      'Numbers that a program logs (`trainer.log`, results of `onStep`), each in a field `own_NAME`, with the tag `own/NAME`, ' +
      'in rows of own_metrics.csv and as a chart of its own.',
    source: TRAINER,
    named: { prefix: 'own_', tag: 'own/' },
  },
  source_tokens: {
    meaning:
      'Training tokens taken from each source of a mixture (data.sources): fields `source_tokens_NAME`, tags ' +
      '`source/tokens/NAME` and rows of source_metrics.csv.',
    unit: 'tokens',
    source: MIXTURE,
    named: { prefix: 'source_tokens_', tag: 'source/tokens/', chart: 'sourceTokens' },
  },
  source_epoch: {
    meaning: 'Passes over each source of a mixture, in the same files.',
    unit: 'epochs',
    source: MIXTURE,
    named: { prefix: 'source_epoch_', tag: 'source/epoch/', chart: 'sourceEpochs' },
  },
  val_loss: {
    meaning: 'Mean loss per target on validation data, also in the heartbeat of an evaluation.',
    unit: 'nats',
    source: EVALUATE,
    heartbeat: false,
    csv: { val: 'float32' },
    tag: 'val/loss',
    chart: { loss: 'validation' },
  },
  ppl: {
    meaning: 'Perplexity on validation data, also in the heartbeat of an evaluation.',
    source: EVALUATE,
    heartbeat: false,
    csv: { val: 'float32' },
    tag: 'val/ppl',
  },
  source_val_loss: {
    meaning:
      'Mean loss per target on the validation data of each source of a mixture, in the heartbeat of an evaluation and in ' +
      'the same files; `val_loss` is their mean by weight.',
    unit: 'nats',
    source: EVALUATE,
    named: { prefix: 'source_val_loss_', tag: 'source/val_loss/', chart: 'sourceLoss' },
  },
} as const satisfies Readonly<Record<string, Metric>>;

interface Counter {
  readonly meaning: string;
  readonly source: string;
  /** Whether it grows in a healthy run. All others count failures and fallbacks, and should stay near 0. */
  readonly isUsual?: true;
}

const KERNELS = { source: 'src/ops/attention/counters.ts', isUsual: true } as const;

/** Counters of a run in the metric `counters`. Readers accept others too. */
export const COUNTERS: Readonly<Record<string, Counter>> = {
  save_failed: { meaning: 'Checkpoints that could not be saved.', source: RUN },
  spike: { meaning: 'Steps whose loss or gradient norm was unusual.', source: TRAINER, isUsual: true },
  update_skipped: { meaning: 'Updates left out because of a spike.', source: TRAINER, isUsual: true },
  attention_union: { meaning: 'Calls whose selected branch ran by tile-union.', ...KERNELS },
  attention_outer: { meaning: 'Calls whose selected branch ran by KV-outer.', ...KERNELS },
  attention_gather: { meaning: 'Calls whose selected branch ran by tile-gather.', ...KERNELS },
  attention_portable: { meaning: 'Calls that the fused kernels do not support.', source: KERNELS.source },
  log_dropped: { meaning: 'Log records that were dropped; absent at 0.', source: RUN },
};

/** The name of a metric. */
export type MetricName = keyof typeof METRICS;

/** Metrics that are numbers by names of the run's choice. */
export type NamedMetric = {
  [Name in MetricName]: (typeof METRICS)[Name] extends { readonly named: unknown } ? Name : never;
}[MetricName];

/** Numbers of a program's own, by name. */
export type OwnMetrics = Readonly<Record<string, number>>;

const OWN_NAME = /^[A-Za-z][\w.-]{0,63}$/;

/** Throws unless every value is a number under a name that all files can hold. */
export function expectOwnMetrics(where: string, values: OwnMetrics): void {
  for (const [name, value] of Object.entries(values)) {
    if (!OWN_NAME.test(name))
      throw new UsageError(
        `${where}: ${JSON.stringify(name)} is not the name of a metric: use up to 64 letters, digits, _, . and -, and a letter first`,
      );
    if (typeof value !== 'number') throw new UsageError(`${where}: ${name} must be a number, not ${typeof value}`);
  }
}

/** The metrics of a step or of an evaluation, as far as they are known: counts by name, lists, and numbers. */
export type RunMetrics = {
  readonly [Name in keyof typeof METRICS]?: (typeof METRICS)[Name] extends { readonly named: unknown }
    ? Readonly<Record<string, number>>
    : (typeof METRICS)[Name] extends { readonly parts: unknown }
      ? readonly number[]
      : number;
};

/** The table without its literal types. */
export const METRIC_ENTRIES = Object.entries(METRICS) as readonly (readonly [MetricName, Metric])[];

/** A single number: a metric, or a part of one that is a list. */
export interface Scalar extends Shown {
  readonly name: string;
  readonly metric: MetricName;
  /** Its place in the list. */
  readonly part?: number;
  /** The log that has it: heartbeats, or a CSV file. */
  readonly log: 'heartbeat' | CsvFile;
}

export const SCALARS: readonly Scalar[] = METRIC_ENTRIES.flatMap(
  ([metric, { parts, named, heartbeat, csv, tag, chart }]) => {
    if (named) return [];
    const log = heartbeat === false ? (Object.keys(csv ?? {})[0] as CsvFile) : 'heartbeat';
    if (!parts) return [{ name: metric, metric, log, tag, chart } as Scalar];
    return Object.entries(parts).map(([name, shown], part) => ({ name, metric, part, log, ...shown }));
  },
);

/** The metrics by source of a mixture that are known, as `[metric, its tag, values by source]`. */
export function bySource(metrics: RunMetrics): [MetricName, string, Readonly<Record<string, number>>][] {
  return METRIC_ENTRIES.flatMap(([name, { named }]): [MetricName, string, Readonly<Record<string, number>>][] => {
    const values =
      named?.chart === undefined ? undefined : (metrics[name] as Readonly<Record<string, number>> | undefined);
    return values === undefined ? [] : [[name, named!.tag!, values]];
  });
}

/** A number in a record of metrics or in a heartbeat. Files may hold anything in its place. */
export function scalarIn(record: Readonly<Record<string, unknown>>, { metric, part }: Scalar): unknown {
  const value = record[metric];
  return part === undefined ? value : Array.isArray(value) ? value[part] : undefined;
}
