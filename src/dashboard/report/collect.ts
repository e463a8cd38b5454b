/** Collects the figures and series of a run for a report, from its files. */

import { readSavedConfig } from '../../config/load.js';
import { parseConfig } from '../../config/parse.js';
import type { Config } from '../../config/schema.js';
import { TrefoilError } from '../../errors.js';
import { readText, statOrUndefined } from '../../files.js';
import { mean, median, quantile } from '../../numbers.js';
import { readCsv, TRAINING_CSV, VAL_CSV } from '../../run/logs/csv.js';
import { countersIn, type Heartbeat, readHeartbeats } from '../../run/logs/heartbeat.js';
import { sampleHeartbeats } from '../../run/logs/heartbeat-history.js';
import { readJsonFile, readRun } from '../../run/reader.js';
import { wallAges } from '../../watch/ages.js';
import { runState, stateText } from '../../watch/state.js';
import { CONFIG_BYTES } from '../run-files.js';

/** Points (step, value) of the plots. */
export interface RunSeries {
  readonly loss: readonly (readonly [number, number])[];
  readonly val_loss: readonly (readonly [number, number])[];
  readonly toks_per_s: readonly (readonly [number, number])[];
  readonly gate_entropy: readonly (readonly [number, number])[];
  readonly gate_shares: readonly (readonly (readonly [number, number])[])[];
  readonly fetch_ms: readonly (readonly [number, number])[];
  readonly memory_mib: readonly (readonly [number, number])[];
}

export interface RunReport {
  readonly run: string;
  readonly dir: string;
  readonly state: string;
  /** Selection kernel, or `dense`. */
  readonly mode: string;
  readonly S: number | null;
  readonly batch: number | null;
  readonly step: number | null;
  readonly steps: number | null;
  readonly first_loss: number | null;
  readonly last_loss: number | null;
  readonly val_loss: number | null;
  readonly ms_step: number | null;
  readonly tokens_per_s: number | null;
  readonly mfu: number | null;
  /** Peak of what the pools held, and of the tensors alone. */
  readonly peak_mem_mib: number | null;
  readonly peak_tensors_mib: number | null;
  readonly fetch_p50_ms: number | null;
  readonly fetch_p95_ms: number | null;
  readonly gate_entropy_mean: number | null;
  readonly gate_collapse_frac: number | null;
  readonly gate_branch_shares: readonly number[] | null;
  readonly sel_k_mean: number | null;
  readonly counters: Readonly<Record<string, number>>;
  readonly metrics: Readonly<Record<string, unknown>> | null;
  readonly environment: Readonly<Record<string, unknown>> | null;
  readonly config: Config | null;
  /** Deviations from the plan: restarts, fallbacks, environment overrides. */
  readonly deviations: readonly string[];
  readonly series: RunSeries;
}

/** A larger heartbeat file is sampled. */
const WHOLE_BYTES = 64 * 2 ** 20;
const SAMPLES = 4000;
const POINTS = 400;
/** Steps that compile kernels and fill caches; not timed. */
const WARMUP_STEPS = 3;

export function collectRun(dir: string): RunReport {
  const view = readRun(dir);
  const { paths } = view;
  const beats = allBeats(paths.heartbeat(0));
  const steps = beats.filter(({ msg }) => msg === 'progress');
  const timed = steps.filter(({ step }) => step > WARMUP_STEPS || steps.length <= WARMUP_STEPS);
  const config = savedConfig(paths.config);
  const metrics = readJsonFile(paths.metrics) ?? null;
  const environment = readJsonFile(paths.env) ?? null;
  const training = readCsv(paths.training, TRAINING_CSV).rows;
  const val = readCsv(paths.val, VAL_CSV).rows;
  const last = steps.at(-1);
  const of = (name: keyof Heartbeat, from = timed) => from.flatMap((beat) => (beat[name] as number | undefined) ?? []);
  const rate = finite(median(of('toks_per_s')));
  const tokens = config && config.train.seq_len * config.train.batch_size * config.train.accumulate_grad_batches;
  const counters = last ? Object.fromEntries(countersIn(last)) : {};
  const state = runState(view, wallAges());
  return {
    run: view.name,
    dir: view.dir,
    state: stateText(state),
    mode: config === null ? 'unknown' : config.model.attention === 'dense' ? 'dense' : config.runtime.selection_kernel,
    S: config?.train.seq_len ?? null,
    batch: config ? config.train.batch_size * config.train.accumulate_grad_batches : null,
    step: beats.at(-1)?.step ?? null,
    steps: config?.train.steps ?? null,
    first_loss: training[0]?.loss ?? steps[0]?.loss ?? null,
    last_loss: training.at(-1)?.loss ?? last?.loss ?? null,
    val_loss: val.at(-1)?.val_loss ?? null,
    ms_step: rate !== null && tokens ? (1000 * tokens) / rate : null,
    tokens_per_s: rate,
    mfu: finite(median(of('mfu'))),
    peak_mem_mib: finite(quantile(of('gpu_mem_reserved', steps), 1)),
    peak_tensors_mib: finite(quantile(of('gpu_mem_peak', steps), 1)),
    fetch_p50_ms: finite(1000 * median(of('dt_fetch_s'))),
    fetch_p95_ms: finite(1000 * quantile(of('dt_fetch_s'), 0.95)),
    gate_entropy_mean: finite(mean(of('gate_entropy_mean').slice(-POINTS))),
    gate_collapse_frac: finite(mean(of('gate_collapse_frac').slice(-POINTS))),
    gate_branch_shares: last?.gate_branch_shares ?? null,
    sel_k_mean: finite(mean(of('sel_k_mean').slice(-POINTS))),
    counters,
    metrics,
    environment,
    config,
    deviations: deviationsOf({ beats, config, metrics, environment, counters }),
    series: { ...seriesOf(thin(steps), val), loss: lossOf(steps, training) },
  };
}

function allBeats(path: string): Heartbeat[] {
  const size = statOrUndefined(path)?.size ?? 0;
  return size <= WHOLE_BYTES ? [...readHeartbeats(path)] : sampleHeartbeats(path, 0, Number.POSITIVE_INFINITY, SAMPLES);
}

function savedConfig(path: string): Config | null {
  try {
    readText(path, { links: 'refused', limit: CONFIG_BYTES });
    return readSavedConfig(path);
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    return null; // missing, or from another version: listed in the deviations
  }
}

interface Facts {
  readonly beats: readonly Heartbeat[];
  readonly config: Config | null;
  readonly metrics: Readonly<Record<string, unknown>> | null;
  readonly environment: Readonly<Record<string, unknown>> | null;
  readonly counters: Readonly<Record<string, number>>;
}

function deviationsOf({ beats, config, metrics, environment, counters }: Facts): string[] {
  const git = environment?.['git'] as { dirty?: boolean } | null | undefined;
  const variables = Object.entries((environment?.['environment'] ?? {}) as Record<string, unknown>);
  const boots = beats.filter(({ msg }) => msg === 'boot').length;
  const synthetic = new Set(
    beats.flatMap(({ msg, data, step }) => (msg === 'progress' && data === 'synthetic' ? step : [])),
  ).size;
  const lost = metrics?.['dropped_log_lines'];
  return [
    ...(config === null ? ['config.yaml is missing or cannot be read'] : []),
    ...(git?.dirty ? ['the code had uncommitted changes'] : []),
    ...(git === null ? ['the code was not in a git repository'] : []),
    ...(boots > 1 ? [`started ${boots} times (resumed ${boots - 1})`] : []),
    ...(config && config.data.source !== 'synthetic' && synthetic > 0
      ? [`${synthetic} steps on synthetic tokens in place of ${config.data.source}`]
      : []),
    ...(metrics && metrics['status'] !== 'done'
      ? [`did not finish: ${plain(metrics['status'])} at step ${plain(metrics['step'])}`]
      : []),
    ...(metrics === null ? ['has not ended, or ended without metrics.json'] : []),
    ...Object.entries(counters).flatMap(([name, count]) => (count > 0 ? [`${name}: ${count}`] : [])),
    ...(typeof lost === 'number' && lost > 0 ? [`${lost} log lines were lost`] : []),
    ...(config === null ? [] : switchesOf(config)),
    ...variables.filter(([name]) => /^(NSA_|DDP_SAFE$)/.test(name)).map(([name, value]) => `${name}=${plain(value)}`),
  ];
}

/** Keys that change which kernels run, what a step costs or what is trained, without changing the plan. */
const SWITCHES = {
  runtime: [
    ...([
      'fused',
      'fused_min_len',
      'selection_kernel',
      'reference_kernels',
      'fp8',
      'deterministic',
      'cuda_graph',
    ] as const),
    ...(['strict_asserts', 'debug_compare', 'debug_timing', 'aux_stats'] as const),
  ],
  train: ['ddp_safe', 'wire', 'zero', 'spike_skip'],
  nsa: ['force_branch', 'force_uniform_gate', 'stopgrad_gates'],
} as const;

/** The switches that are not at their defaults. */
function switchesOf(config: Config): string[] {
  const defaults = parseConfig({});
  return Object.entries(SWITCHES).flatMap(([section, keys]) => {
    const [own, usual] = [config, defaults].map((one) => one[section as keyof Config] as Record<string, unknown>);
    return keys.flatMap((key) => (own[key] === usual[key] ? [] : [`${section}.${key}: ${plain(own[key])}`]));
  });
}

/** The loss of every step from the heartbeats; training.csv, with a row every log_every steps, if there are none. */
function lossOf(steps: readonly Heartbeat[], training: readonly { step: number; loss: number }[]): RunSeries['loss'] {
  const points = (steps.length > 0 ? steps : training).flatMap(({ step, loss }) =>
    loss === undefined ? [] : [[step, loss] as const],
  );
  return keepExtremes(points);
}

/** Reduces a long series to the first, smallest and largest point of each of POINTS stretches: spikes stay visible. */
function keepExtremes(points: RunSeries['loss']): RunSeries['loss'] {
  if (points.length <= 3 * POINTS) return points;
  return Array.from({ length: POINTS }, (_, i) => {
    const stretch = points.slice(
      Math.floor((i * points.length) / POINTS),
      Math.floor(((i + 1) * points.length) / POINTS),
    );
    const by = (better: (a: number, b: number) => boolean) =>
      stretch.reduce((best, point) => (better(point[1], best[1]) ? point : best));
    const kept = new Set([stretch[0], by((a, b) => a < b), by((a, b) => a > b)]);
    return stretch.filter((point) => kept.has(point) || !Number.isFinite(point[1]));
  }).flat();
}

function seriesOf(
  steps: readonly Heartbeat[],
  val: readonly { step: number; val_loss: number }[],
): Omit<RunSeries, 'loss'> {
  const points = (pick: (beat: Heartbeat) => number | undefined) =>
    steps.flatMap((beat) => {
      const value = pick(beat);
      return value === undefined ? [] : [[beat.step, value] as const];
    });
  return {
    val_loss: val.map(({ step, val_loss: loss }) => [step, loss] as const),
    toks_per_s: points(({ toks_per_s: rate }) => rate),
    gate_entropy: points(({ gate_entropy_mean: entropy }) => entropy),
    gate_shares: [0, 1, 2].map((branch) => points(({ gate_branch_shares: shares }) => shares?.[branch])),
    fetch_ms: points(({ dt_fetch_s: seconds }) => (seconds === undefined ? undefined : 1000 * seconds)),
    memory_mib: points(({ gpu_mem_reserved: mib }) => mib),
  };
}

/** At most POINTS items, evenly spread, including the last. */
function thin<Item>(items: readonly Item[]): Item[] {
  if (items.length <= POINTS) return [...items];
  return Array.from({ length: POINTS }, (_, i) => items[Math.round((i * (items.length - 1)) / (POINTS - 1))]);
}

/** A value of a JSON file as text. Files of a run may hold anything, also objects that `String` cannot convert. */
export function plain(value: unknown): string {
  return typeof value === 'string' ? value : (JSON.stringify(value) ?? '');
}

function finite(value: number): number | null {
  return Number.isFinite(value) ? value : null;
}
