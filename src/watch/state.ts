/** The state of a run: running, ended, gone or empty. */
import type { RunView } from '../run/reader.js';
import type { AgeOf } from './ages.js';

export type RunState =
  /** Its process is alive; on another host or without a lock, judged by its heartbeats. */
  | { readonly kind: 'running'; readonly where: string }
  /** It reported its end: done, halted or stopped by a signal. */
  | { readonly kind: 'ended'; readonly how: string }
  /** The owner of the folder is gone and did not report an end. */
  | { readonly kind: 'gone'; readonly seconds: number }
  /** Nothing has been written yet. */
  | { readonly kind: 'empty' };

/** A run without a lock is a copy of an active run, or it failed; after this time without heartbeats, it failed. */
const LOCKLESS_S = 300;

export function runState({ owner, ranks }: RunView, ageOf: AgeOf): RunState {
  const last = ranks[0].beats.at(-1);
  if (owner?.alive) return { kind: 'running', where: `pid ${owner.pid}` };
  if (last && (last.msg === 'stop' || last.msg === 'halt'))
    return { kind: 'ended', how: `${last.msg}: ${last.detail ?? 'no reason given'}` };
  if (owner?.alive === undefined && owner) return { kind: 'running', where: `pid ${owner.pid} on ${owner.host}` };
  if (!last) return { kind: 'empty' };
  const seconds = Math.max(0, ageOf(`beat ${ranks[0].rank}`, last.ts));
  if (owner || seconds > LOCKLESS_S) return { kind: 'gone', seconds };
  return { kind: 'running', where: 'no lock: judged by its heartbeats' };
}
