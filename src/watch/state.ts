/** Whether a run is active, finished, or has died. */
import type { RunView } from '../run/run-reader.js';
import type { AgeOf } from './ages.js';

export type RunState =
  /** Its process lives, or (on another host, or without a lock) its heartbeats are all there is to judge by. */
  | { readonly kind: 'running'; readonly where: string }
  /** It said so itself: done, halted, stopped by a signal. */
  | { readonly kind: 'ended'; readonly how: string }
  /** The process that owned the folder is not there any more and never said that it ends. */
  | { readonly kind: 'gone'; readonly seconds: number }
  /** Nothing has been written yet. */
  | { readonly kind: 'empty' };

/** A run without a lock is a copy of one that goes on elsewhere, or it died of an error: after this long, the latter. */
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
