/** manifest.json: what a checkpoint consists of. It is written last, so a folder that has one was once complete. */
import { createHash } from 'node:crypto';
import { closeSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { UsageError } from '../../errors.js';
import { errorCode, fileError, openRegularFile, readFully } from '../atomic.js';
import { isPlainObject } from '../json.js';

/** The form of a checkpoint. Raise it with every change that older code would misread, and add a migration. */
export const FORMAT_VERSION = 1;
export const MANIFEST_NAME = 'manifest.json';
const HASH_CHUNK_BYTES = 4 * 1024 * 1024;
const FILE_NAME = /^[A-Za-z0-9][A-Za-z0-9._-]*$/;

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
  /** Counts the saves of a run folder: after a resume from an earlier step the newest is not the one of the highest step. */
  sequence: number;
  saved_at: string;
  files: Record<string, FileDigest>;
}

/** A sound checkpoint that this version of the program cannot read. */
export class UnsupportedCheckpoint extends UsageError {}

export function isCheckpointFileName(name: string): boolean {
  return FILE_NAME.test(name) && name !== MANIFEST_NAME;
}

/** The text of a manifest, with a hash of itself: a flipped bit in the step would otherwise go unnoticed. */
export function serializeManifest(fields: object): string {
  const sha256 = createHash('sha256').update(JSON.stringify(fields)).digest('hex');
  return `${JSON.stringify({ ...fields, sha256 }, null, 2)}\n`;
}

/** Reads and checks the manifest of a checkpoint folder; the files it lists are checked by `verifyFiles`. */
export function readManifest(folder: string): Manifest {
  const path = join(folder, MANIFEST_NAME);
  let text: string;
  try {
    text = readFileSync(path, 'utf8');
  } catch (error) {
    if (errorCode(error) === 'ENOENT') {
      throw new UsageError(`${path}: is missing, so the checkpoint is not complete; use another one`, { cause: error });
    }
    throw fileError('read', path, error);
  }
  const parsed = parseManifest(path, text);
  const { format_version: version, trefoil_version: writer } = parsed;
  if (Number.isSafeInteger(version) && (version as number) > FORMAT_VERSION) {
    throw new UnsupportedCheckpoint(
      `${path}: has format ${version}, written by trefoil ${writer}; this trefoil reads up to format ${FORMAT_VERSION}: update it`,
    );
  }
  const { sha256: _hash, ...fields } = parsed;
  if (text !== serializeManifest(fields) || !isManifest(fields)) throw damaged(path, 'its content was changed');
  return fields;
}

/** Compares every file with its size and hash in the manifest. */
export function verifyFiles(folder: string, manifest: Manifest): void {
  for (const [name, expected] of Object.entries(manifest.files)) {
    const path = join(folder, name);
    const found = digestFile(path, expected.bytes);
    if (found.sha256 !== expected.sha256) throw damaged(path, 'its content does not have the recorded SHA-256');
  }
}

/** Hashes a file piece by piece; a size other than the expected one is refused without reading it. */
function digestFile(path: string, expectedBytes: number): FileDigest {
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
    return { bytes: size, sha256: hash.digest('hex') };
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
    Object.entries(files).every(([name, digest]) => isCheckpointFileName(name) && isDigest(digest))
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
