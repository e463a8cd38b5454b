/** Smoke checks on the files of a run (learning, speed, health), and comparison with a baseline. */
import { readFileSync } from 'node:fs';
import { UsageError } from '../errors.js';
import { explainFileError, isPlainObject, writeFileAtomic } from '../files.js';
import { mean, median, quantile, round } from '../numbers.js';
import { readCsv, TRAINING_CSV } from '../run/logs/csv.js';
import { fallbackCounters, type Heartbeat, tailHeartbeats } from '../run/logs/heartbeat.js';
import { sampleHeartbeats } from '../run/logs/heartbeat-history.js';
import { judge, type Row } from './row.js';
import { collapseRow } from './rules.js';
import type { Thresholds } from './thresholds.js';

export interface CheckInput {
  /** training.csv. */
  readonly csv: string;
  /** heartbeat_rank0.jsonl. */
  readonly heartbeat: string;
}

export interface CheckOptions {
  readonly minSteps: number;
  /** Tokens per second. */
  readonly minTps: number;
  readonly thresholds: Thresholds;
  /** False for random tokens, where the loss only must not rise. */
  readonly mustLearn: boolean;
}

/** Figures of a run for comparison: the content of a baseline file. */
export interface Baseline {
  readonly steps: number;
  readonly last_loss: number;
  readonly toks_per_s: number;
  readonly fetch_p95_ms: number;
  readonly gpu_mem_reserved: number;
}

export interface CheckResult {
  readonly rows: readonly Row[];
  readonly measured: Baseline;
}

/** Heartbeats sampled from the whole run, and newest ones that are all read. */
const SAMPLES = 512;
const NEWEST = 64;
/** The first and last loss are means over this share of the rows, because the loss is noisy. */
const EDGE_SHARE = 0.1;
/** Allowed rise of a loss that cannot fall. */
const NOISE = 1.02;

export function checkRun({ csv, heartbeat }: CheckInput, options: CheckOptions): CheckResult {
  const { rows: logged, badLines } = readCsv(csv, TRAINING_CSV);
  const beats = wholeRun(heartbeat);
  if (logged.length === 0 && beats.length === 0)
    throw new UsageError(`${csv}: contains no steps, nor does ${heartbeat}; give the folder of a run that has started`);
  const losses = logged.length > 0 ? logged.map(({ loss }) => loss) : beats.map(({ loss }) => loss ?? Number.NaN);
  const steps = Math.max(logged.at(-1)?.step ?? 0, beats.at(-1)?.step ?? 0);
  const rates = beats.length > 0 ? numbers(beats, 'toks_per_s') : logged.map(({ toks_per_s: rate }) => rate);
  const edge = Math.max(1, Math.round(losses.length * EDGE_SHARE));
  const [begin, end] = [mean(losses.slice(0, edge)), mean(losses.slice(-edge))];
  const bad = losses.filter((loss) => !Number.isFinite(loss)).length;
  const measured: Baseline = {
    steps,
    last_loss: end,
    toks_per_s: median(rates),
    fetch_p95_ms: 1000 * quantile(numbers(beats, 'dt_fetch_s'), 0.95),
    gpu_mem_reserved: Math.max(0, ...numbers(beats, 'gpu_mem_reserved')),
  };
  const { thresholds, minSteps, minTps, mustLearn } = options;
  const target = mustLearn ? begin : begin * NOISE;
  return {
    measured,
    rows: [
      judge('steps', steps < minSteps, 'red', steps, minSteps),
      judge('loss_finite', bad > 0, 'red', bad, 0),
      judge('loss_falls', losses.length < 2 || !(end < target), 'red', round(end), `below ${round(target)}`),
      judge('throughput', !(measured.toks_per_s >= minTps), 'red', round(measured.toks_per_s), minTps),
      judge('csv', badLines > 0, 'yellow', badLines, '0 damaged rows'),
      ...(beats.length === 0 ? [judge('heartbeats', true, 'red', 0, 'some')] : beatRows(beats, measured, thresholds)),
    ],
  };
}

function beatRows(beats: readonly Heartbeat[], measured: Baseline, limits: Thresholds): Row[] {
  // A schedule closes the gates of a converted model on purpose (train.gate_release_steps).
  const free = beats.filter(({ gate_released: released }) => released === undefined);
  const [norms, entropies] = [numbers(beats, 'grad_norm'), numbers(free, 'gate_entropy_mean')];
  const [collapse, blocks] = [numbers(free, 'gate_collapse_frac'), numbers(beats, 'sel_k_mean')];
  const fetch = numbers(beats, 'dt_fetch_s');
  const isSlow = median(fetch) > limits.fetch;
  const rows = [
    judge(
      'gradients',
      norms.some((norm) => !Number.isFinite(norm) || norm === 0),
      'red',
      round(median(norms)),
      'finite, not 0',
    ),
    judge('fetch', isSlow, 'red', round(median(fetch)), limits.fetch),
    judge(
      'fetch_p95',
      measured.fetch_p95_ms >= limits.fetchP95,
      'yellow',
      round(measured.fetch_p95_ms),
      limits.fetchP95,
    ),
  ];
  if (entropies.length > 0) {
    const newest = mean(entropies.slice(-limits.gateCollapseN));
    const share = median(collapse);
    rows.push(
      judge('gate_entropy', newest < limits.gateEntropyMin, 'red', round(newest), limits.gateEntropyMin),
      collapseRow(share, limits),
    );
  }
  if (blocks.length > 0)
    rows.push(judge('selection', !(median(blocks) >= 1), 'red', round(median(blocks)), '1 block or more'));
  const fallbacks = fallbackCounters(beats.at(-1)!).filter(([, count]) => count > 0);
  const value = fallbacks.map(([name, count]) => `${name.slice(3)} ${count}`).join(', ') || '0';
  return [...rows, judge('fallbacks', fallbacks.length > 0, 'yellow', value, 'near 0')];
}

/** Compares with a baseline: worse by more than `tolerance` (a share) is red. */
export function compareBaseline(measured: Baseline, baseline: Baseline, tolerance: number): Row[] {
  const compare = (rule: string, field: keyof Baseline, isBetterAbove: boolean) => {
    const [value, from] = [measured[field], baseline[field]];
    const limit = from * (isBetterAbove ? 1 - tolerance : 1 + tolerance);
    const isWithin = isBetterAbove ? value >= limit : value <= limit;
    return judge(rule, !isWithin, 'red', round(value), `${round(limit)} (baseline ${round(from)})`);
  };
  return [
    compare('baseline_toks_per_s', 'toks_per_s', true),
    compare('baseline_loss', 'last_loss', false),
    compare('baseline_memory', 'gpu_mem_reserved', false),
  ];
}

export function saveBaseline(path: string, measured: Baseline): void {
  writeFileAtomic(path, `${JSON.stringify(measured, null, 2)}\n`);
}

export function loadBaseline(path: string): Baseline {
  let parsed: unknown;
  try {
    parsed = JSON.parse(readFileSync(path, 'utf8'));
  } catch (error) {
    const reason = error instanceof SyntaxError ? 'is not JSON' : `cannot read: ${explainFileError(error)}`;
    throw new UsageError(`${path}: ${reason}; write one with --save-baseline`, { cause: error });
  }
  for (const name of ['steps', 'last_loss', 'toks_per_s', 'gpu_mem_reserved'])
    if (!isPlainObject(parsed) || typeof parsed[name] !== 'number')
      throw new UsageError(`${path}: has no number ${name}; write one with --save-baseline`);
  return parsed as unknown as Baseline;
}

/** Progress heartbeats: a sample of the whole run, and the newest. */
function wholeRun(path: string): Heartbeat[] {
  const byPlace = new Map<string, Heartbeat>();
  const beats = [...sampleHeartbeats(path, 0, Number.POSITIVE_INFINITY, SAMPLES), ...tailHeartbeats(path, NEWEST)];
  for (const beat of beats) if (beat.msg === 'progress') byPlace.set(`${beat.ts} ${beat.step}`, beat);
  return [...byPlace.values()].sort((a, b) => a.ts - b.ts);
}

type NumberField =
  | 'toks_per_s'
  | 'dt_fetch_s'
  | 'gpu_mem_reserved'
  | 'grad_norm'
  | 'gate_entropy_mean'
  | 'gate_collapse_frac'
  | 'sel_k_mean';

function numbers(beats: readonly Heartbeat[], field: NumberField): number[] {
  return beats.flatMap((beat) => beat[field] ?? []);
}
