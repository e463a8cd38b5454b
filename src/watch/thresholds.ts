/** The limits of the health rules, with their flags, environment variables and defaults. */
import { readVariable } from '../config/legacy/typed-variable.js';
import type { Environment } from '../environment.js';
import { UsageError } from '../errors.js';

interface ThresholdEntry {
  /** Without the dashes. */
  readonly flag: string;
  /** Its meaning and type are in the table of variables. */
  readonly variable: string;
  readonly default: number;
  readonly unit: string;
}

const limit = (flag: string, variable: string, otherwise: number, unit: string): ThresholdEntry => ({
  flag,
  variable: `NSA_WATCH_${variable}`,
  default: otherwise,
  unit,
});

const THRESHOLDS = {
  heartbeatStall: limit('heartbeat-stall', 'HEARTBEAT_STALL_S', 180, 'seconds'),
  gone: limit('gone-after', 'GONE_S', 300, 'seconds'),
  deadlineFetch: limit('deadline-fetch', 'DEADLINE_FETCH_S', 120, 'seconds'),
  deadlineStep: limit('deadline-step', 'DEADLINE_STEP_S', 180, 'seconds'),
  deadlineSave: limit('deadline-save', 'DEADLINE_SAVE_S', 600, 'seconds'),
  deadlineEval: limit('deadline-eval', 'DEADLINE_EVAL_S', 900, 'seconds'),
  gateEntropyMin: limit('gate-entropy-min', 'GATE_ENTROPY_MIN', 0.2, 'nats'),
  gateCollapseN: limit('gate-collapse-n', 'GATE_COLLAPSE_N', 3, 'n'),
  gateMax: limit('gate-max', 'GATE_MAX_THRESHOLD', 0.9, 'share'),
  collapseWarning: limit('collapse-warning', 'COLLAPSE_WARNING', 0.1, 'share'),
  collapseCritical: limit('collapse-critical', 'COLLAPSE_CRITICAL', 0.5, 'share'),
  gradZeroN: limit('grad-zero-n', 'GRAD_ZERO_N', 1, 'n'),
  gradSpike: limit('grad-spike', 'GRAD_SPIKE', 10, 'times'),
  spikeRate: limit('spike-rate', 'SPIKE_RATE', 0.02, 'share'),
  spikeWindow: limit('spike-window', 'SPIKE_WINDOW', 200, 'steps'),
  lossWindow: limit('loss-window', 'LOSS_WINDOW', 5000, 'steps'),
  throughputDrop: limit('throughput-drop', 'THROUGHPUT_DROP', 0.5, 'share'),
  throughputWindow: limit('throughput-window', 'THROUGHPUT_WINDOW_S', 600, 'seconds'),
  flatlineN: limit('flatline-n', 'FLATLINE_N', 5, 'n'),
  lossFlatlineN: limit('loss-flatline-n', 'LOSS_FLATLINE_N', 0, 'n'),
  fetch: limit('fetch-slow', 'FETCH_S', 2, 'seconds'),
  fetchRatio: limit('fetch-stall-ratio', 'FETCH_STALL_RATIO', 20, 'times'),
  fetchP95: limit('fetch-p95', 'FETCH_P95_MS', 100, 'milliseconds'),
};

export type ThresholdName = keyof typeof THRESHOLDS;
export type Thresholds = Readonly<Record<ThresholdName, number>>;

export const THRESHOLD_ENTRIES = Object.entries(THRESHOLDS) as readonly [ThresholdName, ThresholdEntry][];

/** Resolves every limit: flag, else variable, else default. */
export function resolveThresholds(env: Environment, flags: Partial<Thresholds> = {}): Thresholds {
  const resolved = THRESHOLD_ENTRIES.map(([name, { variable, default: otherwise }]) => {
    const value = flags[name] ?? (readVariable(env, variable) as number | undefined) ?? otherwise;
    if (value < 0) throw new UsageError(`${variable}: ${value} is not allowed; a number >= 0`);
    return [name, value] as const;
  });
  return Object.fromEntries(resolved) as Thresholds;
}
