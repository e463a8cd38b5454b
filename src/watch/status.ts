/** Progress and state of a run. */
import { median } from '../numbers.js';
import { listCheckpoints } from '../run/checkpoint/read.js';
import type { Heartbeat } from '../run/logs/heartbeat.js';
import { type RankView, readRun } from '../run/reader.js';
import { adviceFor } from './advice.js';
import { type AgeOf, wallAges } from './ages.js';
import { runState, type StateName } from './state.js';

/** The JSON of `status`: one per run. */
export interface RunStatus {
  readonly run: string;
  readonly dir: string;
  readonly state: 'running' | 'ended' | 'gone' | 'empty';
  /** Where it runs, or how it ended. */
  readonly detail: string;
  /** The state in full, of which `state` is the kind. */
  readonly status: StateName;
  /** Where it runs, who asked for its end, or why it ended. */
  readonly reason: string;
  /** The next thing to do; empty if there is nothing. */
  readonly advice: string;
  /** In place of which source the newest step had synthetic tokens; null if the data are those of the config. */
  readonly synthetic: string | null;
  readonly step: number | null;
  readonly steps: number | null;
  readonly loss: number | null;
  readonly val_loss: number | null;
  readonly tokens_per_s: number | null;
  readonly seconds_left: number | null;
  readonly heartbeat_age_s: number | null;
  /** Step of the newest checkpoint. */
  readonly checkpoint: number | null;
  readonly section: string | null;
  /** All ranks if there are several, else empty. */
  readonly ranks: readonly RankStatus[];
  readonly halt: string | null;
  readonly anomaly: string | null;
  readonly problems: readonly string[];
}

export interface RankStatus {
  readonly rank: number;
  readonly step: number | null;
  readonly section: string | null;
  /** Seconds in this section. */
  readonly section_age_s: number | null;
  readonly heartbeat_age_s: number | null;
}

/** `now` in seconds since 1970; `options` as for `readRun`. */
export function runStatus(dir: string, now: number = Date.now() / 1000, options: { beats?: number } = {}): RunStatus {
  const view = readRun(dir, options);
  const ageOf = wallAges(now);
  const state = runState(view, ageOf);
  const { beats, section } = view.ranks[0];
  const progress = beats.filter(({ msg }) => msg === 'progress');
  const [last, newest] = [progress.at(-1), beats.at(-1)];
  const { steps } = view.settings;
  const step = newest?.step ?? null;
  const isRunning = state.kind === 'running';
  return {
    run: view.name,
    dir: view.dir,
    state: state.kind,
    detail: state.detail,
    status: state.name,
    reason: state.reason,
    advice: adviceFor(state, view),
    synthetic: state.synthetic || null,
    step,
    steps,
    loss: last?.loss ?? null,
    val_loss: view.val.at(-1)?.val_loss ?? null,
    tokens_per_s:
      isRunning && last ? median(progress.slice(-16).map(({ toks_per_s: rate = Number.NaN }) => rate)) : null,
    seconds_left: isRunning && steps !== null && step !== null ? secondsLeft(progress, steps - step) : null,
    heartbeat_age_s: newest ? Math.max(0, ageOf('beat', newest.ts)) : null,
    checkpoint: listCheckpoints(view.paths.checkpoints).find(({ manifest }) => manifest)?.step ?? null,
    section: isRunning ? (section?.section ?? null) : null,
    ranks: view.ranks.length > 1 ? view.ranks.map((one) => rankStatus(one, isRunning, ageOf)) : [],
    halt: view.halt ?? null,
    anomaly: view.anomaly ?? null,
    problems: view.problems,
  };
}

function rankStatus({ rank, beats, section }: RankView, isRunning: boolean, ageOf: AgeOf): RankStatus {
  const newest = beats.at(-1);
  const inside = isRunning ? section : undefined;
  return {
    rank,
    step: newest?.step ?? null,
    section: inside?.section ?? null,
    section_age_s: inside ? Math.max(0, ageOf(`section ${rank}`, inside.ts)) : null,
    heartbeat_age_s: newest ? Math.max(0, ageOf(`beat ${rank}`, newest.ts)) : null,
  };
}

/** Estimated from the time between heartbeats, which includes saves and evaluations. */
function secondsLeft(progress: readonly Heartbeat[], steps: number): number | null {
  const [first, last] = [progress[0], progress.at(-1)];
  if (!first || !last || last.step <= first.step || last.ts < first.ts) return null;
  return ((last.ts - first.ts) / (last.step - first.step)) * steps;
}
