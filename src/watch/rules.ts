/**
 * The health rules; docs/runbooks/operations.md lists them. Each is a function of one view of a run (two also sample the
 * heartbeat file), so that a single check by `health` has the same result as `watch`. "For n heartbeats" refers to the
 * newest n.
 */

import { median, round } from '../numbers.js';
import { fallbackCounters, type Heartbeat } from '../run/logs/heartbeat.js';
import { sampleHeartbeats } from '../run/logs/heartbeat-history.js';
import { type RankView, type RunView, readRun } from '../run/reader.js';
import { type AgeOf, wallAges } from './ages.js';
import { green, judge, type Row, type Verdict, verdict } from './row.js';
import { type RunState, runState } from './state.js';
import type { Thresholds } from './thresholds.js';

/** The row of a rule, with the rank and the name of the anomaly. */
export interface Finding extends Row {
  readonly rank: number;
  /** Content of .anomaly_type if the row is red. */
  readonly anomaly: string;
}

/** Sections in which a healthy run writes no heartbeats. */
const SILENT_SECTIONS = new Set(['save', 'eval', 'sample', 'boot']);
/** Minimum number of values for a meaningful median. */
const ENOUGH = 20;
const RECENT_FETCHES = 5;
const RECENT_STEPS = 5;
/** Fetches shorter than this are never a stall. */
const FETCH_FLOOR_S = 1;
const SAMPLES = 64;
/** Share of the heartbeats in the window that must be slow; below 1, so that one fast step does not hide a slow run. */
const SLOW_SHARE = 0.9;
const MEMORY_GROWTH = 1.1;
const MEMORY_FLOOR_MIB = 64;
/** A leak grows again and again; the first evaluation and the first checkpoint each grow the memory once. */
const MEMORY_RISES = 4;
/** Allowed difference in steps: ranks do not write their heartbeats at the same moment. */
const RANK_STEPS = 2;

export function healthFindings(view: RunView, limits: Thresholds, ageOf: AgeOf): Finding[] {
  const state = runState(view, ageOf);
  const first = view.ranks[0].rank;
  const ofRun = [...processRows(state, limits), ...markRows(view), ...rankRows(view)];
  const several = view.ranks.length > 1;
  const start = startOf(view);
  return [
    ...ofRun.map((row) => ({ ...row, rank: first, anomaly: row.rule })),
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

/**
 * When the process that owns the folder took it, in seconds since 1970. What was written before is of a process that was
 * killed: the owner must not be judged by it.
 */
function startOf({ owner }: RunView): number {
  const start = owner ? Date.parse(owner.run_start) / 1000 : 0;
  return Number.isFinite(start) ? start : 0;
}

const ANOMALY_NAMES: Readonly<Record<string, string>> = {
  heartbeat: 'heartbeat_stall',
  section: 'section_stall',
  loss: 'nonfinite_loss',
  gate_entropy: 'gate_collapse',
  gate_collapse: 'gate_collapse',
  grad_zero: 'gradient_zero',
  flatline: 'throughput_flatline',
};

function processRows(state: RunState, { gone }: Thresholds): Row[] {
  const limit = `gone for ${gone} s`;
  switch (state.kind) {
    case 'running':
      return [green('process', state.where, limit)];
    case 'ended':
      return [judge('process', state.how !== 'stop: done', 'yellow', state.how, limit)];
    case 'empty':
      return [judge('process', true, 'yellow', 'nothing has started here yet', limit)];
    case 'gone': {
      const level = state.seconds > gone ? 'red' : 'yellow';
      return [judge('process', true, level, `gone for ${Math.round(state.seconds)} s`, limit)];
    }
  }
}

function markRows({ halt, anomaly, problems }: RunView): Row[] {
  return [
    judge('halt', halt !== undefined, 'yellow', halt ?? 'none', '.HALT'),
    judge('anomaly', anomaly !== undefined, 'red', anomaly ?? 'none', '.anomaly_type'),
    judge('files', problems.length > 0, 'yellow', problems.join('; ') || 'readable', 'readable'),
  ];
}

/** Ranks advance together: a rank that is missing or behind has dropped out of the run. */
function rankRows({ ranks }: RunView): Row[] {
  const world = ranks[0].beats.at(-1)?.world ?? 1;
  if (world < 2) return [];
  const limit = `${world} ranks within ${RANK_STEPS} steps`;
  const missing = Array.from({ length: world }, (_, rank) => rank).filter(
    (rank) => !ranks.some((one) => one.rank === rank),
  );
  if (missing.length > 0) return [judge('ranks', true, 'yellow', `no heartbeat of rank ${missing.join(', ')}`, limit)];
  const steps = ranks.map(({ beats }) => beats.at(-1)?.step ?? 0);
  const [first, last] = [Math.max(...steps), Math.min(...steps)];
  const behind = ranks.filter((_, i) => steps[i] === last).map(({ rank }) => rank);
  const value = first === last ? `all at step ${first}` : `rank ${behind.join(', ')} at step ${last} of ${first}`;
  return [judge('ranks', first - last > RANK_STEPS, 'yellow', value, limit)];
}

function livenessRows(
  { rank, beats, section }: RankView,
  state: RunState,
  limits: Thresholds,
  ageOf: AgeOf,
  start: number,
): Row[] {
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
  const rows: Row[] = [];
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

function numberRows(view: RunView, { rank, beats }: RankView, limits: Thresholds, start: number): Row[] {
  const path = view.paths.heartbeat(rank);
  const current = sinceBoot(beats).filter(({ ts }) => ts >= start);
  const steps = current.filter(({ msg }) => msg === 'progress');
  const last = steps.at(-1);
  return [
    lossRow(current),
    ...(last
      ? [...gateRows(steps, last, limits), ...gradientRows(steps, limits), ...fetchRows(steps, last, limits)]
      : []),
    ...(last ? [flatlineRow(steps, limits), ...lossFlatline(steps, limits)] : []),
    ...(last ? [throughputRow(path, last, limits), counterRow(steps), memoryRow(path, last)] : []),
  ];
}

/** Heartbeats of the current process. */
function sinceBoot(beats: readonly Heartbeat[]): readonly Heartbeat[] {
  return beats.slice(beats.findLastIndex(({ msg }) => msg === 'boot') + 1);
}

function lossRow(beats: readonly Heartbeat[]): Row {
  const isBad = ({ loss, grad_norm: norm }: Heartbeat) =>
    (loss !== undefined && !Number.isFinite(loss)) || (norm !== undefined && !Number.isFinite(norm));
  const bad = beats.find(isBad);
  const value = bad ? `loss ${bad.loss}, gradient norm ${bad.grad_norm} at step ${bad.step}` : lastLoss(beats);
  return judge('loss', bad !== undefined, 'red', value, 'finite');
}

function lastLoss(beats: readonly Heartbeat[]): number | null {
  return beats.findLast(({ loss, msg }) => loss !== undefined && msg === 'progress')?.loss ?? null;
}

function gateRows(steps: readonly Heartbeat[], last: Heartbeat, limits: Thresholds): Row[] {
  // A schedule closes the gates of a converted model on purpose (train.gate_release_steps).
  const free = steps.filter(({ gate_released: released }) => released === undefined);
  const entropies = free.flatMap(({ gate_entropy_mean: entropy }) => entropy ?? []);
  if (last.gate_released !== undefined) return [];
  if (entropies.length === 0) return []; // dense attention has no gates
  const newest = entropies.slice(-limits.gateCollapseN);
  const collapsed =
    newest.length === limits.gateCollapseN && newest.every((entropy) => entropy < limits.gateEntropyMin);
  const entropy = round(entropies.at(-1)!);
  const limit = `${limits.gateEntropyMin} for ${limits.gateCollapseN} heartbeats`;
  const rows = [
    collapsed
      ? judge('gate_entropy', true, 'red', entropy, limit)
      : judge('gate_entropy', entropy <= 0.5, 'yellow', entropy, `${limit}; good above 0.5`),
  ];
  const { gate_collapse_frac: share, gate_max_gate_mean: largest } = last;
  if (share !== undefined) rows.push(collapseRow(share, limits));
  if (largest !== undefined)
    rows.push(judge('gate_max', largest >= limits.gateMax, 'yellow', round(largest), limits.gateMax));
  return rows;
}

/** The share of collapsed gates: critical, a warning, or green. */
export function collapseRow(share: number, { collapseWarning, collapseCritical }: Thresholds): Row {
  const isCritical = share > collapseCritical;
  const limit = isCritical ? collapseCritical : collapseWarning;
  return judge('gate_collapse', share > limit, isCritical ? 'red' : 'yellow', round(share), limit);
}

function gradientRows(steps: readonly Heartbeat[], { gradZeroN, gradSpike }: Thresholds): Row[] {
  const norms = steps.flatMap(({ grad_norm: norm }) => norm ?? []);
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

function fetchRows(steps: readonly Heartbeat[], last: Heartbeat, limits: Thresholds): Row[] {
  const times = steps.flatMap(({ dt_fetch_s: seconds }) => seconds ?? []);
  if (times.length === 0) return [];
  const recent = median(times.slice(-RECENT_FETCHES));
  const usual = median(times);
  const ratio = times.length >= ENOUGH && recent > FETCH_FLOOR_S && usual > 0 ? recent / usual : 0;
  const { fetch_p95_ms: p95 } = last;
  return [
    judge('fetch', recent > limits.fetch, 'yellow', round(recent), limits.fetch),
    judge('fetch_stall', ratio > limits.fetchRatio, 'yellow', round(ratio), `${limits.fetchRatio} times the usual`),
    ...(p95 === undefined ? [] : [judge('fetch_p95', p95 >= limits.fetchP95, 'yellow', round(p95), limits.fetchP95)]),
  ];
}

function flatlineRow(steps: readonly Heartbeat[], { flatlineN }: Thresholds): Row {
  const newest = steps.slice(-flatlineN);
  const isFlat =
    flatlineN > 0 &&
    newest.length === flatlineN &&
    newest.every(({ toks_per_s: rate }) => rate !== undefined && !(rate > 0));
  return judge(
    'flatline',
    isFlat,
    'red',
    round(steps.at(-1)!.toks_per_s ?? Number.NaN),
    `0 for ${flatlineN} heartbeats`,
  );
}

function lossFlatline(steps: readonly Heartbeat[], { lossFlatlineN: n }: Thresholds): Row[] {
  if (n === 0) return [];
  const newest = steps.slice(-n);
  const isFlat = newest.length === n && newest.every(({ loss }) => loss === newest[0].loss);
  return [judge('loss_flatline', isFlat, 'yellow', newest.at(-1)!.loss ?? null, `the same for ${n} heartbeats`)];
}

/** Compares the window with the whole run before it, so that a slow decline is detected too. */
function throughputRow(path: string, last: Heartbeat, { throughputDrop, throughputWindow }: Thresholds): Row {
  const begin = last.ts - throughputWindow;
  const sample = (from: number, to: number) =>
    sampleHeartbeats(path, from, to, SAMPLES).filter(
      ({ msg, toks_per_s: rate }) => msg === 'progress' && rate !== undefined,
    );
  const usual = sample(0, begin).map(({ toks_per_s: rate }) => rate!);
  const recent = sample(begin, Number.POSITIVE_INFINITY);
  const limit = `${round(100 * (1 - throughputDrop))} % of the usual for ${throughputWindow} s`;
  // After a pause the window is not fully covered yet.
  const isCovered = recent.length >= 2 && recent[0].ts - begin < throughputWindow * (1 - SLOW_SHARE);
  if (usual.length < ENOUGH || !isCovered) return green('throughput', round(last.toks_per_s ?? Number.NaN), limit);
  const rates = recent.map(({ toks_per_s: rate }) => rate!);
  const floor = (1 - throughputDrop) * median(usual);
  const slow = rates.filter((rate) => rate < floor).length / rates.length;
  const share = round((100 * median(rates)) / median(usual), 3);
  return judge('throughput', slow >= SLOW_SHARE, 'yellow', `${share} % of the usual`, limit);
}

/** Counters of fallbacks and failures must not grow. */
function counterRow(steps: readonly Heartbeat[]): Row {
  const [first, last] = [steps[0], steps.at(-1)!];
  const grown = fallbackCounters(last)
    .map(([name, count]) => ({ name, by: count - (first[name] ?? 0) }))
    .filter(({ by }) => by > 0);
  const value = grown.map(({ name, by }) => `${name.slice(3)} +${by}`).join(', ') || '0';
  return judge('fallbacks', grown.length > 0, 'yellow', value, `no growth in ${steps.length} steps`);
}

/** Compares with the whole life of the process: a small leak per step is not visible in a few hundred steps. */
function memoryRow(path: string, last: Heartbeat): Row {
  const sizes = sampleHeartbeats(path, 0, last.ts, SAMPLES).flatMap(({ pid, gpu_mem_reserved: mib }) =>
    pid === last.pid && mib !== undefined ? [mib] : [],
  );
  const after = last.gpu_mem_reserved ?? 0;
  const before = sizes.length >= ENOUGH ? median(sizes.slice(0, sizes.length / 4)) : after;
  const rises = sizes.filter((size, i) => i > 0 && size > Math.max(...sizes.slice(0, i))).length;
  const isGrowing = after > before * MEMORY_GROWTH && after - before > MEMORY_FLOOR_MIB && rises >= MEMORY_RISES;
  return judge('memory', isGrowing, 'yellow', after, `flat (${before} MiB before)`);
}

/** `now` in seconds since 1970. */
export function checkHealth(dir: string, thresholds: Thresholds, now: number = Date.now() / 1000): Verdict {
  return verdict(healthFindings(readRun(dir), thresholds, wallAges(now)));
}
