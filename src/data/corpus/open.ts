/** From the settings of a run to the corpus they name: which files there are, and how they are shared out to lanes. */

import { relative, resolve } from 'node:path';
import { UsageError } from '../../errors.js';
import { resolveFiles } from '../documents/files.js';
import { isJsonlName } from '../documents/jsonl.js';
import { type HubRequest, hubAccess, listDataset } from '../hub/dataset.js';
import type { HttpOptions } from '../hub/http.js';
import { BlobOpener } from './blob.js';
import { countUnits, laneCount } from './order.js';
import { inspectParquet } from './parquet.js';
import type { CorpusFile, CorpusSpec, FileKind } from './spec.js';

export interface CorpusOptions {
  /** text takes every file as text, jsonl only JSON Lines, fineweb_edu_local each by its name. */
  readonly source: 'fineweb_edu' | 'fineweb_edu_local' | 'text' | 'jsonl';
  readonly path?: string | readonly string[] | undefined;
  readonly hub: HubRequest;
  readonly textField: string;
  readonly shuffle: boolean;
  readonly seed: number;
  readonly valFraction: number;
  /** Cut files into parts of about this size; without it, as lanes need them. */
  readonly partBytes?: number | undefined;
  /** Nothing for so long means that the source is dead. */
  readonly timeoutSeconds: number;
  readonly cache: { readonly folder: string; readonly limitBytes: number };
  /** HF_ENDPOINT and HF_TOKEN are read from it. */
  readonly environment: Readonly<Record<string, string | undefined>>;
}

/** Fewer files than this are read in parts, so that every lane has something of its own. */
const WANTED_UNITS = 96;
const FEW_FILES = 48;
/** A smaller part of a file of lines is not worth a request of its own. */
const LEAST_PART_BYTES = 1 << 20;
const LONGEST_STALL_MS = 15_000;
const FIRST_PAUSE_MS = 250;

type Listed = Omit<CorpusFile, 'parts'>;

export async function openCorpus(options: CorpusOptions): Promise<CorpusSpec> {
  const isHub = options.source === 'fineweb_edu';
  const access = isHub ? hubAccess(options.environment) : undefined;
  const giveUpAfterMs = options.timeoutSeconds * 1000;
  const http: HttpOptions | undefined = access && {
    credential: access.credential,
    giveUpAfterMs,
    stallMs: Math.min(LONGEST_STALL_MS, giveUpAfterMs / 3),
    firstPauseMs: FIRST_PAUSE_MS,
  };
  const { textField, shuffle, seed, valFraction, cache } = options;
  const listed = access && http ? await listHub(options.hub, access, http) : await listLocal(options);
  const base = { textField, shuffle, seed, valFraction, ...(http && { http, cache }) };
  const { files, largestBlock } = await shareOut(listed, base, options.partBytes);
  return { ...base, files, lanes: laneCount(countUnits(files), largestBlock, shuffle) };
}

async function listHub(
  request: HubRequest,
  access: Parameters<typeof listDataset>[1],
  http: HttpOptions,
): Promise<Listed[]> {
  const files = await listDataset(request, access, http);
  return files.map(({ name, url, size, identity }) => ({ kind: 'parquet', name, location: url, size, identity }));
}

async function listLocal({ path, source }: CorpusOptions): Promise<Listed[]> {
  if (path === undefined || path.length === 0)
    throw new UsageError(`data.path: needed by data.source ${source} (--local-path)`);
  const roots = [path].flat().map((given) => resolve(given));
  const found = await resolveFiles(path, (name) => kindOf(name, source) !== undefined);
  const files = found.flatMap((file) => {
    // What lies in a folder is named from there, so that a corpus may move.
    const root = roots.find((candidate) => file.path.startsWith(`${candidate}/`));
    const name = root === undefined ? file.path.split('/').pop()! : relative(root, file.path);
    const kind = kindOf(file.path, source) ?? (source === 'jsonl' ? 'jsonl' : 'text');
    return file.size === 0 ? [] : [{ kind, name, location: file.path, size: file.size, identity: String(file.size) }];
  });
  if (files.length === 0) throw new UsageError(`data.path: only empty files in ${[path].flat().join(', ')}`);
  return files;
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
): Promise<{ files: CorpusFile[]; largestBlock: number }> {
  const opener = new BlobOpener(spec);
  // In the order in which it is written one lane reads all: a file as one part, and no footer is needed before its turn.
  const wanted = spec.shuffle && listed.length < FEW_FILES ? Math.ceil(WANTED_UNITS / listed.length) : 1;
  const inspect = (file: Listed) =>
    inspectParquet({ file: { ...file, parts: 1 }, part: 0, textField: spec.textField, opener });
  let largestBlock = 0;
  const files: CorpusFile[] = [];
  for (const file of listed) {
    // With many files one speaks for all: its footer also says at once when there is no such column.
    const looked = file.kind === 'parquet' && (wanted > 1 || files.length === 0) ? await inspect(file) : undefined;
    largestBlock = Math.max(largestBlock, looked?.largestGroup ?? 0);
    const most = looked?.groups ?? Math.ceil(file.size / LEAST_PART_BYTES);
    const parts = partBytes === undefined ? Math.min(wanted, most) : Math.ceil(file.size / partBytes);
    files.push({ ...file, parts: isSplittable(file) ? Math.max(1, parts) : 1 });
  }
  return { files, largestBlock };
}

function isSplittable({ kind, location }: Listed): boolean {
  return kind === 'parquet' || (kind === 'jsonl' && !/\.(gz|zst)$/.test(location));
}
