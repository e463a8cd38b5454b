/** A file that is read by position, here or far away. */

import { type FileHandle, open } from 'node:fs/promises';
import { ExitCode, TrefoilError, UsageError } from '../../errors.js';
import { fetchRange, type HttpOptions } from '../hub/http.js';
import { RangeCache } from '../hub/range-cache.js';
import type { CorpusFile, CorpusSpec } from './spec.js';

export interface Blob {
  readonly size: number;
  /** The bytes [start, end), exactly. */
  read(start: number, end: number): Promise<Uint8Array>;
  close(): Promise<void>;
}

/** A footer of a thousand row groups takes some megabytes. */
const REMEMBERED_FILES = 16;

/** Opens the files of a corpus; one for a thread, so that its cache is shared. */
export class BlobOpener {
  readonly #http: HttpOptions | undefined;
  readonly #cache: RangeCache;
  /** Oldest use first. */
  readonly #facts = new Map<string, unknown>();

  constructor(spec: Pick<CorpusSpec, 'http' | 'cache'>) {
    this.#http = spec.http;
    this.#cache = new RangeCache(spec.cache?.folder ?? '', spec.cache?.limitBytes ?? 0);
  }

  /** What was found out about a file that is opened for each of its parts; the last few files are remembered. */
  async remember<Fact>(file: CorpusFile, find: () => Promise<Fact>): Promise<Fact> {
    if (file.parts === 1) return find();
    const known = (this.#facts.get(file.location) as Fact | undefined) ?? (await find());
    this.#facts.delete(file.location);
    this.#facts.set(file.location, known);
    if (this.#facts.size > REMEMBERED_FILES) this.#facts.delete(this.#facts.keys().next().value!);
    return known;
  }

  async open(file: CorpusFile): Promise<Blob> {
    return /^https?:/.test(file.location) ? this.#openRemote(file) : openLocal(file);
  }

  #openRemote({ location, size, identity }: CorpusFile): Blob {
    const http = this.#http;
    if (http === undefined) throw new TrefoilError('a remote file needs settings for HTTP');
    return {
      size,
      read: (start, end) =>
        this.#cache.get(`${identity} ${start} ${end}`, () => fetchRange(location, { start, end, size }, http)),
      close: async () => {},
    };
  }
}

async function openLocal({ location, size }: CorpusFile): Promise<Blob> {
  let handle: FileHandle;
  try {
    handle = await open(location);
  } catch (error) {
    throw new UsageError(`data.path: cannot read ${location}: ${(error as Error).message}`, { cause: error });
  }
  return {
    size,
    async read(start, end) {
      const bytes = new Uint8Array(end - start);
      for (let done = 0; done < bytes.length; ) {
        const { bytesRead } = await handle.read(bytes, done, bytes.length - done, start + done);
        if (bytesRead === 0)
          throw new TrefoilError(`${location}: ends early; it was cut short while in use`, ExitCode.dataSource);
        done += bytesRead;
      }
      return bytes;
    },
    close: () => handle.close(),
  };
}
