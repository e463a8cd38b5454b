/** Telling one process from another that later got the same pid. */
import { readFileSync } from 'node:fs';
import { hostname } from 'node:os';
import { errorCode } from './atomic.js';

export interface ProcessIdentity {
  pid: number;
  host: string;
  /** Clock ticks between the start of the machine and of the process; null where there is no /proc. */
  process_start: number | null;
  /** Changes with every start of the machine; null where there is no /proc. */
  boot_id: string | null;
}

export function ownIdentity(): ProcessIdentity {
  const boot = readProc('/proc/sys/kernel/random/boot_id')?.trim() ?? null;
  return { pid: process.pid, host: hostname(), process_start: startOf(process.pid), boot_id: boot };
}

/** Whether that very process still runs. Of another host nothing is known: `undefined`. */
export function isAlive(identity: ProcessIdentity): boolean | undefined {
  const own = ownIdentity();
  if (identity.host !== own.host) return undefined;
  if (identity.boot_id !== null && own.boot_id !== null && identity.boot_id !== own.boot_id) return false;
  if (!pidExists(identity.pid)) return false;
  if (own.process_start === null) return true;
  const start = startOf(identity.pid);
  return start !== null && (identity.process_start === null || start === identity.process_start);
}

/** Whether a process has this pid now. */
export function pidExists(pid: number): boolean {
  if (!Number.isSafeInteger(pid) || pid <= 0) return false;
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    // EPERM: it is there, but belongs to somebody else.
    return errorCode(error) === 'EPERM';
  }
}

/** The state of a process on this machine. A zombie counts as gone: it has ended, only its exit status is uncollected. */
export function processState(pid: number): 'gone' | 'stopped' | 'running' {
  const state = statOf(pid)?.[0];
  if (state === undefined) return pidExists(pid) ? 'running' : 'gone'; // no /proc on this system, or no such process
  if (state === 'Z' || state === 'X') return 'gone';
  return state === 'T' || state === 't' ? 'stopped' : 'running';
}

/** Field 22 of /proc/<pid>/stat; null when there is no such process, or only its zombie. */
function startOf(pid: number): number | null {
  const fields = statOf(pid);
  if (fields === undefined) return null;
  return fields[0] === 'Z' || fields[0] === 'X' ? null : Number(fields[19]);
}

/** The fields of /proc/<pid>/stat from the third on, which is the state. */
function statOf(pid: number): string[] | undefined {
  const stat = readProc(`/proc/${pid}/stat`);
  // The name in parentheses may hold spaces and parentheses of its own: count from the last one.
  return stat?.slice(stat.lastIndexOf(')') + 2).split(' ');
}

function readProc(path: string): string | undefined {
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    if (errorCode(error) === undefined) throw error;
    return undefined; // No /proc on this system, or the process has just gone: both are answers.
  }
}
