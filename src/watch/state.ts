/** The state of a run: one definition for status, health, watch, check, report, dashboard and resume. */
import { processState } from '../process-identity.js';
import type { EndStatus, Heartbeat } from '../run/logs/heartbeat.js';
import type { RankView, RunView } from '../run/reader.js';
import type { AgeOf } from './ages.js';

export type StateName =
  | 'not started'
  /** Its process is alive and has done no step. */
  | 'starting'
  | 'running'
  /** Its process is alive and suspended (SIGSTOP). */
  | 'suspended'
  | 'done'
  /** By a signal or by the program that called it. */
  | 'stopped'
  /** By .HALT, by numbers that are not finite or by ranks that differ. */
  | 'halted'
  /** The data source gave up. */
  | 'gave up'
  /** By an error. */
  | 'failed'
  /** Its process is gone without having written an end. */
  | 'died'
  /** Its process is on another host, or there is no lock, and there are no heartbeats. */
  | 'unknown';

export interface RunState {
  readonly name: StateName;
  /** The same in four words, as `state` in JSON. */
  readonly kind: 'running' | 'ended' | 'gone' | 'empty';
  /** Where it runs; how it ended, with the kind of its last heartbeat; empty otherwise. */
  readonly detail: string;
  /** Where it runs, who asked for the end, or why it ended. */
  readonly reason: string;
  /** Somebody asked for the end: a signal or .HALT, without an anomaly. */
  readonly isAsked: boolean;
  /** In place of which source the newest step had synthetic tokens; empty if the data are those of the config. */
  readonly synthetic: string;
  /** Since the last heartbeat of rank 0; 0 without one. */
  readonly seconds: number;
}

/** How the end of a rank begins that could not go on without another one (src/train/ranks/monitor.ts). */
const OF_ANOTHER_RANK = /^(rank \d+ on |all ranks have been waiting|the data source of another rank)/;

/** A process that cannot be seen is believed to live this long after its last sign of life, */
const STALE_S = 300;
/** or this long in a section without heartbeats. */
const SILENT_S = 900;
/** Sections in which a healthy run writes no heartbeats. */
export const SILENT_SECTIONS: ReadonlySet<string> = new Set(['save', 'eval', 'sample', 'boot']);

const NAMES: Readonly<Record<EndStatus, StateName>> = {
  done: 'done',
  signalled: 'stopped',
  halted: 'halted',
  'non-finite': 'halted',
  'ranks-differ': 'halted',
  'no-data': 'gave up',
  'out-of-memory': 'failed',
  failed: 'failed',
};

export function runState(view: RunView, ageOf: AgeOf): RunState {
  const { owner, ranks } = view;
  const [first] = ranks;
  const last = first.beats.at(-1);
  const seconds = last ? Math.max(0, ageOf(`beat ${first.rank}`, last.ts)) : 0;
  const state = (name: StateName, kind: RunState['kind'], reason: string, detail = reason): RunState => ({
    name,
    kind,
    detail,
    reason,
    isAsked: false,
    synthetic: syntheticData(view),
    seconds,
  });
  const start = startOf(view);
  if (owner?.alive) {
    const where = `pid ${owner.pid}`;
    if (processState(owner.pid) === 'stopped') return state('suspended', 'running', `${where}, suspended`);
    return state(hasStepped(first, start) ? 'running' : 'starting', 'running', where);
  }
  const end = endOf(ranks, start);
  if (end) {
    const name = NAMES[endStatus(end)];
    const why = end.detail ?? 'no reason given';
    const isAsked = (name === 'stopped' || endStatus(end) === 'halted') && view.anomaly === undefined;
    const isNamed = ranks.length === 1 || OF_ANOTHER_RANK.test(why);
    const reason = name === 'failed' || name === 'gave up' ? (isNamed ? why : `rank ${end.rank}: ${why}`) : why;
    return { ...state(name, 'ended', reason, `${end.msg}: ${why}`), isAsked };
  }
  if (owner?.alive === false) {
    const lost = `process ${owner.pid} is gone and wrote no end`;
    return last ? state('died', 'gone', lost, '') : state('died', 'empty', lost, '');
  }
  if (!last && !owner) return state('not started', 'empty', 'nothing has been written', '');
  const { section } = first;
  const sign = Math.min(
    last ? seconds : Number.POSITIVE_INFINITY,
    section ? ageOf(`section ${first.rank}`, section.ts) : Number.POSITIVE_INFINITY,
    owner ? ageOf('lock', start) : Number.POSITIVE_INFINITY,
  );
  const limit = owner && section && SILENT_SECTIONS.has(section.section) ? SILENT_S : STALE_S;
  if (owner) {
    const where = `pid ${owner.pid} on ${owner.host}`;
    if (sign <= limit) return state(hasStepped(first, start) ? 'running' : 'starting', 'running', where);
    return state('unknown', 'gone', `${where}, without a heartbeat for ${Math.round(sign)} s`, '');
  }
  if (seconds <= STALE_S) return state('running', 'running', 'no lock: judged by its heartbeats');
  return state('unknown', 'gone', `no lock, and no heartbeat for ${Math.round(seconds)} s`, '');
}

/**
 * When the process that owns the folder took it, in seconds since 1970. What was written before is of a process that was
 * killed: the owner must not be judged by it.
 */
export function startOf({ owner }: RunView): number {
  const start = owner ? Date.parse(owner.run_start) / 1000 : 0;
  return Number.isFinite(start) ? start : 0;
}

function hasStepped({ beats }: RankView, start: number): boolean {
  const newest = beats.at(-1);
  return newest !== undefined && newest.ts >= start && newest.msg !== 'boot' && newest.msg !== 'loader_ready';
}

/** The heartbeat that says how the run ended: of rank 0, or of the rank that failed first. */
export function endOf(ranks: readonly RankView[], start: number): Heartbeat | undefined {
  const ends = ranks.flatMap(({ beats }) => {
    const last = beats.at(-1);
    return last && last.ts >= start && ['stop', 'halt', 'loader_error'].includes(last.msg) ? last : [];
  });
  const failures = ends.filter((end) => ['failed', 'gave up'].includes(NAMES[endStatus(end)]));
  const own = ends.find(({ rank }) => rank === ranks[0].rank);
  if (own && !failures.includes(own)) return own;
  // A rank that ended because another was lost is the consequence, whatever its clock says.
  const isConsequence = ({ detail = '' }: Heartbeat) => Number(OF_ANOTHER_RANK.test(detail));
  return failures.sort((a, b) => isConsequence(a) - isConsequence(b) || a.ts - b.ts)[0];
}

/** Files of earlier versions have no status. */
export function endStatus({ status, msg, detail = '' }: Heartbeat): EndStatus {
  if (status !== undefined && status in NAMES) return status;
  if (msg === 'loader_error') return 'no-data';
  if (msg === 'stop') return detail === 'done' ? 'done' : 'signalled';
  if (detail.startsWith('.HALT')) return 'halted';
  return detail.startsWith('nonfinite') ? 'non-finite' : 'failed';
}

/** The data of the newest step against those of the config. */
function syntheticData({ ranks: [{ beats }], settings: { source } }: RunView): string {
  const newest = beats.findLast(({ data }) => data !== undefined);
  if (source === 'synthetic' || newest?.data !== 'synthetic') return '';
  return `SYNTHETIC data in place of ${source ?? 'the source of the config'}`;
}

/** The state in words, for the first line of a report: name, reason, and data that are not those of the config. */
export function stateText({
  name,
  reason,
  synthetic = '',
}: Pick<RunState, 'name' | 'reason'> & { readonly synthetic?: string | null }): string {
  const isUp = name === 'running' || name === 'starting';
  const text = name === 'done' ? name : isUp ? `${name} (${reason})` : `${name}: ${reason}`;
  return synthetic ? `${text}; ${synthetic}` : text;
}
