/**
 * The names of `data.source`, what the sources have, and which source a `data.path` means. A new source is added here and
 * opened in src/data/pipeline/numbered-source.ts.
 */
import { existsSync, readdirSync, readFileSync, statSync } from 'node:fs';
import { basename, join } from 'node:path';
import { isDynamicPattern } from 'tinyglobby';

/** Every source. */
export const DATA_SOURCES = [
  'synthetic',
  'needle',
  'stories',
  'text',
  'jsonl',
  'hub',
  'files',
  'tokens',
  'chat',
  'mixture',
] as const;

/** Sources that a mixture (data.sources) can have: samples of these are known by number. */
export const MIXED_SOURCES = ['text', 'jsonl', 'files', 'tokens', 'chat', 'synthetic', 'needle', 'stories'] as const;

/** Sources that read `data.path`. All others make their data or know its address. */
export const PATH_SOURCES = ['text', 'jsonl', 'files', 'tokens', 'chat'] as const;

/** Sources that can read validation documents from `data.val_path`. */
export const VALIDATION_PATH_SOURCES = ['text', 'jsonl', 'tokens'] as const;

/** Sources that consist of text documents. */
export const DOCUMENT_SOURCES = ['text', 'jsonl', 'hub', 'files'] as const;

/** Sources whose documents are tokenised while training runs. */
export const STREAMED_SOURCES = ['hub', 'files'] as const;

/** Whether `source` is one of `names`; narrows its type. */
export function isOneOf<Name extends string>(names: readonly Name[], source: unknown): source is Name {
  return (names as readonly unknown[]).includes(source);
}

export function readsPath(source: unknown): boolean {
  return isOneOf(PATH_SOURCES, source);
}

/** The message about a path that its source would ignore. */
export function ignoredPath(source: unknown, where?: string): string {
  return (
    `data.path: not read by data.source ${source}; leave data.source (--dataset) out, or set it to one of ` +
    `${PATH_SOURCES.join(', ')}${where === undefined ? '' : ` [${where}]`}`
  );
}

/** Files of a folder that are looked at; the kinds of a larger corpus show in the first ones. */
const INSPECTED_FILES = 10_000;

/**
 * The source that reads what lies at `path`: `tokens` for a folder of shards, `files` for Parquet and for
 * mixed formats, `jsonl` for JSON Lines, else `text`.
 */
export function impliedSource(path: string): string {
  if (isShardFolder(path)) return 'tokens';
  const names = fileNames(path);
  const has = (pattern: RegExp) => names.some((name) => pattern.test(name));
  if (has(/\.parquet$/)) return 'files';
  if (!has(/\.(jsonl|ndjson)(\.gz|\.zst)?$/)) return 'text';
  return has(/\.(txt|text|md|rst|html?)(\.gz|\.zst)?$/) ? 'files' : 'jsonl';
}

/** Whether a source that was named before the path was can read what lies there. */
export function canRead(source: unknown, path: string): boolean {
  if (!readsPath(source)) return false;
  const implied = impliedSource(path);
  if (implied === 'tokens' || source === 'tokens') return source === implied || !existsSync(path);
  if (source === 'chat') return implied === 'jsonl' || !existsSync(path);
  return source === implied || source === 'files' || implied === 'text';
}

function isShardFolder(path: string): boolean {
  const index = join(path, 'index.json');
  return existsSync(index) && readFileSync(index, 'utf8').slice(0, 4096).includes('"trefoil-tokens"');
}

/** Names of the files at a path. A pattern stands for itself, as its ending tells the kind. */
function fileNames(path: string): string[] {
  if (!existsSync(path)) return isDynamicPattern(path) ? [basename(path)] : [];
  if (!statSync(path).isDirectory()) return [basename(path)];
  const names: string[] = [];
  const folders = [path];
  for (let folder = folders.pop(); folder !== undefined && names.length < INSPECTED_FILES; folder = folders.pop()) {
    for (const entry of readdirSync(folder, { withFileTypes: true })) {
      if (entry.name.startsWith('.')) continue;
      if (entry.isDirectory()) folders.push(join(folder, entry.name));
      else names.push(entry.name);
    }
  }
  return names;
}
