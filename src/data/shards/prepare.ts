/** From files of text to a folder of token shards: the one way text enters, for the cache and for `data prepare`. */

import { randomBytes } from 'node:crypto';
import { closeSync, existsSync, fsyncSync, openSync, readdirSync, renameSync, rmSync } from 'node:fs';
import { hostname } from 'node:os';
import { dirname } from 'node:path';
import { TrefoilError, UsageError } from '../../errors.js';
import { ensureFolder } from '../../folders.js';
import { cutText, type Document, type ReadStatistics } from '../documents/document.js';
import { findChangedFile, resolveFiles, type SourceFile } from '../documents/files.js';
import { isJsonlName, readJsonlDocuments } from '../documents/jsonl.js';
import { readTextDocuments } from '../documents/text.js';
import type { Tokenizer } from '../tokenizer.js';
import type { ShardIndex } from './format.js';
import { ShardWriter } from './writer.js';

/** Text to tokenise: which files, and how to find the documents in them. */
export interface TextSource {
  readonly kind: 'text' | 'jsonl';
  readonly files: readonly SourceFile[];
  readonly textField: string;
}

/** Progress of the preparation of a source. */
export interface PrepareProgress {
  readonly documents: number;
  readonly tokens: number;
  readonly bytes: number;
  readonly totalBytes: number;
}

/** Called while a source is prepared. */
export type OnProgress = (progress: PrepareProgress) => void;

const PROGRESS_INTERVAL_MS = 200;

export async function listTextSource(
  kind: 'text' | 'jsonl',
  paths: string | readonly string[],
  textField = 'text',
): Promise<TextSource> {
  return { kind, files: await resolveFiles(paths, kind === 'jsonl' ? isJsonlName : undefined), textField };
}

/** Writes the shards of a source to a new folder, all or nothing. */
export async function prepareShards(
  source: TextSource,
  tokenizer: Tokenizer,
  folder: string,
  onProgress?: OnProgress,
): Promise<ShardIndex> {
  if (existsSync(folder) && readdirSync(folder).length > 0) {
    throw new UsageError(`${folder} is not empty; name a new folder for the shards, or remove it`);
  }
  const built = await buildAside(source, tokenizer, folder, onProgress);
  renameDurably(built.folder, folder);
  return built.index;
}

/** A name beside `target` that tells which process on which machine made it, so that remains can be known as such. */
export function partialName(target: string): string {
  return `${target}.partial-${hostname()}-${process.pid}-${randomBytes(4).toString('hex')}`;
}

/** Builds shards in a folder of its own beside `target`; the caller renames it. On failure nothing stays. */
export async function buildAside(
  source: TextSource,
  tokenizer: Tokenizer,
  target: string,
  onProgress?: OnProgress,
): Promise<{ folder: string; index: ShardIndex }> {
  const folder = partialName(target);
  try {
    ensureFolder(folder);
  } catch (error) {
    throw cannotWrite(folder, error as Error);
  }
  try {
    return { folder, index: await writeShards(source, tokenizer, folder, onProgress) };
  } catch (error) {
    rmSync(folder, { recursive: true, force: true });
    // Errors of reading carry their own message; one with a bare code comes from writing here.
    const isOwn = error instanceof TrefoilError || (error as NodeJS.ErrnoException).code === undefined;
    throw isOwn ? error : cannotWrite(folder, error as Error);
  }
}

function cannotWrite(folder: string, cause: Error): TrefoilError {
  const remedy = 'free space, or choose another place (TREFOIL_CACHE moves the cache)';
  return new TrefoilError(`cannot write ${folder}: ${cause.message}; ${remedy}`, undefined, { cause });
}

/** Renames a finished folder and forces the new name to disk. */
export function renameDurably(from: string, to: string): void {
  renameSync(from, to);
  syncFolder(dirname(to));
}

/** A folder's list of names is data too: without this a crash may lose files that are themselves on disk. */
function syncFolder(folder: string): void {
  const descriptor = openSync(folder, 'r');
  try {
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
}

async function writeShards(
  source: TextSource,
  tokenizer: Tokenizer,
  folder: string,
  onProgress: OnProgress | undefined,
): Promise<ShardIndex> {
  const statistics: ReadStatistics = { bytes: 0, skippedFiles: 0 };
  const totalBytes = source.files.reduce((sum, file) => sum + file.size, 0);
  const writer = new ShardWriter(folder, tokenizer);
  const report = (): void =>
    onProgress?.({ documents: writer.documents, tokens: writer.tokens, bytes: statistics.bytes, totalBytes });
  try {
    let reported = performance.now();
    for await (const document of openDocuments(source, statistics)) {
      if (!document.continues) writer.endDocument();
      for (const piece of cutText(document.text)) writer.append(tokenizer.encode(piece));
      if (performance.now() - reported < PROGRESS_INTERVAL_MS) continue;
      report();
      reported = performance.now();
    }
    writer.endDocument();
    if (writer.documents === 0) throw new UsageError(describeEmpty(source, statistics));
    const changed = await findChangedFile(source.files);
    if (changed !== undefined)
      throw new UsageError(`${changed} changed while it was being read; start again when it is done`);
    report();
    const index = writer.finish(statistics.skippedFiles);
    syncFolder(folder);
    return index;
  } catch (error) {
    writer.abandon();
    throw error;
  }
}

function openDocuments(source: TextSource, statistics: ReadStatistics): AsyncIterable<Document> {
  return source.kind === 'text'
    ? readTextDocuments(source.files, statistics)
    : readJsonlDocuments(source.files, source.textField, statistics);
}

function describeEmpty(source: TextSource, statistics: ReadStatistics): string {
  const where = `${source.files[0].path}${source.files.length > 1 ? ` and ${source.files.length - 1} more` : ''}`;
  const skipped = statistics.skippedFiles > 0 ? ` (${statistics.skippedFiles} skipped: not UTF-8 text)` : '';
  return `data.path: no text in ${where}${skipped}; name files with text`;
}
