/** The limits of the health rules, with their flags, environment variables and defaults. */
import { type Environment, readVariable } from '../config/legacy/typed-variable.js';
import { UsageError } from '../errors.js';

interface ThresholdEntry {
  /** Without the dashes. */
  readonly flag: string;
  readonly variable: string;
  readonly default: number;
  readonly unit: string;
  readonly integer?: boolean;
  readonly meaning: string;
}

export const THRESHOLDS = {
  heartbeatStall: {
    ...{ flag: 'heartbeat-stall', variable: 'NSA_WATCH_HEARTBEAT_STALL_S', default: 180, unit: 'seconds' },
    meaning: 'maximum age of a heartbeat',
  },
  gone: {
    ...{ flag: 'gone-after', variable: 'NSA_WATCH_GONE_S', default: 300, unit: 'seconds' },
    meaning: 'time after which a missing process is critical',
  },
  deadlineFetch: {
    ...{ flag: 'deadline-fetch', variable: 'NSA_WATCH_DEADLINE_FETCH_S', default: 120, unit: 'seconds' },
    meaning: 'maximum time in the section fetch',
  },
  deadlineStep: {
    ...{ flag: 'deadline-step', variable: 'NSA_WATCH_DEADLINE_STEP_S', default: 180, unit: 'seconds' },
    meaning: 'maximum time in the section step',
  },
  deadlineSave: {
    ...{ flag: 'deadline-save', variable: 'NSA_WATCH_DEADLINE_SAVE_S', default: 600, unit: 'seconds' },
    meaning: 'maximum time in the section save',
  },
  deadlineEval: {
    ...{ flag: 'deadline-eval', variable: 'NSA_WATCH_DEADLINE_EVAL_S', default: 900, unit: 'seconds' },
    meaning: 'maximum time in the sections eval, sample and boot',
  },
  gateEntropyMin: {
    ...{ flag: 'gate-entropy-min', variable: 'NSA_WATCH_GATE_ENTROPY_MIN', default: 0.2, unit: 'nats' },
    meaning: 'mean gate entropy below which gates are collapsed',
  },
  gateCollapseN: {
    ...{ flag: 'gate-collapse-n', variable: 'NSA_WATCH_GATE_COLLAPSE_N', default: 3, unit: 'n', integer: true },
    meaning: 'consecutive heartbeats with collapsed gates',
  },
  gateMax: {
    ...{ flag: 'gate-max', variable: 'NSA_WATCH_GATE_MAX_THRESHOLD', default: 0.9, unit: 'share' },
    meaning: 'mean of the largest gate that is a warning',
  },
  collapseWarning: {
    ...{ flag: 'collapse-warning', variable: 'NSA_WATCH_COLLAPSE_WARNING', default: 0.1, unit: 'share' },
    meaning: 'share of collapsed gates that is a warning',
  },
  collapseCritical: {
    ...{ flag: 'collapse-critical', variable: 'NSA_WATCH_COLLAPSE_CRITICAL', default: 0.5, unit: 'share' },
    meaning: 'share of collapsed gates that is critical',
  },
  gradZeroN: {
    ...{ flag: 'grad-zero-n', variable: 'NSA_WATCH_GRAD_ZERO_N', default: 1, unit: 'n', integer: true },
    meaning: 'consecutive heartbeats with a gradient norm of 0',
  },
  gradSpike: {
    ...{ flag: 'grad-spike', variable: 'NSA_WATCH_GRAD_SPIKE', default: 10, unit: 'times' },
    meaning: 'ratio of a gradient norm to its median that is a spike',
  },
  throughputDrop: {
    ...{ flag: 'throughput-drop', variable: 'NSA_WATCH_THROUGHPUT_DROP', default: 0.5, unit: 'share' },
    meaning: 'drop of throughput that is a warning',
  },
  throughputWindow: {
    ...{ flag: 'throughput-window', variable: 'NSA_WATCH_THROUGHPUT_WINDOW_S', default: 600, unit: 'seconds' },
    meaning: 'time for which throughput must be low',
  },
  flatlineN: {
    ...{ flag: 'flatline-n', variable: 'NSA_WATCH_FLATLINE_N', default: 5, unit: 'n', integer: true },
    meaning: 'consecutive heartbeats without throughput',
  },
  lossFlatlineN: {
    ...{ flag: 'loss-flatline-n', variable: 'NSA_WATCH_LOSS_FLATLINE_N', default: 0, unit: 'n', integer: true },
    meaning: 'consecutive heartbeats with the same loss; 0 = off',
  },
  fetch: {
    ...{ flag: 'fetch-slow', variable: 'NSA_WATCH_FETCH_S', default: 2, unit: 'seconds' },
    meaning: 'median of recent fetch times that is a warning',
  },
  fetchRatio: {
    ...{ flag: 'fetch-stall-ratio', variable: 'NSA_WATCH_FETCH_STALL_RATIO', default: 20, unit: 'times' },
    meaning: 'ratio of recent to usual fetch times that is a warning',
  },
  fetchP95: {
    ...{ flag: 'fetch-p95', variable: 'NSA_WATCH_FETCH_P95_MS', default: 100, unit: 'milliseconds' },
    meaning: 'fetch_p95_ms that is a warning',
  },
} as const satisfies Record<string, ThresholdEntry>;

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
