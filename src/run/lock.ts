/** The lock of a run folder: two trainers in one folder would mix their files. */
import { randomUUID } from 'node:crypto';
import { closeSync, openSync, rmSync, writeSync } from 'node:fs';
import { UsageError } from '../errors.js';
import { errorCode, fileError, parseObject, readText, statOrUndefined } from '../files.js';
import { isPlainObject } from '../json-values.js';
import { holdsOpen, isAlive, ownIdentity, type ProcessIdentity } from '../process-identity.js';
import { runPaths } from './paths.js';

export interface LockOwner extends ProcessIdentity {
  /** When the run took the lock, ISO 8601. */
  run_start: string;
  /** Tells this lock from every other one. */
  nonce: string;
}

export interface RunLock {
  readonly path: string;
  readonly owner: LockOwner;
  /** Gives the folder free; a lock that somebody else holds by now is left alone. */
  release(): void;
}

/** A lock without content is one being written; if it stays so, its writer died between two system calls. */
const UNFINISHED_MS = 5_000;
/** Times WAIT_MS longer than UNFINISHED_MS, so that one call sees an unfinished lock through to its end. */
const ATTEMPTS = 400;
const WAIT_MS = 20;
/** A longer file is no lock of ours. */
const LOCK_BYTES = 65_536;
const UNKNOWN_START = { process_start: null, boot_id: null };

/** Takes the lock at `path`; refused while its owner lives, taken over when the owner is dead. */
export function acquireLock(path: string): RunLock {
  for (let attempt = 0; attempt < ATTEMPTS; attempt++) {
    const lock = tryCreate(path);
    if (lock) return lock;
    const found = readLock(path);
    if (found === 'gone') continue;
    if (found === 'unfinished') {
      wait();
      continue;
    }
    if (found !== 'damaged' && isAlive(found) !== false) throw refusal(path, found);
    removeDeadLock(path, found);
  }
  throw new UsageError(`${path}: several processes compete for this folder; try again with one`);
}

/** Throws what `acquireLock` would throw now because the owner lives; takes nothing. */
export function refuseLiveOwner(path: string): void {
  const found = readLock(path);
  if (typeof found !== 'string' && isAlive(found) !== false) throw refusal(path, found);
}

/** The owner of the lock and whether it lives (undefined: on another host); undefined when the folder is free. */
export function readLockOwner(path: string): (LockOwner & { alive: boolean | undefined }) | undefined {
  const found = readLock(path);
  return typeof found === 'string' ? undefined : { ...found, alive: isAlive(found) };
}

/** Whether a process writes the run in `dir`: it holds the heartbeats of rank 0 or its section file open. */
export function isRunProcess(dir: string, pid: number): boolean {
  const { heartbeat, section } = runPaths(dir);
  return holdsOpen(pid, [heartbeat(0), section(0)]) === true;
}

function tryCreate(path: string): RunLock | undefined {
  const owner: LockOwner = { ...ownIdentity(), run_start: new Date().toISOString(), nonce: randomUUID() };
  let descriptor: number;
  try {
    descriptor = openSync(path, 'wx');
  } catch (error) {
    if (errorCode(error) === 'EEXIST') return undefined;
    throw fileError('lock', path, error);
  }
  try {
    writeSync(descriptor, `${JSON.stringify(owner)}\n`);
  } catch (error) {
    rmSync(path, { force: true });
    throw fileError('lock', path, error);
  } finally {
    closeSync(descriptor);
  }
  const release = (): void => {
    if (isSameLock(readLock(path), owner)) rmSync(path, { force: true });
  };
  return { path, owner, release };
}

/**
 * Two processes may find the same dead lock at once; if each removed it blindly, the slower one would remove the new lock
 * of the faster. So removing needs a lock of its own, and its holder checks again before removing.
 */
function removeDeadLock(path: string, dead: LockOwner | 'damaged'): void {
  const removalPath = `${path}.takeover`;
  const removal = tryCreate(removalPath);
  if (!removal) {
    const remover = readLock(removalPath);
    // A remover lives for a moment only. If it died, its lock is removed the same way, one level further down.
    if (remover === 'damaged' || (typeof remover !== 'string' && isAlive(remover) === false)) {
      removeDeadLock(removalPath, remover);
    } else wait();
    return;
  }
  try {
    if (isSameLock(readLock(path), dead)) rmSync(path, { force: true });
  } finally {
    removal.release();
  }
}

type LockContent = LockOwner | 'gone' | 'unfinished' | 'damaged';

function readLock(path: string): LockContent {
  const text = readText(path, { links: 'refused', limit: LOCK_BYTES });
  const age = Date.now() - (statOrUndefined(path)?.mtimeMs ?? 0);
  if (text === undefined) return 'gone';
  const parsed = parseObject(text);
  if (isOwner(parsed)) return { ...UNKNOWN_START, ...parsed };
  return age < UNFINISHED_MS ? 'unfinished' : 'damaged';
}

function isOwner(value: unknown): value is LockOwner {
  return (
    isPlainObject(value) &&
    Number.isSafeInteger(value['pid']) &&
    (value['pid'] as number) > 0 &&
    typeof value['host'] === 'string' &&
    typeof value['nonce'] === 'string' &&
    typeof value['run_start'] === 'string'
  );
}

function isSameLock(found: LockContent, expected: LockOwner | 'damaged'): boolean {
  if (typeof found === 'string' || expected === 'damaged') return found === expected;
  return found.nonce === expected.nonce;
}

function refusal(path: string, owner: LockOwner): UsageError {
  const who = `process ${owner.pid} on ${owner.host} since ${owner.run_start}`;
  const remedy =
    isAlive(owner) === undefined ? `if that run is gone, delete ${path}` : 'stop it or choose another out_dir';
  return new UsageError(`${path}: the folder is in use by ${who}; ${remedy}`);
}

/** Sleeps without the event loop: taking a lock is the first thing a run does, and nothing else waits meanwhile. */
function wait(): void {
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, WAIT_MS);
}
