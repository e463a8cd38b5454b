/**
 * Text is tokenised once: the shards stay in a cache, addressed by everything that determines their content. Two processes
 * may build the same entry at once: each builds aside and renames, and the second keeps the entry of the first. A killed
 * process leaves only a partial folder, which a later build removes. A damaged entry is built again. After a build the
 * entries that were not used for the longest time are removed, until the cache is within its limit.
 */

import { createHash } from 'node:crypto';
import { existsSync, readFileSync, rmSync, statSync, utimesSync, writeFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { basename, join } from 'node:path';
import { TrefoilError } from '../../errors.js';
import * as z from '../../zod.js';
import type { FileReport } from '../sources/files.js';
import { defaultCacheFolder } from '../sources/range-cache.js';
import type { CorpusSpec } from '../sources/spec.js';
import type { Tokenizer } from '../tokenizer.js';
import { type BuildOptions, buildShards } from './build.js';
import { buildAside, discard, isPartialName, listFolder, removeAbandoned, renameDurably } from './folders.js';
import { DamagedShards, readIndex } from './format.js';
import { type ShardOptions, ShardReader } from './reader.js';

/** Changes when the same files would give other shards: another cut of documents, another encoder. */
const CACHE_VERSION = 2;
const ATTEMPTS = 3;
/** Less text than this is tokenised before threads have started. */
const THREADED_BYTES = 8 << 20;
/** Beside the shards of an entry: what happened to the source files. */
const REPORT_NAME = 'files.json';

const Report = z.object({
  skipped: z.array(z.string()),
  replaced: z.array(z.object({ file: z.string(), count: z.number() })),
});

export interface CacheOptions extends ShardOptions {
  readonly folder?: string | undefined;
  readonly environment?: NodeJS.ProcessEnv | undefined;
  /** The cache is kept below this after a build; the entry in use always stays. Default: no limit. */
  readonly limitBytes?: number | undefined;
  readonly onProgress?: BuildOptions['onProgress'];
}

export interface CachedShards {
  readonly reader: ShardReader;
  readonly report: FileReport;
}

/** The shards of a text source: from the cache, or built into it first. */
export async function openCached(
  spec: CorpusSpec,
  tokenizer: Tokenizer,
  tokenizerName: string,
  options: CacheOptions = {},
): Promise<CachedShards> {
  const root = options.folder ?? defaultCacheFolder(options.environment);
  const entry = join(root, cacheKey(spec, tokenizer));
  const size = spec.files.reduce((sum, file) => sum + file.size, 0);
  const workers = size < THREADED_BYTES ? 1 : availableParallelism();
  // More than one attempt only when another process replaces a damaged entry between our rename and our open.
  for (let attempt = 1; ; attempt++) {
    const reader = openIfSound(entry, options);
    if (reader !== undefined) return { reader, report: readReport(entry) };
    if (attempt > ATTEMPTS) throw new TrefoilError(`${entry} is damaged repeatedly; remove it and check the disk`);
    removeAbandoned(root);
    const { onProgress } = options;
    const built = await buildAside(entry, async (folder) => {
      const { report } = await buildShards({ spec, tokenizer, tokenizerName, workers, onProgress }, folder);
      writeFileSync(join(folder, REPORT_NAME), JSON.stringify(report));
    });
    install(built, entry);
    if (options.limitBytes !== undefined) shrinkCache(root, options.limitBytes, basename(entry));
  }
}

function cacheKey({ files, textField }: CorpusSpec, tokenizer: Tokenizer): string {
  const content = files.map(({ kind, location, size, modified }) => [kind, location, size, modified]);
  const parts = [CACHE_VERSION, tokenizer.identity, textField, content];
  return createHash('sha256').update(JSON.stringify(parts)).digest('hex').slice(0, 32);
}

/** Undefined when there is no entry, or a damaged one. */
function openIfSound(entry: string, options: ShardOptions): ShardReader | undefined {
  if (!existsSync(entry)) return undefined;
  try {
    const reader = ShardReader.open(entry, options);
    // The time of change is the time of use: access times are off on many disks.
    const now = new Date();
    utimesSync(entry, now, now);
    return reader;
  } catch (error) {
    if (error instanceof DamagedShards) return undefined;
    throw error;
  }
}

/** A report that cannot be read costs its messages only: the shards have hashes of their own. */
function readReport(entry: string): FileReport {
  const path = join(entry, REPORT_NAME);
  try {
    return Report.parse(JSON.parse(readFileSync(path, 'utf8')));
  } catch {
    return { skipped: [], replaced: [] };
  }
}

/** Gives a finished folder its name. A sound entry of another process stays; a damaged one is removed. */
function install(built: string, entry: string): void {
  const present = openIfSound(entry, {});
  if (present !== undefined) {
    present.close();
    rmSync(built, { recursive: true, force: true });
    return;
  }
  discard(entry);
  try {
    renameDurably(built, entry);
  } catch (error) {
    // Another process was faster by a moment: the next attempt opens its entry.
    const code = (error as NodeJS.ErrnoException).code;
    rmSync(built, { recursive: true, force: true });
    if (code !== 'ENOTEMPTY' && code !== 'EEXIST') throw error;
  }
}

/** One thing in the cache: the shards of a source, all ranges fetched from the hub, or an unfinished build. */
export interface CacheEntry {
  readonly name: string;
  readonly kind: 'shards' | 'fetched' | 'partial';
  readonly bytes: number;
  /** Milliseconds since 1970. */
  readonly lastUsed: number;
  /** Number of tokens; null for entries that are not shards. */
  readonly tokens: number | null;
  readonly tokenizer: string | null;
}

const HUB_FOLDER = 'hub';

/** Lists the entries of a cache folder, the least recently used first. */
export function listCache(root: string): CacheEntry[] {
  const entries = listFolder(root).map((name): CacheEntry => {
    const path = join(root, name);
    const lastUsed = statSync(path, { throwIfNoEntry: false })?.mtimeMs ?? 0;
    const kind = name === HUB_FOLDER ? 'fetched' : isPartialName(name) ? 'partial' : 'shards';
    const index = kind === 'shards' ? readIfSound(path) : undefined;
    return {
      name,
      kind,
      bytes: folderBytes(path),
      lastUsed,
      tokens: index?.tokens ?? null,
      tokenizer: index?.tokenizer.name ?? null,
    };
  });
  return entries.sort((a, b) => a.lastUsed - b.lastUsed);
}

function readIfSound(folder: string): ReturnType<typeof readIndex> | undefined {
  try {
    return readIndex(folder);
  } catch (error) {
    if (error instanceof DamagedShards) return undefined;
    throw error;
  }
}

function folderBytes(path: string): number {
  const found = statSync(path, { throwIfNoEntry: false });
  if (found === undefined) return 0;
  if (!found.isDirectory()) return found.size;
  return listFolder(path).reduce((sum, name) => sum + folderBytes(join(path, name)), 0);
}

/**
 * Removes shards, the least recently used first, until all shards take at most `limitBytes`; returns what was removed. A
 * process that reads a removed entry keeps its open files.
 */
export function shrinkCache(root: string, limitBytes: number, keep?: string): CacheEntry[] {
  // Most builds leave the cache below its limit, and listing it reads the index of every entry.
  if (folderBytes(root) <= limitBytes) return [];
  const shards = listCache(root).filter(({ kind }) => kind === 'shards');
  let total = shards.reduce((sum, { bytes }) => sum + bytes, 0);
  const removed: CacheEntry[] = [];
  for (const entry of shards) {
    if (total <= limitBytes) break;
    if (entry.name === keep) continue;
    discard(join(root, entry.name));
    removed.push(entry);
    total -= entry.bytes;
  }
  return removed;
}

/** Removes everything except builds of living processes; returns what was removed. */
export function clearCache(root: string): CacheEntry[] {
  removeAbandoned(root);
  const removed = listCache(root).filter(({ kind }) => kind !== 'partial');
  for (const { name } of removed) discard(join(root, name));
  return removed;
}
