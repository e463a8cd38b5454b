/** The names inside checkpoints/ and the order of what lies there. */
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { errorCode, fileError } from './atomic.js';
import { type Manifest, readManifest } from './checkpoint-manifest.js';
import { pidExists } from './process-identity.js';

export const LATEST_NAME = 'latest';
/** step-N, or .old-N-pid: the former step-N, set aside for the moment in which a new step-N takes its place. */
const CHECKPOINT_NAME = /^(?:step-(\d+)|\.old-(\d+)-\d+)$/;
/** .tmp-N-pid: being written. .trash-N-pid: being deleted. */
const LEFTOVER_NAME = /^\.(?:tmp|trash)-\d+-(\d+)$/;

export interface CheckpointEntry {
  path: string;
  step: number;
  /** Absent when the manifest cannot be read. */
  manifest: Manifest | undefined;
  /** Why there is no manifest. */
  problem: unknown;
  /** The place in time: the sequence of the manifest, or a guess from the step. */
  order: number;
}

export function stepFolder(checkpoints: string, step: number): string {
  return join(checkpoints, `step-${step}`);
}

export function temporaryFolder(checkpoints: string, kind: 'tmp' | 'trash' | 'old', step: number): string {
  return join(checkpoints, `.${kind}-${step}-${process.pid}`);
}

/** The checkpoints of a run, newest first, whether their files verify or not. */
export function listCheckpoints(checkpoints: string): CheckpointEntry[] {
  const entries: CheckpointEntry[] = [];
  for (const name of namesIn(checkpoints)) {
    const match = CHECKPOINT_NAME.exec(name);
    if (!match) continue;
    const path = join(checkpoints, name);
    entries.push({ path, step: Number(match[1] ?? match[2]), order: 0, ...tryManifest(path) });
  }
  const sound = entries.filter((entry) => entry.manifest !== undefined);
  for (const entry of entries) {
    if (entry.manifest) entry.order = entry.manifest.sequence;
    else {
      // A damaged one was most likely saved right after the sound ones of lower steps.
      const before = sound.filter(({ step }) => step <= entry.step).map(({ manifest }) => manifest!.sequence);
      entry.order = Math.max(-1, ...before) + 0.5;
    }
  }
  return entries.sort((a, b) => b.order - a.order || b.step - a.step || (a.path < b.path ? 1 : -1));
}

/** Folders of saves and deletions that a killed process left behind; those of other living processes are not listed. */
export function listLeftovers(checkpoints: string): string[] {
  const isLeftover = (name: string): boolean => {
    const match = LEFTOVER_NAME.exec(name);
    if (!match) return false;
    const pid = Number(match[1]);
    return pid === process.pid || !pidExists(pid);
  };
  return namesIn(checkpoints)
    .filter(isLeftover)
    .map((name) => join(checkpoints, name));
}

function tryManifest(path: string): Pick<CheckpointEntry, 'manifest' | 'problem'> {
  try {
    return { manifest: readManifest(path), problem: undefined };
  } catch (problem) {
    return { manifest: undefined, problem };
  }
}

function namesIn(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch (error) {
    if (errorCode(error) === 'ENOENT') return [];
    throw fileError('list', folder, error);
  }
}
