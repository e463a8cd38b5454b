/** Finding the checkpoint to resume from: nothing is loaded that was not verified first. */
import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { TrefoilError, UsageError } from '../../errors.js';
import { fileError, statOrUndefined } from '../atomic.js';
import { isPlainObject } from '../json.js';
import { listCheckpoints, stepFolder } from './folder.js';
import { FORMAT_VERSION, type Manifest, readManifest, UnsupportedCheckpoint, verifyFiles } from './manifest.js';
import { CHECKPOINT_FILES, type CheckpointState, optimizerFiles } from './save.js';

/** A checkpoint whose files verify. */
export interface FoundCheckpoint {
  path: string;
  step: number;
  state: CheckpointState;
  manifest: Manifest;
  /** Newer ones that did not verify. */
  skipped: { path: string; reason: string }[];
}

/** Turns the state of format N into that of format N + 1. */
export type Migration = (state: CheckpointState) => CheckpointState;
const MIGRATIONS: ReadonlyMap<number, Migration> = new Map();

/**
 * With 'auto', the newest checkpoint of the run that verifies, or undefined when the run has none yet. When it has some
 * and all are damaged this is an error: starting again from nothing must be a decision. A path must verify itself.
 */
export function findCheckpoint(runDir: string, which: string): FoundCheckpoint | undefined {
  return which === 'auto' ? findNewest(join(runDir, 'checkpoints')) : openCheckpoint(resolvePath(which));
}

/**
 * Verifies every file of a checkpoint folder and reads its state; refused with the name of the file that is wrong. A rank
 * whose first has verified it need not read everything again (`isVerified`).
 */
export function openCheckpoint(path: string, isVerified = false): FoundCheckpoint {
  const manifest = readManifest(path);
  const needed: string[] = [CHECKPOINT_FILES.model, CHECKPOINT_FILES.state];
  if (optimizerFiles(manifest).length === 0) needed.push(CHECKPOINT_FILES.optimizer);
  for (const name of needed) {
    if (!Object.hasOwn(manifest.files, name)) throw new UsageError(`${path}: has no ${name}; use another checkpoint`);
  }
  if (!isVerified) verifyFiles(path, manifest);
  const state = migrateState(readState(join(path, CHECKPOINT_FILES.state)), manifest.format_version, path);
  return { path, step: manifest.step, state, manifest, skipped: [] };
}

/** Brings the state of an older format up to this one, step by step. */
export function migrateState(
  state: CheckpointState,
  fromVersion: number,
  path: string,
  migrations: ReadonlyMap<number, Migration> = MIGRATIONS,
  toVersion: number = FORMAT_VERSION,
): CheckpointState {
  let current = state;
  for (let version = fromVersion; version < toVersion; version++) {
    const migration = migrations.get(version);
    if (!migration) {
      throw new UnsupportedCheckpoint(
        `${path}: has format ${fromVersion}, and this trefoil has no way from format ${version} to ${version + 1}: use an older trefoil`,
      );
    }
    current = migration(current);
  }
  return current;
}

function findNewest(checkpoints: string): FoundCheckpoint | undefined {
  const skipped: FoundCheckpoint['skipped'] = [];
  for (const { path, problem } of listCheckpoints(checkpoints)) {
    try {
      if (problem !== undefined) throw problem;
      return { ...openCheckpoint(path), skipped };
    } catch (error) {
      // Sound, but of another version: going on from an older checkpoint would silently throw training away.
      if (error instanceof UnsupportedCheckpoint || !(error instanceof TrefoilError)) throw error;
      skipped.push({ path, reason: error.message });
    }
  }
  if (skipped.length === 0) return undefined;
  const reasons = skipped.map(({ reason }) => reason).join(' | ');
  throw new UsageError(`${checkpoints}: no checkpoint verifies: ${reasons}; to start again, choose another out_dir`);
}

/** A checkpoint folder, or the `latest` file that points to one. */
function resolvePath(which: string): string {
  const facts = statOrUndefined(which);
  if (!facts) throw new UsageError(`${which}: there is no such checkpoint; name a folder such as checkpoints/step-100`);
  if (facts.isDirectory()) {
    if (statOrUndefined(join(which, 'checkpoints'))?.isDirectory()) {
      throw new UsageError(
        `${which}: is a run folder; name one of its checkpoints, such as ${which}/checkpoints/latest`,
      );
    }
    return which;
  }
  const step = /^step-(\d+)\s*$/.exec(readText(which));
  if (!step) throw new UsageError(`${which}: is not a checkpoint; name a folder such as checkpoints/step-100`);
  return stepFolder(dirname(which), Number(step[1]));
}

function readState(path: string): CheckpointState {
  let parsed: unknown;
  try {
    parsed = JSON.parse(readText(path));
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    throw new UsageError(`${path}: is not JSON; use another checkpoint`, { cause: error });
  }
  if (!isPlainObject(parsed)) throw new UsageError(`${path}: is not an object; use another checkpoint`);
  return parsed;
}

function readText(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    throw fileError('read', path, error);
  }
}
