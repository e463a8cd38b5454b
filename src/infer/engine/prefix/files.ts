/**
 * Parts of cached prefixes in a folder, one file each, named by the key of the prefix that the part ends.
 *
 * A file holds a mark of its format, the key, the checksum of its content, the length of the prefix that the content
 * continues, a hash of all these, and the content. It is written aside and renamed, so several processes can use one folder;
 * a file that is not sound, or not a plain file, is deleted and never used. The time of
 * modification is the time of the last use: beyond the limit the least recently used files are deleted first, also those
 * of other processes. All is asynchronous: files are read and written by the threads of the runtime.
 */
import { createHash, randomBytes } from 'node:crypto';
import { accessSync, chmodSync, constants } from 'node:fs';
import { type FileHandle, open, readdir, rename, rm, stat, utimes } from 'node:fs/promises';
import { join } from 'node:path';
import { UsageError } from '../../../errors.js';
import { ensureFolder, errorCode, fileError, othersWith } from '../../../files.js';

const MARK = Buffer.from('TREFOIL PREFIX 4', 'latin1');
const KEY_BYTES = 32;
const SUM_AT = MARK.length + KEY_BYTES;
const FROM_AT = SUM_AT + 8;
/** The hash of the mark, the key, the checksum, and the number of tokens before those of the content. */
const HASH_AT = FROM_AT + 8;
/** Bytes before the content. */
const HEAD_BYTES = HASH_AT + 32;
/** A pipe is opened without waiting for its other end, and a link is not followed. */
const OPEN_FLAGS = constants.O_RDONLY | (constants.O_NONBLOCK ?? 0) | (constants.O_NOFOLLOW ?? 0);
const EXTENSION = '.prefix';
/** Unfinished files of this age [ms] were left by a process that was killed. */
const ABANDONED = 3_600_000;
/** The folder is listed again after this part of the limit was written: other processes write, too. */
const LISTED_EVERY = 1 / 16;

/** Contents of a folder, and its failures. */
export interface PrefixFileStats {
  /** Bytes of all files when the folder was listed last, and of those written since. */
  readonly bytes: number;
  /** Files that were deleted because they were truncated, altered or of another format. */
  readonly damaged: number;
  /** Reads and writes that the file system refused. */
  readonly errors: number;
}

/** A file that is open. Its content is not verified. */
export interface OpenPrefixFile {
  readonly key: string;
  /** Tokens of the prefix that the content continues. */
  readonly from: number;
  /** Bytes of the content, and the checksum that it must have. */
  readonly size: number;
  readonly sum: bigint;
  /** Fills `into` with the content from `offset` on; false if the file system refuses. */
  read(into: Uint8Array, offset: number): Promise<boolean>;
  close(): Promise<void>;
}

/** A file and the time of its last use [s since 1970]. */
interface StoredFile {
  readonly path: string;
  readonly size: number;
  readonly at: number;
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
    const others = othersWith(folder);
    if (others !== null)
      throw new UsageError(
        `the prefix cache ${folder} ${others}, who could change answers: \`chmod go-w\` it if you trust its files, or use a folder of your own`,
      );
  }

  get stats(): PrefixFileStats {
    return { bytes: this.#bytes, damaged: this.#damaged, errors: this.#errors };
  }

  /** Opens the file of a key (64 hex digits); null if it does not exist. `sizeFrom(from)`: its size if it continues `from` tokens. */
  async open(key: string, sizeFrom: (from: number) => number): Promise<OpenPrefixFile | null> {
    const handle = await this.#openPlain(key);
    if (!handle) return null;
    const head = Buffer.alloc(HEAD_BYTES);
    const facts = await this.#attempt(async () => {
      const [stats] = await Promise.all([handle.stat(), readFully(handle, head, 0)]);
      return stats;
    });
    const sum = head.readBigUInt64LE(SUM_AT);
    const from = Number(head.readBigUInt64LE(FROM_AT));
    const close = () => handle.close();
    if (facts && headOf(key, from, sum)?.equals(head) && facts.size === HEAD_BYTES + sizeFrom(from)) {
      const read = async (into: Uint8Array, offset: number) =>
        (await this.#attempt(() => readFully(handle, into, HEAD_BYTES + offset))) ?? false;
      return { key, from, size: facts.size - HEAD_BYTES, sum, read, close };
    }
    await close();
    if (facts) await this.discard(key);
    return null;
  }

  /** The plain file of a key. Anything else in its place is deleted. */
  async #openPlain(key: string): Promise<FileHandle | null> {
    try {
      const handle = await open(this.#path(key), OPEN_FLAGS);
      if ((await handle.stat()).isFile()) return handle;
      await handle.close();
    } catch (error) {
      const code = errorCode(error);
      if (code === undefined) throw error;
      if (code === 'ENOENT') return null;
      const isSpecial = code === 'ELOOP' || code === 'ENXIO'; // a link, or a socket
      if (!isSpecial) {
        this.#errors += 1;
        return null;
      }
    }
    await this.discard(key);
    return null;
  }

  /** Deletes a damaged file. */
  async discard(key: string): Promise<void> {
    this.#damaged += 1;
    await this.#attempt(() => rm(this.#path(key), { force: true }));
  }

  /**
   * Stores `size` bytes that `fill` provides with their checksum, which continue a prefix of `from` tokens, unless there is
   * such a file already. `usedAt`: seconds since 1970. Nothing is written if more recently used files leave no room.
   */
  async write(
    key: string,
    from: number,
    size: number,
    usedAt: number,
    fill: (content: Uint8Array) => Promise<bigint>,
  ): Promise<void> {
    const path = this.#path(key);
    if ((await this.#attempt(() => utimes(path, usedAt, usedAt).then(() => true))) !== null) return;
    const bytes = HEAD_BYTES + size;
    if (!(await this.#makeRoom(bytes, usedAt))) return;
    const file = new Uint8Array(bytes);
    const head = headOf(key, from, await fill(file.subarray(HEAD_BYTES)));
    if (!head) throw new Error(`a prefix cannot continue ${from} tokens`);
    file.set(head);
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
    const files = await this.list();
    if (fits()) return true;
    // A little more than needed, so that not every write lists the folder.
    const target = this.#most * (1 - LISTED_EVERY) - bytes;
    for (const { path, size, at } of [...files].sort((a, b) => a.at - b.at)) {
      if (this.#bytes <= target || at >= usedAt) break;
      if ((await this.#attempt(() => rm(path, { force: true }).then(() => true))) === null) continue;
      this.#bytes -= size;
    }
    if (!fits()) this.#refusedUpTo = usedAt;
    return fits();
  }

  /** The files, and notes their size. */
  async list(): Promise<readonly StoredFile[]> {
    const files = (await this.#attempt(() => this.#find())) ?? [];
    this.#bytes = files.reduce((sum, { size }) => sum + size, 0);
    this.#writtenSinceListing = 0;
    return files;
  }

  async #find(): Promise<StoredFile[]> {
    const files: StoredFile[] = [];
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

/** Fills `into` from byte `from` on; false if the file ends before. */
async function readFully(handle: FileHandle, into: Uint8Array, from: number): Promise<boolean> {
  for (let done = 0; done < into.length; ) {
    const { bytesRead } = await handle.read(into, done, into.length - done, from + done);
    if (bytesRead === 0) return false;
    done += bytesRead;
  }
  return true;
}

async function withHandle<T>(handle: FileHandle, use: (handle: FileHandle) => Promise<T>): Promise<T> {
  try {
    return await use(handle);
  } finally {
    await handle.close();
  }
}

/** Null for a number of tokens that no file has. */
function headOf(key: string, from: number, sum: bigint): Buffer | null {
  if (!Number.isSafeInteger(from)) return null;
  const head = Buffer.alloc(HEAD_BYTES);
  MARK.copy(head);
  head.write(key, MARK.length, 'hex');
  head.writeBigUInt64LE(sum, SUM_AT);
  head.writeBigUInt64LE(BigInt(from), FROM_AT);
  createHash('sha256').update(head.subarray(0, HASH_AT)).digest().copy(head, HASH_AT);
  return head;
}
