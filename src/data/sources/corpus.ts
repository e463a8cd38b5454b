/** From the settings of a run to the corpus that they name: its files, and how they are distributed to lanes. */

import { join, relative, resolve } from 'node:path';
import { DOCUMENT_SOURCES, isOneOf } from '../../config/data-sources.js';
import type { Config } from '../../config/schema.js';
import type { Environment } from '../../environment.js';
import { UsageError } from '../../errors.js';
import { hubAccess } from '../../hub/access.js';
import type { HttpOptions } from '../../hub/http.js';
import { plural } from '../../text.js';
import { BlobOpener } from './blob.js';
import { type FileReport, resolveFiles, type SkippedFile } from './files.js';
import { type HubRequest, listDataset } from './hub.js';
import { isJsonlName } from './lines.js';
import { countUnits, laneCount } from './order.js';
import { defaultCacheFolder } from './range-cache.js';
import { MORE_TIME } from './silent.js';
import type { CorpusFile, CorpusSpec, FileKind } from './spec.js';

export interface CorpusOptions {
  /** text takes every file as text, jsonl only JSON Lines, `files` each file by its name. */
  readonly source: (typeof DOCUMENT_SOURCES)[number];
  readonly path?: string | readonly string[] | undefined;
  readonly hub: HubRequest;
  readonly textField: string;
  readonly shuffle: boolean;
  readonly seed: number;
  readonly splitSeed: number;
  readonly valFraction: number;
  /** Size of the parts that files are cut into; `auto` for preparation; without it, as lanes need them. */
  readonly partBytes?: number | 'auto' | undefined;
  /** Parts do not cross multiples of this in a file: borders of groups of shards (shards/groups.ts). */
  readonly groupBytes?: number | undefined;
  /** A source that delivers nothing for this long is dead. */
  readonly timeoutSeconds: number;
  readonly cache: { readonly folder: string; readonly limitBytes: number };
  /** HF_ENDPOINT and HF_TOKEN are read from it. */
  readonly environment: Environment;
}

/** Fewer files than this are read in parts, so that every lane has parts of its own. */
const WANTED_UNITS = 96;
const FEW_FILES = 48;
/** Smaller parts cost more in opening files than they gain. */
const MIN_PART_BYTES = 1 << 20;
const MAX_PART_BYTES = 256 << 20;
const WANTED_PARTS = 256;
const LONGEST_STALL_MS = 15_000;
const FIRST_PAUSE_MS = 250;

type Listed = Omit<CorpusFile, 'parts'>;

export async function openCorpus(options: CorpusOptions): Promise<CorpusSpec> {
  const isHub = options.source === 'hub';
  const access = isHub ? hubAccess(options.environment) : undefined;
  const giveUpAfterMs = options.timeoutSeconds * 1000;
  const http: HttpOptions | undefined = access && {
    credential: access.credential,
    giveUpAfterMs,
    stallMs: Math.min(LONGEST_STALL_MS, giveUpAfterMs / 3),
    firstPauseMs: FIRST_PAUSE_MS,
    moreTime: MORE_TIME,
  };
  const { textField, shuffle, seed, splitSeed, valFraction, cache } = options;
  const { listed, skipped } =
    access && http ? { listed: await listHub(options.hub, access, http), skipped: [] } : await listLocal(options);
  const base = { textField, shuffle, seed, splitSeed, valFraction, ...(http && { http, cache }) };
  const { files, largestBlock } = await shareOut(listed, base, partSize(listed, options.partBytes), options.groupBytes);
  return { ...base, files, skipped, lanes: laneCount(countUnits(files), largestBlock, shuffle) };
}

async function listHub(
  request: HubRequest,
  access: Parameters<typeof listDataset>[1],
  http: HttpOptions,
): Promise<Listed[]> {
  const files = await listDataset(request, access, http);
  return files.map(({ name, url, size, identity }) => ({ kind: 'parquet', name, location: url, size, identity }));
}

async function listLocal({ path, source }: CorpusOptions): Promise<{ listed: Listed[]; skipped: SkippedFile[] }> {
  if (path === undefined || path.length === 0)
    throw new UsageError(`data.path: needed by data.source ${source} (--local-path)`);
  const roots = [path].flat().map((given) => resolve(given));
  const { files, skipped } = await resolveFiles(path, (name) => kindOf(name, source) !== undefined);
  const listed = files.map(({ path: location, size, modified }) => {
    // A file in a folder is named from there, so that a corpus may move.
    const root = roots.find((candidate) => location.startsWith(`${candidate}/`));
    const name = root === undefined ? location.split('/').pop()! : relative(root, location);
    const kind = kindOf(location, source) ?? (source === 'jsonl' ? 'jsonl' : 'text');
    return { kind, name, location, size, modified, identity: String(size) };
  });
  return { listed, skipped };
}

/** For preparation: about `WANTED_PARTS` parts whatever the number of files, so that all cores have work. */
function partSize(listed: readonly Listed[], partBytes: number | 'auto' | undefined): number | undefined {
  if (partBytes !== 'auto') return partBytes;
  const total = listed.reduce((sum, { size }) => sum + size, 0);
  return Math.min(MAX_PART_BYTES, Math.max(MIN_PART_BYTES, Math.ceil(total / WANTED_PARTS)));
}

function kindOf(path: string, source: CorpusOptions['source']): FileKind | undefined {
  if (source === 'text') return 'text';
  if (source === 'jsonl') return isJsonlName(path) ? 'jsonl' : undefined;
  if (path.endsWith('.parquet')) return 'parquet';
  if (isJsonlName(path)) return 'jsonl';
  return /\.(txt|text|md|rst|html?)(\.gz|\.zst)?$/.test(path) ? 'text' : undefined;
}

/** Decides in how many parts each file is read, and finds the largest block. */
async function shareOut(
  listed: readonly Listed[],
  spec: Pick<CorpusSpec, 'textField' | 'http' | 'cache' | 'shuffle'>,
  partBytes: number | undefined,
  groupBytes: number | undefined,
): Promise<{ files: CorpusFile[]; largestBlock: number }> {
  const opener = new BlobOpener(spec);
  // Without shuffling one lane reads everything: a file is one part, and no footer is needed before its turn.
  const wanted = spec.shuffle && listed.length < FEW_FILES ? Math.ceil(WANTED_UNITS / listed.length) : 1;
  const inspect = async (file: Listed) => {
    const { inspectParquet } = await import('./parquet.js'); // when it is needed: it is large
    return inspectParquet({ file: { ...file, parts: 1 }, part: 0, textField: spec.textField, opener });
  };
  let largestBlock = 0;
  const files: CorpusFile[] = [];
  for (const file of listed) {
    // With many files the first stands for all. Its footer also shows at once whether the column exists.
    const looked = file.kind === 'parquet' && (wanted > 1 || files.length === 0) ? await inspect(file) : undefined;
    largestBlock = Math.max(largestBlock, looked?.largestGroup ?? 0);
    const most = looked?.groups ?? Math.ceil(file.size / MIN_PART_BYTES);
    const parts = partBytes === undefined ? Math.min(wanted, most) : partsOf(file.size, partBytes, groupBytes);
    files.push({ ...file, parts: isSplittable(file) ? Math.max(1, parts) : 1 });
  }
  return { files, largestBlock };
}

function partsOf(size: number, partBytes: number, groupBytes: number | undefined): number {
  const pieces = groupBytes === undefined ? 1 : pieceCount(size, groupBytes);
  return pieces * Math.ceil(size / pieces / partBytes);
}

/** The pieces of a file of which each belongs to one group of shards. */
export function pieceCount(size: number, groupBytes: number): number {
  return Math.max(1, Math.ceil(size / groupBytes));
}

export function isSplittable({ kind, location }: Pick<CorpusFile, 'kind' | 'location'>): boolean {
  return kind === 'parquet' || (kind === 'jsonl' && !/\.(gz|zst)$/.test(location));
}

/** The corpus of a config. Commands that read documents take it from here too. */
export function corpusOptions(
  { data, train }: Config,
  {
    environment = process.env,
    cacheFolder,
  }: { environment?: Environment | undefined; cacheFolder?: string | undefined },
): CorpusOptions {
  const { source } = data;
  if (!isOneOf(DOCUMENT_SOURCES, source))
    throw new UsageError(`data.source: ${source} has no documents; use one of ${DOCUMENT_SOURCES.join(', ')}`);
  return {
    source,
    ...(data.path !== null && { path: data.path }),
    hub: {
      dataset: data.hub_dataset,
      configuration: data.hub_config,
      split: data.hub_split,
      revision: data.hub_revision,
    },
    textField: data.text_field,
    shuffle: data.shuffle,
    seed: data.seed ?? train.seed,
    splitSeed: data.split_seed,
    valFraction: data.val_fraction,
    timeoutSeconds: data.loader_timeout,
    environment,
    cache: {
      folder: join(cacheFolder ?? defaultCacheFolder(environment), 'hub'),
      limitBytes: data.cache_gb * 2 ** 30,
    },
  };
}

const NAMED_FILES = 4;

/** Lines about the files of a corpus: which are read, which are skipped, where invalid bytes were replaced. */
export function describeFiles({ files, skipped }: CorpusSpec, report?: FileReport): string[] {
  const list = (names: readonly string[]) =>
    names.slice(0, NAMED_FILES).join(', ') +
    (names.length > NAMED_FILES ? ` and ${names.length - NAMED_FILES} more` : '');
  const binary = new Set(report?.skipped);
  const taken = files.filter(({ name }) => !binary.has(name));
  const bytes = taken.reduce((sum, { size }) => sum + size, 0);
  const amount = bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
  const left = [
    ...skipped.map(({ path, reason }) => `${path.split('/').pop()} (${reason})`),
    ...[...binary].map((name) => `${name} (binary)`),
  ];
  const replaced = report?.replaced ?? [];
  const sequences = replaced.reduce((sum, { count }) => sum + count, 0);
  return [
    `data: ${plural(taken.length, 'file')} taken, ${amount}: ${list(taken.map(({ name }) => name))}`,
    ...(left.length > 0 ? [`data: ${plural(left.length, 'file')} skipped: ${list(left)}`] : []),
    ...(sequences > 0
      ? [`data: ${sequences} invalid UTF-8 sequences became U+FFFD in ${list(replaced.map(({ file }) => file))}`]
      : []),
  ];
}
