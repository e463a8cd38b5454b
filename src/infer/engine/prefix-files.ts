/**
 * Blocks of cached prefixes in a folder, one file each, named by the key of the prefix that the block ends.
 *
 * A file holds a mark of its format, the key, the content and a checksum. It is written aside and renamed, so several
 * processes can use one folder; a file that is not sound is deleted and never used. The time of modification is the time
 * of the last use: beyond the limit the least recently used files are deleted first, also those of other processes. All is
 * asynchronous, and no piece of work in the calling thread is longer than one `PIECE`.
 */
import { randomBytes, webcrypto } from 'node:crypto';
import { accessSync, chmodSync, constants, statSync } from 'node:fs';
import { type FileHandle, open, readdir, rename, rm, stat, utimes } from 'node:fs/promises';
import { join } from 'node:path';
import { UsageError } from '../../errors.js';
import { ensureFolder, errorCode, fileError } from '../../files.js';

const MARK = Buffer.from('TREFOIL PREFIX 1', 'latin1');
const KEY_BYTES = 32;
const SUM_BYTES = 32;
const HEAD_BYTES = MARK.length + KEY_BYTES;
const EXTENSION = '.prefix';
/** Bytes that are hashed or copied at once. */
export const PIECE = 4 * 2 ** 20;
/** Unfinished files of this age [ms] were left by a process that was killed. */
const ABANDONED = 3_600_000;
/** The folder is listed again after this part of the limit was written: other processes write, too. */
const LISTED_EVERY = 1 / 16;

/** What a folder holds, and what went wrong. */
export interface PrefixFileStats {
  /** Bytes of all files when the folder was listed last, and of those written since. */
  readonly bytes: number;
  /** Files that were deleted because they were truncated, altered or of another format. */
  readonly damaged: number;
  /** Reads and writes that the file system refused. */
  readonly errors: number;
}

export class PrefixFiles {
  readonly #folder: string;
  readonly #most: number;
  #bytes = 0;
  #writtenSinceListing = Number.POSITIVE_INFINITY;
  /** Entries up to this time of use did not fit beside more recent ones. */
  #refusedUpTo = 0;
  #damaged = 0;
  #errors = 0;

  /** Creates the folder if needed. Throws a `UsageError` if it cannot be used. `most`: bytes of all files. */
  constructor(folder: string, most: number) {
    this.#folder = folder;
    this.#most = most;
    try {
      if (ensureFolder(folder)) chmodSync(folder, 0o700); // it holds what users sent
      accessSync(folder, constants.R_OK | constants.W_OK | constants.X_OK);
    } catch (error) {
      throw fileError('use as prefix cache', folder, error);
    }
    if (process.platform !== 'win32' && (statSync(folder).mode & 0o002) !== 0)
      throw new UsageError(`${folder}: every user can write there and change answers; use a folder of your own`);
  }

  get stats(): PrefixFileStats {
    return { bytes: this.#bytes, damaged: this.#damaged, errors: this.#errors };
  }

  /** The content of `size` bytes that was written for this key (64 hex digits); null if there is none. */
  async read(key: string, size: number): Promise<Uint8Array | null> {
    const path = this.#path(key);
    const file = await this.#attempt(() => readWhole(path, HEAD_BYTES + size + SUM_BYTES));
    if (file === null) return null;
    if (file && (await isSound(file, key))) return file.subarray(HEAD_BYTES, HEAD_BYTES + size);
    this.#damaged += 1;
    await this.#attempt(() => rm(path, { force: true }));
    return null;
  }

  /**
   * Stores `size` bytes that `fill` provides, unless they are stored already. `usedAt`: seconds since 1970. Nothing is
   * written if more recently used files leave no room.
   */
  async write(key: string, size: number, usedAt: number, fill: (content: Uint8Array) => Promise<void>): Promise<void> {
    const path = this.#path(key);
    if ((await this.#attempt(() => utimes(path, usedAt, usedAt).then(() => true))) !== null) return;
    const bytes = HEAD_BYTES + size + SUM_BYTES;
    if (!(await this.#makeRoom(bytes, usedAt))) return;
    const file = new Uint8Array(bytes);
    file.set(MARK);
    file.set(Buffer.from(key, 'hex'), MARK.length);
    await fill(file.subarray(HEAD_BYTES, HEAD_BYTES + size));
    file.set(await checksum(file.subarray(0, -SUM_BYTES)), bytes - SUM_BYTES);
    const aside = join(this.#folder, `.${key}-${randomBytes(8).toString('hex')}`);
    const isWritten = await this.#attempt(async () => {
      try {
        await withHandle(await open(aside, 'wx', 0o600), (handle) => handle.writeFile(file));
        await utimes(aside, usedAt, usedAt);
        await rename(aside, path);
        return true;
      } catch (error) {
        await rm(aside, { force: true });
        throw error;
      }
    });
    if (!isWritten) return;
    this.#bytes += bytes;
    this.#writtenSinceListing += bytes;
  }

  /** Deletes the least recently used files until `bytes` more fit; false if files used after `usedAt` leave no room. */
  async #makeRoom(bytes: number, usedAt: number): Promise<boolean> {
    if (usedAt <= this.#refusedUpTo) return false;
    const fits = () => this.#bytes + bytes <= this.#most;
    if (fits() && this.#writtenSinceListing <= this.#most * LISTED_EVERY) return true;
    const files = (await this.#attempt(() => this.#list())) ?? [];
    this.#bytes = files.reduce((sum, { size }) => sum + size, 0);
    this.#writtenSinceListing = 0;
    if (fits()) return true;
    // A little more than needed, so that not every write lists the folder.
    const target = this.#most * (1 - LISTED_EVERY) - bytes;
    for (const { path, size, at } of files.sort((a, b) => a.at - b.at)) {
      if (this.#bytes <= target || at >= usedAt) break;
      if ((await this.#attempt(() => rm(path, { force: true }).then(() => true))) === null) continue;
      this.#bytes -= size;
    }
    if (!fits()) this.#refusedUpTo = usedAt;
    return fits();
  }

  async #list(): Promise<{ path: string; size: number; at: number }[]> {
    const files = [];
    for (const name of await readdir(this.#folder)) {
      const path = join(this.#folder, name);
      const isEntry = name.endsWith(EXTENSION);
      if (!isEntry && !/^\.[0-9a-f]{64}-[0-9a-f]{16}$/.test(name)) continue;
      const facts = await this.#attempt(() => stat(path));
      if (!facts) continue; // deleted by another process
      if (isEntry) files.push({ path, size: facts.size, at: facts.mtimeMs / 1000 });
      else if (Date.now() - facts.ctimeMs > ABANDONED) await this.#attempt(() => rm(path, { force: true }));
    }
    return files;
  }

  /** The result of a file operation; null if the file is missing or the file system refuses, which is counted. */
  async #attempt<T>(work: () => Promise<T>): Promise<T | null> {
    try {
      return await work();
    } catch (error) {
      if (errorCode(error) === undefined) throw error; // not of the file system
      if (errorCode(error) !== 'ENOENT') this.#errors += 1;
      return null;
    }
  }

  #path(key: string): string {
    return join(this.#folder, key + EXTENSION);
  }
}

/** A file of exactly `bytes` bytes; undefined if it has another size. */
async function readWhole(path: string, bytes: number): Promise<Uint8Array | undefined> {
  return withHandle(await open(path, 'r'), async (handle) => {
    if ((await handle.stat()).size !== bytes) return undefined;
    const file = new Uint8Array(bytes);
    for (let offset = 0; offset < bytes; ) {
      const { bytesRead } = await handle.read(file, offset, Math.min(PIECE, bytes - offset), offset);
      if (bytesRead === 0) return undefined; // truncated meanwhile
      offset += bytesRead;
    }
    return file;
  });
}

async function withHandle<T>(handle: FileHandle, use: (handle: FileHandle) => Promise<T>): Promise<T> {
  try {
    return await use(handle);
  } finally {
    await handle.close();
  }
}

async function isSound(file: Uint8Array, key: string): Promise<boolean> {
  const head = Buffer.concat([MARK, Buffer.from(key, 'hex')]);
  if (!head.equals(file.subarray(0, HEAD_BYTES))) return false;
  const sum = await checksum(file.subarray(0, -SUM_BYTES));
  return Buffer.from(sum).equals(file.subarray(-SUM_BYTES));
}

/** SHA-256 of the SHA-256 of every piece. The thread pool computes them; only a piece at a time is copied for it. */
async function checksum(bytes: Uint8Array): Promise<Uint8Array> {
  const sums: Uint8Array[] = [];
  for (let from = 0; from < bytes.length; from += PIECE) sums.push(await sha256(bytes.subarray(from, from + PIECE)));
  return sha256(Buffer.concat(sums));
}

async function sha256(bytes: Uint8Array): Promise<Uint8Array> {
  return new Uint8Array(await webcrypto.subtle.digest('SHA-256', bytes));
}
