/**
 * Saving a checkpoint so that a crash at any moment costs at most the checkpoint being written: everything is written into
 * a temporary folder, flushed, verified, and only then given its name. Only the owner of the run's lock may save.
 */
import { createHash } from 'node:crypto';
import { closeSync, fsyncSync, mkdirSync, openSync, renameSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { TrefoilError, UsageError } from '../../errors.js';
import {
  ensureFolder,
  explainFileError,
  fsyncDir,
  isFileSystemError,
  statOrUndefined,
  writeFileAtomic,
  writeFully,
} from '../../files.js';
import { writeSafetensors } from '../safetensors.js';
import type { TensorToWrite } from '../tensor-source.js';
import { trefoilVersion } from '../version.js';
import {
  CHECKPOINT_FILES,
  type CheckpointState,
  type FileDigest,
  FORMAT_VERSION,
  KEEP_NAME,
  LATEST_NAME,
  listCheckpoints,
  listLeftovers,
  MANIFEST_NAME,
  type Manifest,
  readManifest,
  serializeManifest,
  stepFolder,
  temporaryFolder,
  verifyFiles,
} from './read.js';

export interface CheckpointParts {
  model: Iterable<TensorToWrite>;
  /** All of its state, or a function that has every rank write its part into the folder and tells what they wrote. */
  optimizer: Iterable<TensorToWrite> | ((folder: string) => Readonly<Record<string, FileDigest>>);
}

/** How a checkpoint is written. */
export interface SaveOptions {
  /** How many checkpoints remain, the new one included; all when absent. */
  keepLast?: number;
  /** Told before and after every change on the disk, so that tests can stop the process there. */
  onWrite?: (what: string) => void;
}

/** A checkpoint that was saved. */
export interface SavedCheckpoint {
  path: string;
  bytes: number;
  /** Troubles after the checkpoint was safe, such as an old one that could not be deleted. */
  warnings: string[];
}

/** The disk did not take the checkpoint. The earlier ones are as they were; the trainer warns and tries again later. */
export class SaveFailed extends TrefoilError {}

export function saveCheckpoint(
  runDir: string,
  step: number,
  parts: CheckpointParts,
  state: CheckpointState,
  options: SaveOptions = {},
): SavedCheckpoint {
  const checkpoints = join(runDir, 'checkpoints');
  const temporary = temporaryFolder(checkpoints, 'tmp', step);
  const onWrite = options.onWrite ?? (() => {});
  let manifest: Manifest;
  if (!Number.isSafeInteger(step) || step < 0)
    throw new UsageError(`${runDir}: there is no checkpoint of step ${step}`);
  try {
    if (ensureFolder(checkpoints)) fsyncDir(runDir);
    for (const leftover of listLeftovers(checkpoints)) rmSync(leftover, { recursive: true, force: true });
    mkdirSync(temporary);
    const sequence = Math.max(0, ...listCheckpoints(checkpoints).map(({ order }) => Math.floor(order))) + 1;
    manifest = writeFiles(temporary, { step, sequence }, parts, state, onWrite);
    verify(temporary);
    putInPlace(checkpoints, temporary, step, onWrite);
  } catch (error) {
    throw saveError(step, error, removeFolder(temporary));
  }
  const path = stepFolder(checkpoints, step);
  const warnings = finish(checkpoints, path, options.keepLast ?? Number.POSITIVE_INFINITY, onWrite);
  const bytes = Object.values(manifest.files).reduce((sum, digest) => sum + digest.bytes, 0);
  return { path, bytes, warnings };
}

/** Excludes a checkpoint from deletion by `keepLast`, until somebody deletes it or its mark. */
export function keepCheckpoint(runDir: string, step: number): void {
  const path = join(stepFolder(join(runDir, 'checkpoints'), step), KEEP_NAME);
  writeFileAtomic(path, 'saved on request: train.keep_last does not delete this checkpoint while this file is here\n');
}

function writeFiles(
  folder: string,
  identity: Pick<Manifest, 'step' | 'sequence'>,
  parts: CheckpointParts,
  state: CheckpointState,
  onWrite: (what: string) => void,
): Manifest {
  const files: Record<string, FileDigest> = {};
  const { step } = identity;
  const write = (name: string, tensors: Iterable<TensorToWrite>) => {
    files[name] = writeTensorFile(folder, name, step, tensors, onWrite);
  };
  write(CHECKPOINT_FILES.model, parts.model);
  if (typeof parts.optimizer === 'function') Object.assign(files, parts.optimizer(folder));
  else write(CHECKPOINT_FILES.optimizer, parts.optimizer);
  files[CHECKPOINT_FILES.state] = writeDurably(join(folder, CHECKPOINT_FILES.state), stateBytes(state), onWrite);
  const fields = { format_version: FORMAT_VERSION, trefoil_version: trefoilVersion(), ...identity };
  const manifest: Manifest = { ...fields, saved_at: new Date().toISOString(), files };
  // Last: a folder with a manifest has all its files on the disk already.
  writeDurably(join(folder, MANIFEST_NAME), Buffer.from(serializeManifest(manifest)), onWrite);
  fsyncDir(folder);
  return manifest;
}

/** Writes and flushes one file of tensors of a checkpoint; also for ranks that write a part of one. */
export function writeTensorFile(
  folder: string,
  name: string,
  step: number,
  tensors: Iterable<TensorToWrite>,
  onWrite: (what: string) => void = () => {},
): FileDigest {
  return writeSafetensors(
    join(folder, name),
    tensors,
    { step: String(step) },
    { fsync: true, onWrite: (bytes) => onWrite(`${name} ${bytes}`) },
  );
}

/** JSON turns NaN and infinity into null: a resume would then differ silently. */
function stateBytes(state: CheckpointState): Uint8Array {
  const check = (key: string, value: unknown): unknown => {
    if (typeof value === 'number' && !Number.isFinite(value)) {
      throw new TypeError(`the checkpoint state cannot hold ${value} (key ${key}); store it as text`);
    }
    return value;
  };
  return Buffer.from(`${JSON.stringify(state, check)}\n`);
}

function writeDurably(path: string, content: Uint8Array, onWrite: (what: string) => void): FileDigest {
  const hash = createHash('sha256');
  const descriptor = openSync(path, 'wx');
  try {
    onWrite(path);
    writeFully(descriptor, content, (piece) => hash.update(piece));
    onWrite(path);
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
  return { bytes: content.length, sha256: hash.digest('hex') };
}

/** Reads everything back: only what verifies may get a name, and only then may older ones go. */
function verify(folder: string): void {
  try {
    verifyFiles(folder, readManifest(folder));
  } catch (error) {
    throw new SaveFailed(`what was written does not read back: ${explainFileError(error)}`, undefined, {
      cause: error,
    });
  }
}

function putInPlace(checkpoints: string, temporary: string, step: number, onWrite: (what: string) => void): void {
  const path = stepFolder(checkpoints, step);
  const aside = temporaryFolder(checkpoints, 'old', step);
  onWrite('rename');
  // A folder cannot be renamed onto another. Between these two lines the former one still counts, under its other name.
  const replaces = statOrUndefined(path) !== undefined;
  if (replaces) {
    rmSync(aside, { recursive: true, force: true });
    renameSync(path, aside);
    onWrite('set aside');
  }
  try {
    renameSync(temporary, path);
  } catch (error) {
    if (replaces) renameSync(aside, path);
    throw error;
  }
  onWrite('renamed');
  fsyncDir(checkpoints);
}

/** Work that follows once the checkpoint is safe; a failure here is a warning, not a lost checkpoint. */
function finish(checkpoints: string, path: string, keepLast: number, onWrite: (what: string) => void): string[] {
  const warnings: string[] = [];
  const attempt = (action: () => void): void => {
    try {
      action();
    } catch (error) {
      if (!isFileSystemError(error)) throw error;
      warnings.push(error instanceof TrefoilError ? error.message : explainFileError(error));
    }
  };
  attempt(() => writeFileAtomic(join(checkpoints, LATEST_NAME), `${path.slice(checkpoints.length + 1)}\n`));
  onWrite('latest');
  let old: readonly { readonly path: string; readonly step: number }[] = [];
  attempt(() => {
    old = expired(checkpoints, path, keepLast);
  });
  for (const { path: expiredPath, step } of old)
    attempt(() => {
      // Renamed first: a crash in the middle of deleting must not leave something that looks like a damaged checkpoint.
      const trash = temporaryFolder(checkpoints, 'trash', step);
      rmSync(trash, { recursive: true, force: true });
      renameSync(expiredPath, trash);
      onWrite('trash');
      rmSync(trash, { recursive: true, force: true });
      onWrite('deleted');
    });
  return warnings;
}

function expired(checkpoints: string, newest: string, keepLast: number): { path: string; step: number }[] {
  const others = listCheckpoints(checkpoints).filter(({ path }) => path !== newest);
  const isReplaced = ({ path, step }: { path: string; step: number }): boolean =>
    path !== stepFolder(checkpoints, step);
  const isMarked = ({ path }: { path: string }) => statOrUndefined(join(path, KEEP_NAME)) !== undefined;
  const kept = others.filter((entry) => !isReplaced(entry) && !isMarked(entry));
  // Damaged ones count as the oldest: they must not push out a sound one.
  kept.sort((a, b) => Number(a.manifest === undefined) - Number(b.manifest === undefined));
  return [...others.filter(isReplaced), ...kept.slice(Math.max(0, keepLast - 1))];
}

/** Returns what went wrong while cleaning up, for the message; the first error is the one that matters. */
function removeFolder(path: string): string {
  try {
    rmSync(path, { recursive: true, force: true });
    return '';
  } catch (error) {
    return ` (and ${path} could not be removed: ${explainFileError(error)})`;
  }
}

function saveError(step: number, error: unknown, cleanup: string): unknown {
  if (!(error instanceof SaveFailed) && !isFileSystemError(error)) return error;
  const reason = error instanceof TrefoilError ? error.message : fileReason(error);
  const message = `checkpoint of step ${step} was not saved: ${reason}${cleanup}; the last good one is kept`;
  return new SaveFailed(message, undefined, { cause: error });
}

function fileReason(error: unknown): string {
  const path = (error as NodeJS.ErrnoException).path;
  return path === undefined ? explainFileError(error) : `${path}: ${explainFileError(error)}`;
}
