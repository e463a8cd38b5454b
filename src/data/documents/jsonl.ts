/** JSON Lines: one object per line, one document per object. Plain, .gz or .zst. */

import { TextDecoder } from 'node:util';
import { UsageError } from '../../errors.js';
import { readBytes } from './bytes.js';
import type { Document, ReadStatistics } from './document.js';
import type { SourceFile } from './files.js';

/** What a folder of JSON Lines may hold besides other things. */
export function isJsonlName(path: string): boolean {
  return /\.(jsonl|ndjson)(\.gz|\.zst)?$/.test(path);
}

// Far above any real document, far below what a JavaScript string can hold: a file without line ends must fail early.
const LONGEST_LINE = 1 << 28;

export async function* readJsonlDocuments(
  files: readonly SourceFile[],
  textField: string,
  statistics: ReadStatistics,
): AsyncGenerator<Document> {
  const parse = createLineParser(textField);
  for (const file of files) {
    let number = 0;
    for await (const line of splitLines(readBytes(file.path, statistics), file.path)) {
      number++;
      const text = parse(line, `${file.path}:${number}`);
      if (text !== undefined) yield { text, origin: `${file.path}:${number}` };
    }
  }
}

/** A function from the bytes of a line, and its place for messages, to its document; undefined for a blank line. */
export function createLineParser(textField: string): (line: Uint8Array, place: string) => string | undefined {
  // Without `ignoreBOM` a byte order mark at the start of a file is dropped, which JSON.parse would refuse.
  const decoder = new TextDecoder('utf-8', { fatal: true });
  return (line, place) => parseLine(decoder, line, textField, place);
}

function parseLine(decoder: TextDecoder, line: Uint8Array, textField: string, place: string): string | undefined {
  let value: unknown;
  try {
    const text = decoder.decode(line);
    if (text.trim() === '') return undefined;
    value = JSON.parse(text);
  } catch (error) {
    const reason = error instanceof SyntaxError ? 'not valid JSON' : 'not valid UTF-8';
    throw new UsageError(`${place}: ${reason}; mend or remove this line`, { cause: error });
  }
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    throw new UsageError(`${place}: not a JSON object; each line must be one, like {"${textField}": "..."}`);
  }
  const text = Object.hasOwn(value, textField) ? (value as Record<string, unknown>)[textField] : undefined;
  if (typeof text === 'string') return text;
  const names = Object.keys(value).slice(0, 8).join(', ') || 'none';
  throw new UsageError(`${place}: no text in field "${textField}" (fields: ${names}); set data.text_field`);
}

/** Lines without their end. Parts of a long line are joined once, so its cost is linear. */
export async function* splitLines(chunks: AsyncIterable<Uint8Array>, path: string): AsyncGenerator<Uint8Array> {
  let parts: Uint8Array[] = [];
  let length = 0;
  for await (const chunk of chunks) {
    let start = 0;
    for (let end = chunk.indexOf(10); end >= 0; end = chunk.indexOf(10, start)) {
      const last = chunk.subarray(start, end);
      yield parts.length === 0 ? last : Buffer.concat([...parts, last]);
      parts = [];
      length = 0;
      start = end + 1;
    }
    if (start === chunk.length) continue;
    parts.push(chunk.subarray(start));
    length += chunk.length - start;
    if (length > LONGEST_LINE) {
      throw new UsageError(`${path}: a line is longer than ${LONGEST_LINE >> 20} MiB; is this really JSON Lines?`);
    }
  }
  if (length > 0) yield Buffer.concat(parts);
}
