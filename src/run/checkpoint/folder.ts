/** The names inside checkpoints/ and the order of what lies there. */
import { join } from 'node:path';
import { leftBehind, namesIn } from '../leftovers.js';
import { type Manifest, readManifest } from './manifest.js';

export const LATEST_NAME = 'latest';
/** step-N, or .old-N-pid: the former step-N, set aside for the moment in which a new step-N takes its place. */
const CHECKPOINT_NAME = /^(?:step-(\d+)|\.old-(\d+)-\d+)$/;
/** .tmp-N-pid: being written. .trash-N-pid: being deleted. .latest.tmp-pid: the next `latest`. */
const LEFTOVER_NAME = /^\.(?:tmp-\d+|trash-\d+|latest\.tmp)-(\d+)$/;

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

/** What saves and deletions of killed processes left behind; not what other living processes work on. */
export function listLeftovers(checkpoints: string): string[] {
  return leftBehind(checkpoints, LEFTOVER_NAME);
}

function tryManifest(path: string): Pick<CheckpointEntry, 'manifest' | 'problem'> {
  try {
    return { manifest: readManifest(path), problem: undefined };
  } catch (problem) {
    return { manifest: undefined, problem };
  }
}
