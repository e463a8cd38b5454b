/**
 * The health rules; docs/runbooks/operations.md lists them. Each is a function of one view of a run (two also sample the
 * heartbeat file), so that a single check by `health` has the same result as `watch`. "For n heartbeats" refers to the
 * newest n.
 */

import { mean, median, round } from '../numbers.js';
import { asNumber } from '../run/json.js';
import { countersIn, failureCounters, type Heartbeat } from '../run/logs/heartbeat.js';
import { sampleHeartbeats } from '../run/logs/heartbeat-history.js';
import { type Limit, METRIC_ENTRIES, METRICS, type Metric, type MetricName } from '../run/metrics.js';
import { type RankView, type RunView, readRun } from '../run/reader.js';
import { adviceFor, isOutOfMemory, isScarce } from './advice.js';
import { type AgeOf, wallAges } from './ages.js';
import { green, judge, type RuleRow, type Verdict, verdict } from './row.js';
import { type RunState, runState, SILENT_SECTIONS, type StateName, startOf, stateText } from './state.js';
import type { Thresholds } from './thresholds.js';

/** The row of a rule, with the rank and the name of the anomaly. */
export interface Finding extends RuleRow {
  readonly rank: number;
  /** Content of .anomaly_type if the row is red. */
  readonly anomaly: string;
}

/** Minimum number of values for a meaningful median. */
const ENOUGH = 20;
const RECENT_FETCHES = 5;
const RECENT_STEPS = 5;
/** Fetches shorter than this are never a stall. */
const FETCH_FLOOR_S = 1;
const SAMPLES = 64;
/** Steps that a look certainly sees (`readRun` takes 256 heartbeats, some of them of saves and evaluations). */
const SEEN_STEPS = 200;
/** Heartbeats in which the course of the loss is judged. */
const TREND_SAMPLES = 512;
/** Share of the heartbeats in the window that must be slow; below 1, so that one fast step does not hide a slow run. */
const SLOW_SHARE = 0.9;
const MEMORY_GROWTH = 1.1;
const MEMORY_FLOOR_MIB = 64;
/** A leak grows again and again; the first evaluation and the first checkpoint each grow the memory once. */
const MEMORY_RISES = 4;
/** Allowed difference in steps: ranks do not write their heartbeats at the same moment. */
const LISTED_RANKS = 16;
const RANK_STEPS = 2;

/** `state` of the run, if the caller knows it already. */
export function healthFindings(
  view: RunView,
  limits: Thresholds,
  ageOf: AgeOf,
  state: RunState = runState(view, ageOf),
): Finding[] {
  const first = view.ranks[0].rank;
  const ofRun = [
    ...processRows(state, limits),
    ...markRows(view),
    memoryLeftRow(view, state),
    dataRow(view, state),
    ...rankRows(view),
  ];
  const several = view.ranks.length > 1;
  const start = startOf(view);
  return [
    ...ofRun.map((row) => ({ ...row, rank: first, anomaly: ANOMALY_NAMES[row.rule] ?? row.rule })),
    ...view.ranks.flatMap((rankView) => {
      const rows = [
        ...livenessRows(rankView, state, limits, ageOf, start),
        ...numberRows(view, rankView, limits, start),
      ];
      const suffix = several ? ` rank${rankView.rank}` : '';
      return rows.map((row) => ({
        ...row,
        rule: `${row.rule}${suffix}`,
        rank: rankView.rank,
        anomaly: ANOMALY_NAMES[row.rule] ?? row.rule,
      }));
    }),
  ];
}

const ANOMALY_NAMES: Readonly<Record<string, string>> = {
  heartbeat: 'heartbeat_stall',
  section: 'section_stall',
  loss: 'nonfinite_loss',
  data: 'synthetic_data',
  gate_entropy: 'gate_collapse',
  gate_collapse: 'gate_collapse',
  grad_zero: 'gradient_zero',
  flatline: 'throughput_flatline',
};

function processRows(state: RunState, { gone }: Thresholds): RuleRow[] {
  const limit = 'running or done';
  switch (state.name) {
    case 'running':
    case 'starting':
      return [green('process', state.detail, limit)];
    case 'done':
      return [green('process', stateText(state), limit)];
    case 'not started':
      return [judge('process', true, 'yellow', 'nothing has started here yet', limit)];
    case 'unknown': {
      const level = state.seconds > gone ? 'red' : 'yellow';
      return [judge('process', true, level, stateText(state), `${limit}; unknown for at most ${gone} s`)];
    }
    case 'suspended': // the deadline of its section makes it critical
      return [judge('process', true, 'yellow', state.reason, limit)];
    default:
      return [judge('process', true, state.isAsked ? 'yellow' : 'red', stateText(state), limit)];
  }
}

function markRows({ halt, anomaly, problems }: RunView): RuleRow[] {
  return [
    judge('halt', halt !== undefined, 'yellow', halt ?? 'none', '.HALT'),
    judge('anomaly', anomaly !== undefined, 'red', anomaly ?? 'none', '.anomaly_type'),
    judge('files', problems.length > 0, 'yellow', problems.join('; ') || 'readable', 'readable'),
  ];
}

/** The end by a lack of memory, and its approach. */
export function memoryLeftRow(view: RunView, state: RunState): RuleRow {
  const limit = 'memory on host and device';
  const beat = view.ranks[0].beats.findLast(({ msg }) => msg === 'progress');
  const left = beat && `${beat.host_mem_free} MiB of the host free, ${beat.host_mem_rss} MiB in the process`;
  if (['failed', 'died'].includes(state.name) && isOutOfMemory(view)) {
    const value =
      state.name === 'failed' ? state.reason : `probably killed by the kernel: ${left} at step ${beat!.step}`;
    return judge('out_of_memory', true, 'red', value, limit);
  }
  return judge(
    'out_of_memory',
    isScarce(beat),
    'yellow',
    (beat?.host_mem_free !== undefined && left) || 'enough',
    limit,
  );
}

export function dataRow({ ranks: [{ beats }] }: RunView, { synthetic }: RunState): RuleRow {
  const source = beats.findLast(({ data }) => data !== undefined)?.data ?? null;
  return judge('data', synthetic !== '', 'red', synthetic || source, 'the source of the config');
}

/** Ranks advance together: a rank that is missing or behind has dropped out of the run. */
function rankRows({ ranks }: RunView): RuleRow[] {
  const world = ranks[0].beats.at(-1)?.world ?? 1;
  if (world < 2) return [];
  const limit = `${world} ranks within ${RANK_STEPS} steps`;
  const present = new Set(ranks.map(({ rank }) => rank));
  const missing = Array.from({ length: world }, (_, rank) => rank).filter((rank) => !present.has(rank));
  if (missing.length > 0) return [judge('ranks', true, 'yellow', `no heartbeat of rank ${listed(missing)}`, limit)];
  const steps = ranks.map(({ beats }) => beats.at(-1)?.step ?? 0);
  const [first, last] = [Math.max(...steps), Math.min(...steps)];
  const behind = ranks.filter((_, i) => steps[i] === last).map(({ rank }) => rank);
  const value = first === last ? `all at step ${first}` : `rank ${listed(behind)} at step ${last} of ${first}`;
  return [judge('ranks', first - last > RANK_STEPS, 'yellow', value, limit)];
}

/** `3, 4, 7`, or the first of many. */
function listed(ranks: readonly number[]): string {
  const rest = ranks.length - LISTED_RANKS;
  return ranks.slice(0, LISTED_RANKS).join(', ') + (rest > 0 ? ` and ${rest} more` : '');
}

function livenessRows(
  { rank, beats, section }: RankView,
  state: RunState,
  limits: Thresholds,
  ageOf: AgeOf,
  start: number,
): RuleRow[] {
  const last = beats.at(-1);
  if (state.kind === 'ended') return last ? [green('heartbeat', `step ${last.step}, not running`, null)] : [];
  const deadline = section && deadlineOf(section.section, limits);
  // A section file of another process than the newest heartbeat's was left behind by a killed process.
  const isOwn =
    state.kind === 'running' &&
    section !== undefined &&
    section.ts >= start &&
    (last === undefined || section.pid === last.pid || section.ts >= last.ts);
  const inside = isOwn && section ? Math.max(0, ageOf(`section ${rank}`, section.ts)) : 0;
  const isLate = isOwn && deadline !== undefined && inside > deadline;
  const rows: RuleRow[] = [];
  if (last) {
    const age = ageOf(`beat ${rank}`, Math.max(last.ts, start));
    const isSilent = isOwn && section && SILENT_SECTIONS.has(section.section) && !isLate;
    const limit = limits.heartbeatStall;
    if (age < -limit) rows.push(judge('heartbeat', true, 'yellow', `${Math.round(-age)} s in the future`, limit));
    else if (age > limit && isSilent)
      rows.push(green('heartbeat', `${Math.round(age)} s, in ${section.section}`, limit));
    else rows.push(judge('heartbeat', age > limit, 'red', round(Math.max(0, age)), limit));
  }
  if (isOwn && section && deadline !== undefined) {
    const value = `rank ${rank} in ${section.section} for ${Math.round(inside)} s at step ${section.step}`;
    rows.push(judge('section', isLate, 'red', value, `${section.section} ${deadline} s`));
  }
  return rows;
}

/** Maximum time in a section; undefined where a rank cannot hang. */
function deadlineOf(section: string, limits: Thresholds): number | undefined {
  switch (section) {
    case 'fetch':
      return limits.deadlineFetch;
    case 'save':
      return limits.deadlineSave;
    case 'eval':
    case 'sample':
    case 'boot':
      return limits.deadlineEval;
    case 'step':
    case 'between':
      return limits.deadlineStep;
    default:
      return undefined;
  }
}

function numberRows(view: RunView, { rank, beats }: RankView, limits: Thresholds, start: number): RuleRow[] {
  const path = view.paths.heartbeat(rank);
  const current = sinceBoot(beats).filter(({ ts }) => ts >= start);
  const steps = current.filter(({ msg }) => msg === 'progress');
  const last = steps.at(-1);
  return [
    lossRow(current),
    ...(last ? [...gateRows(steps, last, limits), ...gradientRows(steps, limits), ...fetchRows(steps, limits)] : []),
    ...(last ? LIMITS.flatMap(([metric, limit]) => limitRows(metric, limit, steps, limits)) : []),
    ...(last ? [...spikeRows(steps, limits), flatlineRow(steps, limits), ...lossFlatline(steps, limits)] : []),
    ...(last && last.data !== 'synthetic' ? lossTrend(path, last, limits) : []),
    ...(last ? [throughputRow(path, last, limits), counterRow(steps), memoryRow(path, last)] : []),
  ];
}

/** Heartbeats of the current process. */
function sinceBoot(beats: readonly Heartbeat[]): readonly Heartbeat[] {
  return beats.slice(beats.findLastIndex(({ msg }) => msg === 'boot') + 1);
}

function lossRow(beats: readonly Heartbeat[]): RuleRow {
  const isBad = ({ loss, grad_norm: norm, val_loss: validation }: Heartbeat) =>
    [loss, norm, validation].some((value) => value !== undefined && !Number.isFinite(value));
  const bad = beats.find(isBad);
  const value = bad
    ? bad.val_loss === undefined
      ? `loss ${bad.loss}, gradient norm ${bad.grad_norm} at step ${bad.step}`
      : `validation loss ${bad.val_loss} at step ${bad.step}`
    : lastLoss(beats);
  return judge('loss', bad !== undefined, 'red', value, 'finite');
}

function lastLoss(beats: readonly Heartbeat[]): number | null {
  return beats.findLast(({ loss, msg }) => loss !== undefined && msg === 'progress')?.loss ?? null;
}

type Table = typeof METRICS;
type RuleName = Extract<Table[MetricName], { readonly rules: unknown }>['rules'][number];

/** The values that a rule judges, oldest first: those of the metric that names the rule, where it is not paused. */
export function ruleValues(rule: RuleName, beats: readonly Heartbeat[]): number[] {
  return metricValues(METRIC_ENTRIES.find(([, { rules }]) => rules?.includes(rule))![0], beats);
}

function metricValues(metric: MetricName, beats: readonly Heartbeat[]): number[] {
  const { pausedBy } = METRICS[metric] as Metric;
  const counted = beats.filter((beat) => pausedBy === undefined || !(pausedBy in beat));
  return counted.flatMap((beat: Readonly<Record<string, unknown>>) => asNumber(beat[metric]) ?? []);
}

type TableLimit = Extract<Table[MetricName], { readonly limit: unknown }>['limit'];
const LIMITS = METRIC_ENTRIES.flatMap(([name, { limit }]) => (limit ? [[name, limit as TableLimit] as const] : []));

function limitRows(
  metric: MetricName,
  { rule, atLeast, ...more }: TableLimit,
  steps: readonly Heartbeat[],
  limits: Thresholds,
): RuleRow[] {
  const limit = typeof atLeast === 'number' ? atLeast : limits[atLeast];
  const isJudged = steps.length >= ((more as Limit).after ?? 1);
  return metricValues(metric, steps.slice(-1)).map((value) =>
    judge(rule, isJudged && value >= limit, 'yellow', round(value), limit),
  );
}

function gateRows(steps: readonly Heartbeat[], last: Heartbeat, limits: Thresholds): RuleRow[] {
  const entropies = ruleValues('gate_entropy', steps);
  // Dense attention has no gates.
  if (ruleValues('gate_entropy', [last]).length === 0) return [];
  const newest = entropies.slice(-limits.gateCollapseN);
  const collapsed =
    newest.length === limits.gateCollapseN && newest.every((entropy) => entropy < limits.gateEntropyMin);
  const entropy = round(entropies.at(-1)!);
  const limit = `${limits.gateEntropyMin} for ${limits.gateCollapseN} heartbeats`;
  return [
    collapsed
      ? judge('gate_entropy', true, 'red', entropy, limit)
      : judge('gate_entropy', entropy <= 0.5, 'yellow', entropy, `${limit}; good above 0.5`),
    ...ruleValues('gate_collapse', [last]).map((share) => collapseRow(share, limits)),
  ];
}

/** The share of collapsed gates: critical, a warning, or green. */
export function collapseRow(share: number, { collapseWarning, collapseCritical }: Thresholds): RuleRow {
  const isCritical = share > collapseCritical;
  const limit = isCritical ? collapseCritical : collapseWarning;
  return judge('gate_collapse', share > limit, isCritical ? 'red' : 'yellow', round(share), limit);
}

function gradientRows(steps: readonly Heartbeat[], { gradZeroN, gradSpike }: Thresholds): RuleRow[] {
  const norms = ruleValues('grad_spike', steps);
  if (norms.length === 0) return [];
  const newest = norms.slice(-gradZeroN);
  const isZero = gradZeroN > 0 && newest.length === gradZeroN && newest.every((norm) => norm === 0);
  const usual = median(norms);
  const worst = Math.max(...norms.slice(-RECENT_STEPS));
  const ratio = norms.length >= ENOUGH && usual > 0 ? worst / usual : 0;
  return [
    judge('grad_zero', isZero, 'red', round(norms.at(-1)!), `0 for ${gradZeroN} heartbeats`),
    judge('grad_spike', ratio > gradSpike, 'yellow', round(ratio), `${gradSpike} times the median`),
  ];
}

function fetchRows(steps: readonly Heartbeat[], limits: Thresholds): RuleRow[] {
  const times = ruleValues('fetch', steps);
  if (times.length === 0) return [];
  const recent = median(times.slice(-RECENT_FETCHES));
  const usual = median(times);
  const ratio = times.length >= ENOUGH && recent > FETCH_FLOOR_S && usual > 0 ? recent / usual : 0;
  return [
    judge('fetch', recent > limits.fetch, 'yellow', round(recent), limits.fetch),
    judge('fetch_stall', ratio > limits.fetchRatio, 'yellow', round(ratio), `${limits.fetchRatio} times the usual`),
  ];
}

function flatlineRow(steps: readonly Heartbeat[], { flatlineN }: Thresholds): RuleRow {
  const newest = ruleValues('flatline', steps.slice(-flatlineN));
  const isFlat = flatlineN > 0 && newest.length === flatlineN && newest.every((rate) => !(rate > 0));
  const [rate = Number.NaN] = ruleValues('flatline', steps.slice(-1));
  return judge('flatline', isFlat, 'red', round(rate), `0 for ${flatlineN} heartbeats`);
}

/** The rate of spikes: single ones belong to a healthy run. */
function spikeRows(steps: readonly Heartbeat[], { spikeRate, spikeWindow }: Thresholds): RuleRow[] {
  const recent = steps.slice(-spikeWindow - 1);
  const [first, last] = [recent[0], recent.at(-1)!];
  if (last.fb_spike === undefined) return [];
  const [spikes, among] = [last.fb_spike - (first.fb_spike ?? 0), last.step - first.step];
  const isMany = recent.length > Math.min(spikeWindow, SEEN_STEPS) && spikes > spikeRate * among;
  return [
    judge('spikes', isMany, 'yellow', `${spikes} in ${among} steps`, `${100 * spikeRate} % of ${spikeWindow} steps`),
  ];
}

/** Compares the two halves of the window; what is below twice the standard error of their difference is noise. */
function lossTrend(path: string, last: Heartbeat, { lossWindow: window }: Thresholds): RuleRow[] {
  if (window === 0 || last.step <= window) return [];
  const found = sampleSteps(path, last, window);
  const isCovered = found.length >= ENOUGH && last.step - found[0].step >= SLOW_SHARE * window;
  if (!isCovered) return [];
  const middle = last.step - window / 2;
  const values = (isLate: boolean) => found.flatMap(({ step, loss }) => (step > middle === isLate ? (loss ?? []) : []));
  const [early, late] = [values(false), values(true)];
  const noise = Math.sqrt(variance(early) / early.length + variance(late) / late.length);
  const fall = mean(early) - mean(late);
  const value = `${round(mean(early), 4)}, then ${round(mean(late), 4)}`;
  const isFlat = fall < 2 * noise;
  const trend = fall < -2 * noise ? 'rises' : isFlat ? 'stands still' : 'falls';
  return [judge('loss_trend', isFlat, 'yellow', `${trend}: ${value} in ${window} steps`, `falls over ${window} steps`)];
}

/** A sample of the newest `window` steps of the process of `last`. */
function sampleSteps(path: string, last: Heartbeat, window: number): Heartbeat[] {
  const all = sampleHeartbeats(path, 0, Number.POSITIVE_INFINITY, SAMPLES);
  const begin = all.findLast(({ step, ts }) => step <= last.step - window && ts <= last.ts)?.ts ?? 0;
  return sampleHeartbeats(path, begin, last.ts, TREND_SAMPLES).filter(
    ({ msg, step }) => msg === 'progress' && step > last.step - window && step <= last.step,
  );
}

function variance(values: readonly number[]): number {
  const middle = mean(values);
  return mean(values.map((value) => (value - middle) ** 2));
}

function lossFlatline(steps: readonly Heartbeat[], { lossFlatlineN: n }: Thresholds): RuleRow[] {
  if (n === 0) return [];
  const newest = steps.slice(-n);
  const isFlat = newest.length === n && newest.every(({ loss }) => loss === newest[0].loss);
  return [judge('loss_flatline', isFlat, 'yellow', newest.at(-1)!.loss ?? null, `the same for ${n} heartbeats`)];
}

/** Compares the window with the whole run before it, so that a slow decline is detected too. */
function throughputRow(path: string, last: Heartbeat, { throughputDrop, throughputWindow }: Thresholds): RuleRow {
  const begin = last.ts - throughputWindow;
  const rates = (beats: readonly Heartbeat[]) => ruleValues('throughput', beats);
  const sample = (from: number, to: number) =>
    sampleHeartbeats(path, from, to, SAMPLES).filter((beat) => beat.msg === 'progress' && rates([beat]).length > 0);
  const usual = rates(sample(0, begin));
  const recent = sample(begin, Number.POSITIVE_INFINITY);
  const limit = `${round(100 * (1 - throughputDrop))} % of the usual for ${throughputWindow} s`;
  // After a pause the window is not fully covered yet.
  const isCovered = recent.length >= 2 && recent[0].ts - begin < throughputWindow * (1 - SLOW_SHARE);
  const [newest = Number.NaN] = rates([last]);
  if (usual.length < ENOUGH || !isCovered) return green('throughput', round(newest), limit);
  const floor = (1 - throughputDrop) * median(usual);
  const slow = rates(recent).filter((rate) => rate < floor).length / recent.length;
  const share = round((100 * median(rates(recent))) / median(usual), 3);
  return judge('throughput', slow >= SLOW_SHARE, 'yellow', `${share} % of the usual`, limit);
}

/** Counters of fallbacks and failures must not grow. */
function counterRow(steps: readonly Heartbeat[]): RuleRow {
  const [first, last] = [steps[0], steps.at(-1)!];
  const before = new Map(countersIn(first));
  const grown = failureCounters(last)
    .map(([name, count]) => ({ name, by: count - (before.get(name) ?? 0) }))
    .filter(({ by }) => by > 0);
  const value = grown.map(({ name, by }) => `${name} +${by}`).join(', ') || '0';
  return judge('fallbacks', grown.length > 0, 'yellow', value, `no growth in ${steps.length} steps`);
}

/** Compares with the whole life of the process: a small leak per step is not visible in a few hundred steps. */
function memoryRow(path: string, last: Heartbeat): RuleRow {
  const ofProcess = sampleHeartbeats(path, 0, last.ts, SAMPLES).filter(({ pid }) => pid === last.pid);
  const sizes = ruleValues('memory', ofProcess);
  const [after = 0] = ruleValues('memory', [last]);
  const before = sizes.length >= ENOUGH ? median(sizes.slice(0, sizes.length / 4)) : after;
  const rises = sizes.filter((size, i) => i > 0 && size > Math.max(...sizes.slice(0, i))).length;
  const isGrowing = after > before * MEMORY_GROWTH && after - before > MEMORY_FLOOR_MIB && rises >= MEMORY_RISES;
  return judge('memory', isGrowing, 'yellow', after, `flat (${before} MiB before)`);
}

/** The JSON of `health`. */
export interface Health extends Verdict {
  readonly state: StateName;
  readonly reason: string;
  /** The next thing to do; empty if there is nothing. */
  readonly advice: string;
  /** As in the JSON of `status`. */
  readonly synthetic: string | null;
}

/**
 * Healthy is a run that is running or done, without a red rule. `allowStopped`: also one that somebody stopped. `now` in
 * seconds since 1970.
 */
export function checkHealth(
  dir: string,
  thresholds: Thresholds,
  { now = Date.now() / 1000, allowStopped = false } = {},
): Health {
  const view = readRun(dir);
  const ageOf = wallAges(now);
  const state = runState(view, ageOf);
  const { ok, rows } = verdict(healthFindings(view, thresholds, ageOf, state));
  const isUp = ['running', 'starting', 'done'].includes(state.name) || (allowStopped && state.isAsked);
  const shown = isUp ? rows : rows.map((row) => (row.rule === 'process' ? { ...row, level: 'red' as const } : row));
  return {
    ok: ok && isUp,
    rows: shown,
    state: state.name,
    reason: state.reason,
    advice: adviceFor(state, view),
    synthetic: state.synthetic || null,
  };
}
