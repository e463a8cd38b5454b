/**
 * Least-recently-used disk cache for ranges of remote files. A file is a hash followed by the bytes, so that a damaged one
 * is detected and fetched again. Several threads and processes may share the folder: each writes aside and renames, and a
 * file that another process removed counts as a miss.
 */

import { createHash, randomBytes } from 'node:crypto';
import { mkdir, readdir, readFile, rename, rm, stat, utimes, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { cacheFolder, errorCode } from '../../files.js';

const HASH_BYTES = 32;
/** Eviction goes down to this share of the limit, so that not every write evicts. */
const KEPT_SHARE = 0.9;
const NAME = /^[0-9a-f]{64}$/;

export class RangeCache {
  readonly #folder: string;
  readonly #limit: number;
  /** Bytes in the folder, known after the first scan. An estimate, as other processes write too. */
  #bytes: number | undefined;
  #clearing: Promise<void> | undefined;

  constructor(folder: string, limitBytes: number) {
    this.#folder = folder;
    this.#limit = limitBytes;
  }

  /** The cached bytes of `key`, or those that `fetch` returns, which are then cached. */
  async get(key: string, fetch: () => Promise<Uint8Array>): Promise<Uint8Array> {
    if (this.#limit === 0) return fetch();
    const path = this.#pathOf(key);
    const kept = await readKept(path);
    if (kept !== undefined) return kept;
    const bytes = await fetch();
    await this.#keep(path, bytes);
    return bytes;
  }

  /** Removes the bytes of `key`. */
  async drop(key: string): Promise<void> {
    if (this.#limit > 0) await rm(this.#pathOf(key), { force: true });
  }

  #pathOf(key: string): string {
    return join(this.#folder, createHash('sha256').update(key).digest('hex'));
  }

  /** Ignores write errors: the bytes are in memory already. */
  async #keep(path: string, bytes: Uint8Array): Promise<void> {
    if (bytes.length + HASH_BYTES > this.#limit) return;
    const aside = `${path}.${process.pid}-${randomBytes(4).toString('hex')}`;
    try {
      await mkdir(this.#folder, { recursive: true });
      await writeFile(aside, Buffer.concat([createHash('sha256').update(bytes).digest(), bytes]));
      await rename(aside, path);
    } catch {
      await rm(aside, { force: true });
      return;
    }
    if (this.#bytes !== undefined) this.#bytes += bytes.length + HASH_BYTES;
    if (this.#bytes === undefined || this.#bytes > this.#limit) {
      this.#clearing ??= this.#clear().finally(() => {
        this.#clearing = undefined;
      });
      await this.#clearing;
    }
  }

  async #clear(): Promise<void> {
    const files: { path: string; bytes: number; used: number }[] = [];
    for (const name of await readdir(this.#folder)) {
      const path = join(this.#folder, name);
      const facts = await ifThere(stat(path));
      if (facts === undefined) continue;
      const abandoned = !NAME.test(name) && Date.now() - facts.mtimeMs > 600_000;
      if (abandoned) await rm(path, { force: true });
      else files.push({ path, bytes: facts.size, used: facts.mtimeMs });
    }
    let total = files.reduce((sum, file) => sum + file.bytes, 0);
    if (total > this.#limit) {
      files.sort((a, b) => a.used - b.used);
      for (const file of files) {
        if (total <= KEPT_SHARE * this.#limit) break;
        await rm(file.path, { force: true });
        total -= file.bytes;
      }
    }
    this.#bytes = total;
  }
}

/** The bytes of a file whose hash matches; undefined if the file is missing or damaged. */
async function readKept(path: string): Promise<Uint8Array | undefined> {
  const content = await ifThere(readFile(path));
  if (content === undefined) return undefined;
  const bytes = content.subarray(HASH_BYTES);
  if (!createHash('sha256').update(bytes).digest().equals(content.subarray(0, HASH_BYTES))) return undefined;
  const now = new Date();
  await ifThere(utimes(path, now, now)); // "used" is the time of change: access times are off on many disks
  return bytes;
}

async function ifThere<Value>(promise: Promise<Value>): Promise<Value | undefined> {
  try {
    return await promise;
  } catch (error) {
    if (errorCode(error) === 'ENOENT') return undefined;
    throw error;
  }
}

/** `$TREFOIL_CACHE/data`, else `trefoil/data` in the user's cache folder. */
export function defaultCacheFolder(environment: NodeJS.ProcessEnv = process.env): string {
  return join(cacheFolder(environment), 'data');
}
