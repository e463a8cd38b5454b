/** The two writes of the dashboard: halt a run after its step, and save a checkpoint now. */
import { UsageError } from '../errors.js';
import { isRunProcess, readLockOwner } from '../run/lock.js';
import { runPaths } from '../run/paths.js';
import { haltRun } from '../watch/halt.js';

/** The result of a request, for the page. */
export interface Control {
  readonly message: string;
}

/** Writes .HALT; does not wait for the end. */
export async function requestHalt(dir: string, reason: string): Promise<Control> {
  const { status, detail } = await haltRun(dir, { reason, timeout: 0 });
  if (status === 'ended') throw new UsageError(`the run has ended already (${detail})`);
  return { message: 'the run stops after its step and a checkpoint' };
}

/** Sends SIGUSR2 to the process that owns the folder. */
export function requestSave(dir: string): Control {
  const owner = readLockOwner(runPaths(dir).lock);
  if (!owner) throw new UsageError('no active run in this folder');
  if (owner.alive === undefined)
    throw new UsageError(`the run is on ${owner.host}: send SIGUSR2 to process ${owner.pid} there`);
  if (!owner.alive) throw new UsageError('the process of the run is gone');
  // A lock is a file that anybody may have written, and SIGUSR2 ends most programs.
  if (!isRunProcess(dir, owner.pid))
    throw new UsageError(`process ${owner.pid} does not write this run; if it trains here, send it SIGUSR2 yourself`);
  process.kill(owner.pid, 'SIGUSR2');
  return { message: 'a checkpoint is saved after the step' };
}
