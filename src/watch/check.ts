/** Smoke checks on the files of a run (learning, speed, health), and comparison with a baseline. */
import { readFileSync } from 'node:fs';
import { UsageError } from '../errors.js';
import { explainFileError, writeFileAtomic } from '../files.js';
import { isPlainObject } from '../json-values.js';
import { mean, median, quantile, round } from '../numbers.js';
import { readCsv, TRAINING_CSV } from '../run/logs/csv.js';
import { failureCounters, type Heartbeat, tailHeartbeats } from '../run/logs/heartbeat.js';
import { sampleHeartbeats } from '../run/logs/heartbeat-history.js';
import { readRun } from '../run/reader.js';
import { wallAges } from './ages.js';
import { judge, type RuleRow } from './row.js';
import { collapseRow, dataRow, memoryLeftRow, ruleValues } from './rules.js';
import { runState, stateText } from './state.js';
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
  readonly rows: readonly RuleRow[];
  readonly measured: Baseline;
}

/** Heartbeats sampled from the whole run, and newest ones that are all read. */
const SAMPLES = 512;
const NEWEST = 64;
/** The first and last loss are means over this share of the rows, because the loss is noisy. */
const EDGE_SHARE = 0.1;
/** A run is judged by rates, not by single events: this share of its steps may have one. */
const FEW = 0.01;
const FIRST_FETCHES = 8;
/** Allowed rise of a loss that cannot fall. */
const NOISE = 1.02;

export function checkRun({ csv, heartbeat }: CheckInput, options: CheckOptions): CheckResult {
  const { rows: logged, badLines } = readCsv(csv, TRAINING_CSV);
  const beats = wholeRun(heartbeat);
  if (logged.length === 0 && beats.length === 0)
    throw new UsageError(`${csv}: contains no steps, nor does ${heartbeat}; give the folder of a run that has started`);
  const losses = logged.length > 0 ? logged.map(({ loss }) => loss) : beats.map(({ loss }) => loss ?? Number.NaN);
  const steps = Math.max(logged.at(-1)?.step ?? 0, beats.at(-1)?.step ?? 0);
  const fetches = ruleValues('fetch', withoutFirstFetches(beats));
  const rates = beats.length > 0 ? ruleValues('throughput', beats) : logged.map(({ toks_per_s: rate }) => rate);
  const edge = Math.max(1, Math.round(losses.length * EDGE_SHARE));
  const [begin, end] = [mean(losses.slice(0, edge)), mean(losses.slice(-edge))];
  const bad = losses.filter((loss) => !Number.isFinite(loss)).length;
  const measured: Baseline = {
    steps,
    last_loss: end,
    toks_per_s: median(rates),
    fetch_p95_ms: 1000 * quantile(fetches, 0.95),
    gpu_mem_reserved: Math.max(0, ...ruleValues('memory', beats)),
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

function beatRows(beats: readonly Heartbeat[], measured: Baseline, limits: Thresholds): RuleRow[] {
  const [norms, entropies] = [ruleValues('gradients', beats), ruleValues('gate_entropy', beats)];
  const [collapse, blocks] = [ruleValues('gate_collapse', beats), ruleValues('selection', beats)];
  const fetch = ruleValues('fetch', beats);
  const isSlow = median(fetch) > limits.fetch;
  const useless = norms.filter((norm) => !Number.isFinite(norm) || norm === 0).length / norms.length;
  const rows = [
    judge('gradients', useless > FEW, 'red', percent(useless), `0 or not finite in at most ${percent(FEW)}`),
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
  const last = beats.at(-1)!;
  const fallbacks = failureCounters(last).filter(([, count]) => count > 0);
  const value = fallbacks.map(([name, count]) => `${name} ${count}`).join(', ') || '0';
  const isOften = fallbacks.some(([, count]) => count > FEW * last.step);
  const spikes = (last.fb_spike ?? 0) / last.step;
  return [
    ...rows,
    judge('spikes', spikes > limits.spikeRate, 'yellow', percent(spikes), `at most ${percent(limits.spikeRate)}`),
    judge('fallbacks', isOften, 'yellow', value, `each in at most ${percent(FEW)} of ${last.step} steps`),
  ];
}

function percent(share: number): string {
  return `${round(100 * share, 3)} %`;
}

/** The first fetches of each process open files and fill caches. A run with few steps has no others. */
function withoutFirstFetches(beats: readonly Heartbeat[]): readonly Heartbeat[] {
  const seen = new Map<number, number>();
  const later = beats.filter(({ pid }) => {
    const count = (seen.get(pid) ?? 0) + 1;
    seen.set(pid, count);
    return count > FIRST_FETCHES;
  });
  return later.length >= FIRST_FETCHES ? later : beats;
}

/** The state of the run in `dir`, in words. */
export function runText(dir: string): string {
  return stateText(runState(readRun(dir), wallAges()));
}

/** The rows of how the run in `dir` ended, if it did, and of where its data came from. */
export function stateRows(dir: string): RuleRow[] {
  const view = readRun(dir);
  const state = runState(view, wallAges());
  const isFailure = ['failed', 'died', 'gave up'].includes(state.name) || (state.name === 'halted' && !state.isAsked);
  return [
    judge('process', isFailure, 'red', stateText({ ...state, synthetic: '' }), 'no failure'),
    memoryLeftRow(view, state),
    dataRow(view, state),
  ];
}

/** Compares with a baseline: worse by more than `tolerance` (a share) is red. */
export function compareBaseline(measured: Baseline, baseline: Baseline, tolerance: number): RuleRow[] {
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
