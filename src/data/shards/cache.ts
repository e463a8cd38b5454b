/**
 * Text is tokenised once: the shards stay in a cache, addressed by everything that decides their content.
 * Two processes may build the same entry at once (each aside, then a rename; the second keeps the first one's). A
 * process that is killed leaves only a partial folder, which a later build removes. A damaged entry is built again.
 */

import { createHash } from 'node:crypto';
import { existsSync, readdirSync, renameSync, rmSync, statSync } from 'node:fs';
import { homedir, hostname } from 'node:os';
import { dirname, join } from 'node:path';
import { TrefoilError } from '../../errors.js';
import { pidExists } from '../../process-identity.js';
import type { Tokenizer } from '../tokenizer.js';
import { DamagedShards } from './format.js';
import { buildAside, type OnProgress, partialName, renameDurably, type TextSource } from './prepare.js';
import { type OpenOptions, ShardReader } from './reader.js';

/** Changes when the same files would give other shards: another cut of documents, another encoder. */
const CACHE_VERSION = 1;
/** A partial folder without a living owner is left alone this long: its machine may share our host name. */
const ABANDONED_AFTER_MS = 10 * 60_000;
const ATTEMPTS = 3;

export interface CacheOptions extends OpenOptions {
  folder?: string;
  onProgress?: OnProgress;
}

/** `$TREFOIL_CACHE/data`, else `trefoil/data` in the user's cache folder. */
export function defaultCacheFolder(environment: NodeJS.ProcessEnv = process.env): string {
  if (environment.TREFOIL_CACHE) return join(environment.TREFOIL_CACHE, 'data');
  return join(environment.XDG_CACHE_HOME || join(homedir(), '.cache'), 'trefoil', 'data');
}

/** The shards of a text source: from the cache, or built into it first. */
export async function openCached(
  source: TextSource,
  tokenizer: Tokenizer,
  options: CacheOptions = {},
): Promise<ShardReader> {
  const root = options.folder ?? defaultCacheFolder();
  const entry = join(root, cacheKey(source, tokenizer));
  // More than one attempt only when another process replaces a damaged entry between our rename and our open.
  for (let attempt = 1; ; attempt++) {
    const present = openIfSound(entry, options);
    if (present !== undefined) return present;
    if (attempt > ATTEMPTS) throw new TrefoilError(`${entry} is damaged again and again; remove it and check the disk`);
    removeAbandoned(root);
    const built = await buildAside(source, tokenizer, entry, options.onProgress);
    install(built.folder, entry);
  }
}

function cacheKey(source: TextSource, tokenizer: Tokenizer): string {
  const textField = source.kind === 'jsonl' ? source.textField : '';
  const parts = [CACHE_VERSION, tokenizer.identity, source.kind, textField, source.files];
  return createHash('sha256').update(JSON.stringify(parts)).digest('hex').slice(0, 32);
}

/** Undefined when there is no entry, or none that can be trusted. */
function openIfSound(entry: string, options: OpenOptions): ShardReader | undefined {
  if (!existsSync(entry)) return undefined;
  try {
    return ShardReader.open(entry, options);
  } catch (error) {
    if (error instanceof DamagedShards) return undefined;
    throw error;
  }
}

/** Gives a finished folder its name. A sound entry that came first stays; a damaged one makes way. */
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

/** Removes what killed builds on this machine left behind. */
function removeAbandoned(root: string): void {
  if (!existsSync(root)) return;
  for (const name of readdirSync(root)) {
    const owner = /\.partial-(.+)-(\d+)-[0-9a-f]{8}$/.exec(name);
    if (owner === null || owner[1] !== hostname() || pidExists(Number(owner[2]))) continue;
    const folder = join(root, name);
    if (Date.now() - lastWrite(folder) > ABANDONED_AFTER_MS) discard(folder);
  }
}

/** Removes a folder under another name: of several processes that try, the rename lets one through. */
function discard(folder: string): void {
  const aside = partialName(join(dirname(folder), 'removed'));
  try {
    renameSync(folder, aside);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return;
    throw error;
  }
  rmSync(aside, { recursive: true, force: true });
}

/** The newest change in a folder; now, if it goes away meanwhile. */
function lastWrite(folder: string): number {
  const times = [folder, ...list(folder)].map(
    (path) => statSync(path, { throwIfNoEntry: false })?.mtimeMs ?? Date.now(),
  );
  return Math.max(...times);
}

function list(folder: string): string[] {
  try {
    return readdirSync(folder).map((name) => join(folder, name));
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return [];
    throw error;
  }
}
