/** A file that is read by position, local or remote. */

import { readSync } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { ExitCode, TrefoilError, UsageError } from '../../errors.js';
import { fetchRange, type HttpOptions } from '../../hub/http.js';
import { RangeCache } from './range-cache.js';
import type { CorpusFile, CorpusSpec } from './spec.js';

export interface Blob {
  readonly size: number;
  /** The bytes [start, end), exactly. */
  read(start: number, end: number): Promise<Uint8Array>;
  /** Removes what was read from the cache: it does not parse. */
  forget?(): Promise<void>;
  close(): Promise<void>;
}

export interface BlobOptions {
  /** Number of unused local files that stay open, until the thread ends. */
  readonly keptOpen?: number;
  /** Reads local files without leaving the thread, which is quicker where it has nothing else to do meanwhile. */
  readonly sync?: boolean;
}

/** A footer of a thousand row groups takes some megabytes. */
const REMEMBERED_FILES = 16;

interface OpenFile {
  readonly handle: Promise<FileHandle>;
  users: number;
}

/** Opens the files of a corpus. A thread has one opener, so that all its lanes share the cache. */
export class BlobOpener {
  readonly #http: HttpOptions | undefined;
  readonly #cache: RangeCache;
  /** Number of unused local files that stay open, because their parts are read in a mixed order. */
  readonly #keptOpen: number;
  readonly #sync: boolean;
  /** Oldest use first. */
  readonly #files = new Map<string, OpenFile>();
  /** Oldest use first. */
  readonly #facts = new Map<string, unknown>();

  constructor(spec: Pick<CorpusSpec, 'http' | 'cache'>, { keptOpen = 0, sync = false }: BlobOptions = {}) {
    this.#http = spec.http;
    this.#keptOpen = keptOpen;
    this.#sync = sync;
    this.#cache = new RangeCache(spec.cache?.folder ?? '', spec.cache?.limitBytes ?? 0);
  }

  /** Caches what `find` returns for a file that is opened once per part. Keeps the last few files. */
  async remember<Fact>(file: CorpusFile, find: () => Promise<Fact>): Promise<Fact> {
    if (file.parts === 1) return find();
    const known = (this.#facts.get(file.location) as Fact | undefined) ?? (await find());
    this.#facts.delete(file.location);
    this.#facts.set(file.location, known);
    if (this.#facts.size > REMEMBERED_FILES) this.#facts.delete(this.#facts.keys().next().value!);
    return known;
  }

  async open(file: CorpusFile): Promise<Blob> {
    return /^https?:/.test(file.location) ? this.#openRemote(file) : this.#openLocal(file);
  }

  #openRemote({ location, size, identity }: CorpusFile): Blob {
    const http = this.#http;
    if (http === undefined) throw new TrefoilError('a remote file needs settings for HTTP');
    const keys = new Set<string>();
    return {
      size,
      read: (start, end) => {
        // Any server may claim any identity: the bytes of one are not used for another.
        const key = `${new URL(location).host} ${identity} ${start} ${end}`;
        keys.add(key);
        return this.#cache.get(key, () => fetchRange(location, { start, end, size }, http));
      },
      forget: async () => {
        for (const key of keys) await this.#cache.drop(key);
      },
      close: async () => {},
    };
  }

  async #openLocal({ location, size }: CorpusFile): Promise<Blob> {
    const file = this.#files.get(location) ?? { handle: openFile(location), users: 0 };
    this.#files.delete(location);
    this.#files.set(location, file);
    file.users++;
    try {
      const handle = await file.handle;
      return {
        size,
        read: (start, end) => readExactly(handle, location, start, end, this.#sync),
        close: () => this.#release(file),
      };
    } catch (error) {
      this.#files.delete(location);
      throw error;
    }
  }

  async #release(file: OpenFile): Promise<void> {
    file.users--;
    const unused = [...this.#files].filter(([, { users }]) => users === 0);
    for (const [location, { handle }] of unused.slice(0, Math.max(0, unused.length - this.#keptOpen))) {
      this.#files.delete(location);
      await (await handle).close();
    }
  }
}

async function openFile(location: string): Promise<FileHandle> {
  try {
    return await open(location);
  } catch (error) {
    throw new UsageError(`data.path: cannot read ${location}: ${(error as Error).message}`, { cause: error });
  }
}

async function readExactly(
  handle: FileHandle,
  location: string,
  start: number,
  end: number,
  sync: boolean,
): Promise<Uint8Array> {
  const bytes = new Uint8Array(end - start);
  for (let done = 0; done < bytes.length; ) {
    const left = bytes.length - done;
    const bytesRead = sync
      ? readSync(handle.fd, bytes, done, left, start + done)
      : (await handle.read(bytes, done, left, start + done)).bytesRead;
    if (bytesRead === 0)
      throw new TrefoilError(`${location}: ends early; it was cut short while in use`, ExitCode.dataSource);
    done += bytesRead;
  }
  return bytes;
}
