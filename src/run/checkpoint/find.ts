/** Finds the checkpoint to resume from. Nothing is loaded that was not verified first. */
import { dirname, join } from 'node:path';
import { TrefoilError, UsageError } from '../../errors.js';
import { readText, statOrUndefined } from '../../files.js';
import { isPlainObject } from '../json.js';
import {
  listCheckpoints,
  type Manifest,
  readManifest,
  stepFolder,
  UnsupportedCheckpoint,
  verifyFiles,
} from './manifest.js';
import { CHECKPOINT_FILES, type CheckpointState, optimizerFiles } from './save.js';

/** A checkpoint whose files verify. */
export interface FoundCheckpoint {
  path: string;
  step: number;
  state: CheckpointState;
  manifest: Manifest;
  /** Newer checkpoints that did not verify. */
  skipped: { path: string; reason: string }[];
}

/**
 * With 'auto', the newest checkpoint of the run that verifies, or undefined if the run has none. If it has some and all are
 * damaged, throws: starting again from nothing must be a decision. A path must itself verify.
 */
export function findCheckpoint(runDir: string, which: string): FoundCheckpoint | undefined {
  return which === 'auto' ? findNewest(join(runDir, 'checkpoints')) : openCheckpoint(resolvePath(which));
}

/**
 * Verifies every file of a checkpoint folder and reads its state; throws with the name of a file that is wrong. A rank need
 * not verify what rank 0 has verified (`isVerified`).
 */
export function openCheckpoint(path: string, isVerified = false): FoundCheckpoint {
  const manifest = readManifest(path);
  const needed: string[] = [CHECKPOINT_FILES.model, CHECKPOINT_FILES.state];
  if (optimizerFiles(manifest).length === 0) needed.push(CHECKPOINT_FILES.optimizer);
  for (const name of needed) {
    if (!Object.hasOwn(manifest.files, name)) throw new UsageError(`${path}: has no ${name}; use another checkpoint`);
  }
  if (!isVerified) verifyFiles(path, manifest);
  const state = readState(join(path, CHECKPOINT_FILES.state));
  return { path, step: manifest.step, state, manifest, skipped: [] };
}

function findNewest(checkpoints: string): FoundCheckpoint | undefined {
  const skipped: FoundCheckpoint['skipped'] = [];
  for (const { path, problem } of listCheckpoints(checkpoints)) {
    try {
      if (problem !== undefined) throw problem;
      return { ...openCheckpoint(path), skipped };
    } catch (error) {
      // Sound, but of another version: continuing from an older checkpoint would silently discard training.
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
  const step = /^step-(\d+)\s*$/.exec(readText(which) ?? '');
  if (!step) throw new UsageError(`${which}: is not a checkpoint; name a folder such as checkpoints/step-100`);
  return stepFolder(dirname(which), Number(step[1]));
}

function readState(path: string): CheckpointState {
  const text = readText(path);
  if (text === undefined) throw new UsageError(`${path}: is missing; use another checkpoint`);
  let parsed: unknown;
  try {
    parsed = JSON.parse(text);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    throw new UsageError(`${path}: is not JSON; use another checkpoint`, { cause: error });
  }
  if (!isPlainObject(parsed)) throw new UsageError(`${path}: is not an object; use another checkpoint`);
  return parsed;
}
