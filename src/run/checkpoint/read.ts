/**
 * The folder checkpoints/, and the manifest.json of each checkpoint, which lists its files. The manifest is written last, so
 * a folder that has one was once complete. `findCheckpoint` finds the one to resume from; nothing is loaded that was not
 * verified first.
 */
import { createHash } from 'node:crypto';
import { closeSync } from 'node:fs';
import { basename, dirname, join, resolve } from 'node:path';
import { TrefoilError, UsageError } from '../../errors.js';
import { fileError, leftBehind, namesIn, openRegularFile, readFully, readText, statOrUndefined } from '../../files.js';
import { isPlainObject } from '../../json-values.js';

/** The format of a checkpoint. Raise it with every change that older code would misread; other formats are refused. */
export const FORMAT_VERSION = 1;
export const MANIFEST_NAME = 'manifest.json';
const HASH_CHUNK_BYTES = 4 * 1024 * 1024;
const FILE_NAME = /^[A-Za-z0-9][A-Za-z0-9._-]*$/;

/** The files that every checkpoint has. */
export const CHECKPOINT_FILES = {
  model: 'model.safetensors',
  optimizer: 'optimizer.safetensors',
  state: 'state.json',
} as const;

/** The optimizer's file of a rank, in a checkpoint whose ranks each kept a part of its state. */
export function shardName(rank: number): string {
  return `optimizer-rank${rank}.safetensors`;
}

const SHARD_NAME = /^optimizer-rank\d+\.safetensors$/;

/** The files that hold the optimizer's state: one, or one of each rank. */
export function optimizerFiles({ files }: Pick<Manifest, 'files'>): string[] {
  const shards = Object.keys(files).filter((name) => SHARD_NAME.test(name));
  return Object.hasOwn(files, CHECKPOINT_FILES.optimizer) ? [CHECKPOINT_FILES.optimizer] : shards;
}

/** Everything a resume needs beside tensors; plain JSON, and every number in it finite. */
export type CheckpointState = Record<string, unknown>;

/** Size and SHA-256 of a file. */
export interface FileDigest {
  bytes: number;
  sha256: string;
}

/** The manifest of a checkpoint. */
export interface Manifest {
  format_version: number;
  trefoil_version: string;
  step: number;
  /** Number of the save in this run folder: after a resume from an earlier step, the newest has not the highest step. */
  sequence: number;
  saved_at: string;
  files: Record<string, FileDigest>;
}

/** A valid checkpoint that this version of the program cannot read. */
export class UnsupportedCheckpoint extends UsageError {}

/** The text of a manifest, with a hash of itself, so that a flipped bit in it is detected. */
export function serializeManifest(fields: object): string {
  const sha256 = createHash('sha256').update(JSON.stringify(fields)).digest('hex');
  return `${JSON.stringify({ ...fields, sha256 }, null, 2)}\n`;
}

/** Reads and checks the manifest of a checkpoint folder; the files it lists are checked by `verifyFiles`. */
export function readManifest(folder: string): Manifest {
  const path = join(folder, MANIFEST_NAME);
  const text = readText(path);
  if (text === undefined)
    throw new UsageError(`${path}: is missing, so the checkpoint is not complete; use another one`);
  const parsed = parseManifest(path, text);
  const { format_version: version, trefoil_version: writer } = parsed;
  if (Number.isSafeInteger(version) && version !== FORMAT_VERSION) {
    const remedy = (version as number) > FORMAT_VERSION ? 'update it' : 'use an older trefoil';
    throw new UnsupportedCheckpoint(
      `${path}: has format ${version}, written by trefoil ${writer}; this trefoil reads format ${FORMAT_VERSION}: ${remedy}`,
    );
  }
  const { sha256: _hash, ...fields } = parsed;
  if (text !== serializeManifest(fields) || !isManifest(fields)) throw damaged(path, 'its content was changed');
  return fields;
}

/** Compares every file with its size and hash in the manifest. */
export function verifyFiles(folder: string, manifest: Manifest): void {
  for (const [name, { bytes, sha256 }] of Object.entries(manifest.files)) {
    const path = join(folder, name);
    if (hashFile(path, bytes) !== sha256) throw damaged(path, 'its content does not have the recorded SHA-256');
  }
}

/** The SHA-256 of a file, read in chunks; a file of another size is refused without reading it. */
function hashFile(path: string, expectedBytes: number): string {
  const { descriptor, size } = openRegularFile(path);
  try {
    if (size !== expectedBytes) throw damaged(path, `it has ${size} bytes, not the recorded ${expectedBytes}`);
    const hash = createHash('sha256');
    const chunk = new Uint8Array(Math.min(size, HASH_CHUNK_BYTES));
    for (let position = 0; position < size; ) {
      const read = readFully(descriptor, chunk, position);
      if (read === 0) throw damaged(path, 'it became shorter while it was read');
      hash.update(chunk.subarray(0, read));
      position += read;
    }
    return hash.digest('hex');
  } catch (error) {
    throw fileError('read', path, error);
  } finally {
    closeSync(descriptor);
  }
}

function parseManifest(path: string, text: string): Record<string, unknown> {
  try {
    const parsed: unknown = JSON.parse(text);
    if (isPlainObject(parsed)) return parsed;
  } catch (error) {
    throw damaged(path, 'it is not JSON', error);
  }
  throw damaged(path, 'it is not an object');
}

function isManifest(value: object): value is Manifest {
  const { format_version, step, sequence, files } = value as Partial<Record<keyof Manifest, unknown>>;
  return (
    [format_version, step, sequence].every(isCount) &&
    isPlainObject(files) &&
    Object.entries(files).every(([name, digest]) => FILE_NAME.test(name) && name !== MANIFEST_NAME && isDigest(digest))
  );
}

function isDigest(value: unknown): boolean {
  return isPlainObject(value) && isCount(value['bytes']) && typeof value['sha256'] === 'string';
}

function isCount(value: unknown): boolean {
  return Number.isSafeInteger(value) && (value as number) >= 0;
}

function damaged(path: string, reason: string, cause?: unknown): UsageError {
  return new UsageError(`${path}: is damaged: ${reason}; use another checkpoint`, { cause });
}

export const LATEST_NAME = 'latest';
/** Names of the newest checkpoint in `checkpoints/`; the PyTorch runbooks write the second. */
const NEWEST_NAMES = new Set([LATEST_NAME, 'latest.pt']);
/** A file in a checkpoint that somebody asked for: `train.keep_last` does not delete the checkpoint. */
export const KEEP_NAME = 'keep';
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

/**
 * Lists files that killed processes left behind while saving or deleting; those of living processes are not included.
 */
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
 * With 'auto', or `checkpoints/latest` of the run, the newest checkpoint that verifies, or undefined if the run has none.
 * If it has some and all are damaged, throws: starting again from nothing must be a decision. `latest` of another run is
 * its newest, and any other path must itself verify.
 */
export function findCheckpoint(runDir: string, which: string): FoundCheckpoint | undefined {
  const own = join(runDir, 'checkpoints');
  if (which === 'auto') return findNewest(own);
  if (!namesNewest(which)) return openCheckpoint(resolvePath(which));
  const folder = dirname(which);
  const found = findNewest(folder);
  if (!found && resolve(folder) !== resolve(own)) throw new UsageError(`${which}: ${folder} holds no checkpoint`);
  return found;
}

/** Whether a path is `latest` of a folder of checkpoints, which need not exist; a run folder may have that name too. */
export function namesNewest(path: string): boolean {
  return NEWEST_NAMES.has(basename(path)) && !statOrUndefined(path)?.isDirectory();
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
  const reasons = skipped.map(({ reason }) =>
    reason.replace(`${checkpoints}/`, '').replace(/; use another checkpoint$/, ''),
  );
  throw new UsageError(
    `${checkpoints}: no checkpoint verifies: ${reasons.join('; ')}. Restore one from a backup, or start again in another out_dir`,
  );
}

/** A checkpoint folder. */
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
  throw new UsageError(`${which}: is not a checkpoint; name a folder such as checkpoints/step-100`);
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
