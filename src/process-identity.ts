/** Whether processes of this machine still run, told apart from later ones with the same pid. */
import { type BigIntStats, lstatSync, readdirSync, readFileSync, statSync } from 'node:fs';
import { hostname } from 'node:os';

export interface ProcessIdentity {
  pid: number;
  host: string;
  /** Clock ticks from the start of the machine to that of the process; null without /proc. */
  process_start: number | null;
  /** Changes with every start of the machine; null without /proc. */
  boot_id: string | null;
}

export function ownIdentity(): ProcessIdentity {
  return identityOf(process.pid);
}

/** The identity of a process of this machine. */
export function identityOf(pid: number): ProcessIdentity {
  const boot = readProc('/proc/sys/kernel/random/boot_id')?.trim() ?? null;
  return { pid, host: hostname(), process_start: startOf(pid), boot_id: boot };
}

/** Whether exactly this process still runs; undefined for a process of another host. */
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
    // EPERM: the process exists and belongs to another user.
    return (error as NodeJS.ErrnoException).code === 'EPERM';
  }
}

/** The state of a process on this machine. A zombie counts as gone: it has ended, only its exit status is uncollected. */
export function processState(pid: number): 'gone' | 'stopped' | 'running' {
  const state = statOf(pid)?.[0];
  if (state === undefined) return pidExists(pid) ? 'running' : 'gone'; // no /proc on this system, or no such process
  if (state === 'Z' || state === 'X') return 'gone';
  return state === 'T' || state === 't' ? 'stopped' : 'running';
}

/**
 * Whether a process has one of these files open: only then are the files its own, whatever is written in them. Undefined
 * where this cannot be told: on systems without /proc, and about processes of other users.
 */
export function holdsOpen(pid: number, paths: readonly string[]): boolean | undefined {
  const identity = (facts: BigIntStats | undefined) => facts && `${facts.dev}:${facts.ino}`;
  // Not through links, which could lead to a file that any other process has open.
  const wanted = new Set(paths.map((path) => identity(lstatSync(path, { bigint: true, throwIfNoEntry: false }))));
  const folder = `/proc/${pid}/fd`;
  try {
    return readdirSync(folder).some((name) => {
      const found = identity(statSync(`${folder}/${name}`, { bigint: true, throwIfNoEntry: false }));
      return found !== undefined && wanted.has(found);
    });
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === undefined) throw error;
    return undefined;
  }
}

/** The process that started `pid`; undefined if there is no such process, or no /proc. */
export function parentOf(pid: number): number | undefined {
  const fields = statOf(pid);
  return fields && Number(fields[1]);
}

/** Field 22 of /proc/<pid>/stat; null if there is no such process or it is a zombie. */
function startOf(pid: number): number | null {
  const fields = statOf(pid);
  if (fields === undefined) return null;
  return fields[0] === 'Z' || fields[0] === 'X' ? null : Number(fields[19]);
}

/** The fields of /proc/<pid>/stat from the third (the state) on. */
function statOf(pid: number): string[] | undefined {
  const stat = readProc(`/proc/${pid}/stat`);
  // The name in parentheses may itself contain spaces and parentheses: count from the last one.
  return stat?.slice(stat.lastIndexOf(')') + 2).split(' ');
}

function readProc(path: string): string | undefined {
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === undefined) throw error;
    return undefined; // no /proc on this system, or the process has just ended
  }
}
