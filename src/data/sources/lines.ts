/**
 * JSON Lines in blocks: one object per line, one document per object. Plain files are read by position, in parts that begin
 * at the first line after their share of the bytes. Compressed files can only be read from their start, so a position in
 * them is a number of lines.
 */

import { TextDecoder } from 'node:util';
import { ExitCode, TrefoilError, UsageError } from '../../errors.js';
import { readBytes } from './bytes.js';
import type { DocumentBlock, PartReader, RawDocument, ReadRequest } from './reader.js';

/** A block ends with the line that brings it to this size. */
const BLOCK_BYTES = 4 << 20;
const BLOCK_LINES = 4096;
const READ_BYTES = 1 << 20;
/** Where only the end of a line is looked for. */
const SEARCH_BYTES = 1 << 16;
const NEWLINE = 10;
// Far above any real document and far below what a JavaScript string can hold: a file without line ends must fail early.
const LONGEST_LINE = 1 << 28;

export function isJsonlName(path: string): boolean {
  return /\.(jsonl|ndjson)(\.gz|\.zst)?$/.test(path);
}

export function openLines(request: ReadRequest): Promise<PartReader> {
  return /\.(gz|zst)$/.test(request.file.location) ? openCompressed(request) : openPlain(request);
}

async function openPlain({ file, part, textField, opener }: ReadRequest): Promise<PartReader> {
  const blob = await opener.open(file);
  const begin = Math.floor((part * file.size) / file.parts);
  const end = Math.floor(((part + 1) * file.size) / file.parts);
  const parse = createLineParser(textField);

  /** The file from `start` on: up to `border` in large chunks, behind it in small ones. */
  async function* chunks(start: number, border: number): AsyncGenerator<Uint8Array> {
    for (let from = start, to = start; from < file.size; from = to) {
      to = from < border ? Math.min(from + READ_BYTES, border) : Math.min(from + SEARCH_BYTES, file.size);
      yield await blob.read(from, to);
    }
  }

  /** Start of the first line that begins at or after `offset`; the file's size if there is none. */
  const lineStart = async (offset: number): Promise<number> => {
    if (offset === 0) return 0;
    let from = offset - 1;
    for await (const chunk of chunks(from, from)) {
      const at = chunk.indexOf(NEWLINE);
      if (at >= 0) return from + at + 1;
      from += chunk.length;
    }
    return file.size;
  };

  /** Number of the line that begins at `offset`, for a message. */
  const lineNumber = async (offset: number): Promise<number> => {
    let number = 1;
    let left = offset;
    for await (const chunk of chunks(0, offset)) {
      for (const byte of chunk.subarray(0, left)) if (byte === NEWLINE) number++;
      left -= chunk.length;
      if (left <= 0) break;
    }
    return number;
  };

  return {
    async read(position) {
      // The line in which a part begins belongs to the part before: a block starts where its first line does.
      const start = position === 0 ? await lineStart(begin) : begin + position;
      const documents: RawDocument[] = [];
      let offset = start;
      const isFull = () => offset >= end || offset - start >= BLOCK_BYTES || documents.length >= BLOCK_LINES;
      for await (const lines of start < end ? linesOfChunks(chunks(start, end), file.location) : []) {
        for (const line of lines) {
          const parsed = parse(line);
          if ('fault' in parsed)
            throw new UsageError(`${file.location}:${await lineNumber(offset)}: ${parsed.fault}`, {
              cause: parsed.cause,
            });
          documents.push(parsed.text);
          offset = Math.min(offset + line.length + 1, file.size);
          if (isFull()) break;
        }
        if (isFull()) break;
      }
      return documents.length === 0 ? undefined : { documents, next: offset - begin };
    },
    close: () => blob.close(),
  };
}

/** Keeps the stream open between blocks: reading on costs nothing, going back reads the file again. */
async function openCompressed({ file, textField }: ReadRequest): Promise<PartReader> {
  const parse = createLineParser(textField);
  let lines: AsyncGenerator<Uint8Array> | undefined;
  let line = 0;

  const seek = async (position: number): Promise<void> => {
    if (lines !== undefined && line <= position) return;
    await lines?.return(undefined);
    lines = splitLines(readBytes(file.location), file.location);
    line = 0;
  };

  const readBlock = async (position: number): Promise<DocumentBlock | undefined> => {
    await seek(position);
    const documents: RawDocument[] = [];
    for (let bytes = 0; bytes < BLOCK_BYTES && documents.length < BLOCK_LINES; ) {
      const { value, done } = await lines!.next();
      if (done) {
        if (line < position)
          throw new TrefoilError(
            `${file.location}: has ${line} lines, but was at line ${position}; it was changed`,
            ExitCode.dataSource,
          );
        break;
      }
      line++;
      if (line <= position) continue;
      const parsed = parse(value);
      if ('fault' in parsed) throw new UsageError(`${file.location}:${line}: ${parsed.fault}`, { cause: parsed.cause });
      bytes += value.length;
      documents.push(parsed.text);
    }
    return documents.length === 0 ? undefined : { documents, next: line };
  };

  return {
    read: readBlock,
    close: async () => {
      await lines?.return(undefined);
    },
  };
}

type ParsedLine = { readonly text: string } | { readonly fault: string; readonly cause?: unknown };

/** A function from the bytes of a line to its text, or to what is wrong with it. A blank line is an empty document. */
function createLineParser(textField: string): (line: Uint8Array) => ParsedLine {
  // Without `ignoreBOM` a byte order mark at the start of a file is dropped, which JSON.parse would refuse.
  const decoder = new TextDecoder('utf-8', { fatal: true });
  return (line) => {
    let value: unknown;
    try {
      const text = decoder.decode(line);
      if (text.trim() === '') return { text: '' };
      value = JSON.parse(text);
    } catch (cause) {
      const reason = cause instanceof SyntaxError ? 'not valid JSON' : 'not valid UTF-8';
      return { fault: `${reason}; fix or remove this line`, cause };
    }
    if (typeof value !== 'object' || value === null || Array.isArray(value))
      return { fault: `not a JSON object; each line must be one, like {"${textField}": "..."}` };
    const text = Object.hasOwn(value, textField) ? (value as Record<string, unknown>)[textField] : undefined;
    if (typeof text === 'string') return { text };
    const names = Object.keys(value).slice(0, 8).join(', ') || 'none';
    return { fault: `no text in field "${textField}" (fields: ${names}); set data.text_field` };
  };
}

/** Lines without their end. */
export async function* splitLines(chunks: AsyncIterable<Uint8Array>, path: string): AsyncGenerator<Uint8Array> {
  for await (const lines of linesOfChunks(chunks, path)) yield* lines;
}

/** The lines that end in each chunk, and then the last one. Parts of a long line are joined once, so its cost is linear. */
async function* linesOfChunks(chunks: AsyncIterable<Uint8Array>, path: string): AsyncGenerator<Iterable<Uint8Array>> {
  let parts: Uint8Array[] = [];
  let length = 0;
  function* linesOf(chunk: Uint8Array): Generator<Uint8Array> {
    let start = 0;
    for (let end = chunk.indexOf(NEWLINE); end >= 0; end = chunk.indexOf(NEWLINE, start)) {
      const last = chunk.subarray(start, end);
      const line = parts.length === 0 ? last : Buffer.concat([...parts, last]);
      parts = [];
      length = 0;
      start = end + 1;
      yield line;
    }
    if (start === chunk.length) return;
    parts.push(chunk.subarray(start));
    length += chunk.length - start;
    if (length > LONGEST_LINE) {
      throw new UsageError(`${path}: a line is longer than ${LONGEST_LINE >> 20} MiB; is this really JSON Lines?`);
    }
  }
  for await (const chunk of chunks) yield linesOf(chunk);
  if (length > 0) yield [Buffer.concat(parts)];
}
