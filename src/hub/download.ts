/** Downloads one file of the hub into the blobs of the cache: it appears there whole and with the right hash, or not at all. */
import { createHash, type Hash } from 'node:crypto';
import { renameSync, rmSync } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { errorCode, fileError, fsyncDir, statOrUndefined } from '../files.js';
import type { CachePaths } from './cache.js';
import { describeUrl, fetchPieces, type HttpOptions, SourceGaveUp } from './http.js';
import { withLock } from './lock.js';
import type { HubFile } from './model-files.js';

/** Called with the bytes of a file that are there now. */
export interface DownloadEvents {
  readonly onBytes: (bytes: number) => void;
  /** Another process downloads this file. */
  readonly onWait: (file: string) => void;
  readonly onWarning: (text: string) => void;
}

const READ_BYTES = 1 << 20;
/** A second one covers a partial file that was damaged on this machine. */
const ATTEMPTS = 2;

export function hasBlob({ blobs }: CachePaths, { blob, size }: HubFile): boolean {
  const facts = statOrUndefined(join(blobs, blob));
  return facts?.isFile() === true && facts.size === size;
}

/** Downloads a file from `url` unless the cache has it. What an earlier download left behind is continued. */
export async function downloadBlob(
  url: string,
  file: HubFile,
  paths: CachePaths,
  http: HttpOptions,
  events: DownloadEvents,
): Promise<void> {
  const { signal } = http;
  const onWait = () => events.onWait(file.name);
  await withLock(join(paths.locks, `${file.blob}.lock`), { onWait, signal }, async () => {
    if (hasBlob(paths, file)) return events.onBytes(file.size);
    const path = join(paths.blobs, file.blob);
    const partial = `${path}.incomplete`;
    try {
      for (let attempt = 1; !(await complete(partial, url, file, http, events)); attempt++) {
        // Not emptied: without locks another process may have moved it into place by now.
        rmSync(partial, { force: true });
        const what = `${describeUrl(url)}: what arrived does not have the hash that the hub lists`;
        if (attempt === ATTEMPTS)
          throw new SourceGaveUp(`${what}, twice; it was removed: check HF_ENDPOINT and the network, and try again`);
        events.onWarning(`${what}; downloading it again`);
      }
      moveIntoPlace(partial, path, file, paths);
    } catch (error) {
      throw fileError('write', partial, error);
    }
  });
}

/** Neither 'r+', which does not create, nor 'a', which ignores positions. */
async function openForUpdate(path: string): Promise<FileHandle> {
  try {
    return await open(path, 'r+');
  } catch (error) {
    if (errorCode(error) !== 'ENOENT') throw error;
    return await open(path, 'w+');
  }
}

function moveIntoPlace(partial: string, path: string, file: HubFile, paths: CachePaths): void {
  try {
    renameSync(partial, path);
    fsyncDir(dirname(path));
  } catch (error) {
    // Without locks another process may have moved it: both wrote the same bytes.
    if (errorCode(error) !== 'ENOENT' || !hasBlob(paths, file)) throw error;
  }
}

/** Downloads what is missing of a partial file; returns whether it has the right hash then. */
async function complete(
  partial: string,
  url: string,
  file: HubFile,
  http: HttpOptions,
  { onBytes }: DownloadEvents,
): Promise<boolean> {
  if ((statOrUndefined(partial)?.size ?? 0) > file.size) rmSync(partial);
  const handle = await openForUpdate(partial);
  try {
    const { size: start } = await handle.stat();
    const hash = startHash(file);
    await hashBeginning(handle, start, hash);
    onBytes(start);
    await fetchPieces(url, { start, end: file.size, size: file.size }, http, async (piece, at) => {
      await writeAt(handle, piece, at);
      hash.update(piece);
      onBytes(at + piece.length);
    });
    await handle.sync();
    return hash.digest('hex') === file.blob;
  } finally {
    await handle.close();
  }
}

/** The hash that names a blob: SHA-256 of the content, or git's SHA-1 of a header and the content. */
function startHash({ blob, size }: HubFile): Hash {
  return blob.length === 64 ? createHash('sha256') : createHash('sha1').update(`blob ${size}\0`);
}

async function hashBeginning(handle: FileHandle, end: number, hash: Hash): Promise<void> {
  const buffer = Buffer.alloc(Math.min(READ_BYTES, end));
  for (let at = 0; at < end; ) {
    const { bytesRead } = await handle.read(buffer, 0, Math.min(buffer.length, end - at), at);
    if (bytesRead === 0) throw new Error('a partial file became shorter while it was read');
    hash.update(buffer.subarray(0, bytesRead));
    at += bytesRead;
  }
}

async function writeAt(handle: FileHandle, piece: Uint8Array, at: number): Promise<void> {
  for (let done = 0; done < piece.length; ) {
    const { bytesWritten } = await handle.write(piece, done, piece.length - done, at + done);
    done += bytesWritten;
  }
}

/** Removes a blob of the wrong size: the disk lost a part of it. */
export function removeDamaged({ blobs }: CachePaths, { blob, size }: HubFile): boolean {
  const path = join(blobs, blob);
  const facts = statOrUndefined(path);
  if (facts === undefined || facts.size === size) return false;
  rmSync(path, { force: true });
  return true;
}
