/** Which source a `data.path` means, by what lies there. */
import { closeSync, existsSync, readdirSync, readSync, statSync } from 'node:fs';
import { basename, join } from 'node:path';
import { constants, gunzipSync } from 'node:zlib';
import { isDynamicPattern } from 'tinyglobby';
import { openRegularFile } from '../files.js';
import { readsPath } from './data-sources.js';

/** Files of a folder that are looked at; the kinds of a larger corpus show in the first ones. */
const INSPECTED_FILES = 10_000;

/** The source that reads what lies at a path, and what showed it. */
export interface Guess {
  readonly source: string;
  readonly because: string;
}

const JSON_LINES = /\.(jsonl|ndjson)(\.gz|\.zst)?$/;
const TEXT = /\.(txt|text|md|rst|html?)(\.gz|\.zst)?$/;

/**
 * `tokens` for a folder of shards, `files` for Parquet and for mixed formats, `chat` for JSON Lines with messages, `jsonl` for
 * other JSON Lines, else `text`. A single file is judged by its content whatever its name.
 */
export function guessSource(path: string): Guess {
  if (isShardFolder(path)) return { source: 'tokens', because: 'a folder of prepared shards' };
  const files = filesAt(path);
  const find = (pattern: RegExp) => files.find((file) => pattern.test(file));
  if (find(/\.parquet$/)) return { source: 'files', because: `${basename(find(/\.parquet$/)!)} is Parquet` };
  const lines = find(JSON_LINES);
  if (lines === undefined) {
    const content = files.length === 1 && files[0] === path ? jsonLinesKind(path) : null;
    if (content === 'chat') return { source: 'chat', because: 'its lines are JSON with messages' };
    if (content === 'documents') return { source: 'jsonl', because: 'its lines are JSON with a text' };
    return { source: 'text', because: 'no file is JSON Lines or Parquet' };
  }
  if (find(TEXT)) return { source: 'files', because: 'JSON Lines beside text files' };
  const isChat = jsonLinesKind(lines) === 'chat';
  const because = `the lines of ${basename(lines)} ${isChat ? 'have messages' : 'are documents'}`;
  return { source: isChat ? 'chat' : 'jsonl', because };
}

export function impliedSource(path: string): string {
  return guessSource(path).source;
}

/** Bytes of a file that are looked at. */
const SNIFFED_BYTES = 1 << 16;
const SNIFFED_LINES = 4;

/** The kind of the first lines of a file: chats, documents with a text, JSON objects without either; null if no JSON Lines. */
function jsonLinesKind(path: string): 'chat' | 'documents' | 'objects' | null {
  const head = headOf(path);
  if (head === null) return null;
  const lines = head.text.split('\n');
  // The last line may be cut. A chat may be longer than what was read.
  const cut = head.isWhole ? '' : lines.pop()!;
  const whole = lines.filter((line) => line.trim() !== '').slice(0, SNIFFED_LINES);
  if (whole.length === 0) return /^\s*\{\s*"messages"\s*:\s*\[/.test(cut) ? 'chat' : null;
  const rows = whole.map(parsedObject);
  if (rows.includes(null)) return null;
  if (rows.every((row) => Array.isArray(row!['messages']))) return 'chat';
  return rows.every((row) => typeof row!['text'] === 'string') ? 'documents' : 'objects';
}

function parsedObject(line: string): Readonly<Record<string, unknown>> | null {
  try {
    const value: unknown = JSON.parse(line.replace(/^\uFEFF/, ''));
    return typeof value === 'object' && value !== null && !Array.isArray(value) ? { ...value } : null;
  } catch {
    return null; // not JSON
  }
}

/** The beginning of a file as text; null where it cannot be looked into. */
function headOf(path: string): { text: string; isWhole: boolean } | null {
  if (path.endsWith('.zst') || !existsSync(path)) return null;
  const bytes = Buffer.alloc(SNIFFED_BYTES);
  try {
    const { descriptor } = openRegularFile(path); // a pipe would never end
    let read = 0;
    try {
      read = readSync(descriptor, bytes, 0, bytes.length, 0);
    } finally {
      closeSync(descriptor);
    }
    const isWhole = read < bytes.length;
    const head = bytes.subarray(0, read);
    // Z_SYNC_FLUSH: the end of the stream is missing.
    const plain = path.endsWith('.gz') ? gunzipSync(head, { finishFlush: constants.Z_SYNC_FLUSH }) : head;
    return { text: plain.toString('utf8'), isWhole };
  } catch {
    return null; // the source that reads the file reports what is wrong with it
  }
}

/** Whether a source that was named before the path was can read what lies there. */
export function canRead(source: unknown, path: string): boolean {
  if (!readsPath(source)) return false;
  const implied = impliedSource(path);
  if (implied === 'tokens' || source === 'tokens') return source === implied || !existsSync(path);
  if (source === 'chat') return implied === 'chat' || implied === 'jsonl' || !existsSync(path);
  return source === implied || source === 'files' || implied === 'text';
}

function isShardFolder(path: string): boolean {
  const index = join(path, 'index.json');
  return headOf(index)?.text.slice(0, 4096).includes('"trefoil-tokens"') ?? false;
}

/** The files at a path. A pattern stands for itself, as its ending tells the kind. */
function filesAt(path: string): string[] {
  if (!existsSync(path)) return isDynamicPattern(path) ? [path] : [];
  if (!statSync(path).isDirectory()) return [path];
  const names: string[] = [];
  const folders = [path];
  for (let folder = folders.pop(); folder !== undefined && names.length < INSPECTED_FILES; folder = folders.pop()) {
    for (const entry of readdirSync(folder, { withFileTypes: true })) {
      if (entry.name.startsWith('.')) continue;
      if (entry.isDirectory()) folders.push(join(folder, entry.name));
      else names.push(join(folder, entry.name));
    }
  }
  return names;
}

/** The items with the sources that their paths imply, and with `place` applied to their paths. */
export function completeMixture(value: unknown, place: (path: string) => string = (path) => path): unknown {
  if (!Array.isArray(value)) return value;
  return (value as readonly Readonly<Record<string, unknown>>[]).map((one) => {
    if (typeof one?.['path'] !== 'string' || one['path'] === '') return one;
    const path = place(one['path']);
    return { ...one, path, source: one['source'] ?? impliedSource(path) };
  });
}

/** A data section with a path and no source gets the source that reads the path; one with sources is a mixture. */
export function withImpliedSource(input: unknown): unknown {
  const { data } = (input ?? {}) as { data?: { path?: unknown; source?: unknown; sources?: unknown } };
  if (data?.sources !== undefined && data.sources !== null)
    return {
      ...(input as object),
      data: { ...data, source: data.source ?? 'mixture', sources: completeMixture(data.sources) },
    };
  if (typeof data?.path !== 'string' || data.source !== undefined) return input;
  return { ...(input as object), data: { ...data, source: impliedSource(data.path) } };
}
