/**
 * JSON Lines in blocks. Plain files are read by position, in parts that begin at the first line after their share of the
 * bytes; compressed ones can only be read from their start, so a position in them is a number of lines.
 */

import { ExitCode, TrefoilError } from '../../errors.js';
import { readBytes } from '../documents/bytes.js';
import { createLineParser, splitLines } from '../documents/jsonl.js';
import type { Block, PartReader, RawDocument, ReadRequest } from './reader.js';

/** A block ends with the line that brings it to this. */
const BLOCK_BYTES = 4 << 20;
const BLOCK_LINES = 4096;
const READ_BYTES = 1 << 20;
const NEWLINE = 10;

export function openLines(request: ReadRequest): Promise<PartReader> {
  return /\.(gz|zst)$/.test(request.file.location) ? openCompressed(request) : openPlain(request);
}

async function openPlain({ file, part, textField, opener }: ReadRequest): Promise<PartReader> {
  const blob = await opener.open(file);
  const begin = Math.floor((part * file.size) / file.parts);
  const end = Math.floor(((part + 1) * file.size) / file.parts);
  const parse = createLineParser(textField);

  /** Where the first line begins that begins at or after `offset`; the size when none does. */
  const lineStart = async (offset: number): Promise<number> => {
    if (offset === 0) return 0;
    for (let from = offset - 1; from < file.size; from += READ_BYTES) {
      const chunk = await blob.read(from, Math.min(from + READ_BYTES, file.size));
      const at = chunk.indexOf(NEWLINE);
      if (at >= 0) return from + at + 1;
    }
    return file.size;
  };

  return {
    async read(position) {
      // The line in which a part begins belongs to the part before: a block starts where its first line does.
      const start = position === 0 ? await lineStart(begin) : begin + position;
      const lines: { bytes: Uint8Array; offset: number }[] = [];
      let offset = start;
      const chunks = async function* (): AsyncGenerator<Uint8Array> {
        for (let from = start; from < file.size; from += READ_BYTES)
          yield await blob.read(from, Math.min(from + READ_BYTES, file.size));
      };
      for await (const line of start < end ? splitLines(chunks(), file.location) : []) {
        lines.push({ bytes: line, offset });
        offset = Math.min(offset + line.length + 1, file.size);
        if (offset >= end || offset - start >= BLOCK_BYTES || lines.length >= BLOCK_LINES) break;
      }
      if (lines.length === 0) return undefined;
      const documents = lines.map((line) => parse(line.bytes, `${file.location} at byte ${line.offset}`) ?? '');
      return { documents, next: offset - begin };
    },
    close: () => blob.close(),
  };
}

/** Keeps the stream open between blocks, so that reading on costs nothing; going back means reading again. */
async function openCompressed({ file, textField }: ReadRequest): Promise<PartReader> {
  const parse = createLineParser(textField);
  let lines: AsyncGenerator<Uint8Array> | undefined;
  let line = 0;

  const seek = async (position: number): Promise<void> => {
    if (lines !== undefined && line <= position) return;
    await lines?.return(undefined);
    lines = splitLines(readBytes(file.location, { bytes: 0, skippedFiles: 0 }), file.location);
    line = 0;
  };

  const readBlock = async (position: number): Promise<Block | undefined> => {
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
      bytes += value.length;
      documents.push(parse(value, `${file.location}:${line}`) ?? '');
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
