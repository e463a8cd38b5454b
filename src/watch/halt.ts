/** Stops a run gracefully: writes .HALT and waits until its process has exited. */
import { setTimeout } from 'node:timers/promises';
import { UsageError } from '../errors.js';
import { listCheckpoints } from '../run/checkpoint/read.js';
import { writeHalt } from '../run/paths.js';
import { readRun } from '../run/reader.js';
import { wallAges } from './ages.js';
import { runState, stateText } from './state.js';

export interface HaltOptions {
  readonly reason: string;
  /** Seconds to wait for the end; 0 does not wait. */
  readonly timeout: number;
}

/** The JSON of `halt`. */
export interface HaltResult {
  /** ended: the run is over. waiting: it was still active at the timeout. */
  readonly status: 'ended' | 'waiting';
  /** The state of the run in words, as `health` prints it. */
  readonly state: string;
  readonly detail: string;
  readonly step: number | null;
  readonly checkpoint: number | null;
  readonly seconds: number;
}

const POLL_MS = 100;

export async function haltRun(dir: string, { reason, timeout }: HaltOptions): Promise<HaltResult> {
  const started = performance.now();
  const look = () => {
    const view = readRun(dir, { beats: 8 });
    return { view, state: runState(view, wallAges()) };
  };
  const answer = ({ view, state }: ReturnType<typeof look>, status: HaltResult['status']): HaltResult => ({
    status,
    state: stateText(state),
    detail: state.kind === 'ended' ? state.detail : state.kind,
    step: view.ranks[0].beats.at(-1)?.step ?? null,
    checkpoint: listCheckpoints(view.paths.checkpoints).find(({ manifest }) => manifest)?.step ?? null,
    seconds: (performance.now() - started) / 1000,
  });
  let seen = look();
  if (seen.state.kind === 'ended') return answer(seen, 'ended');
  // Without an active run the file would remain until the next start removes it.
  if (seen.view.owner === undefined || seen.state.name === 'died')
    throw new UsageError(`${dir}: no active run; see trefoil status`);
  writeHalt(seen.view.dir, reason);
  while ((performance.now() - started) / 1000 < timeout) {
    seen = look();
    const isOver = seen.state.kind === 'ended' && seen.view.owner === undefined;
    if (isOver || seen.state.name === 'died') return answer(seen, 'ended');
    await setTimeout(POLL_MS);
  }
  return answer(seen, 'waiting');
}
