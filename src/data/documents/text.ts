/** Files of text, code or Markdown: one document per file. */

import { type FileHandle, open } from 'node:fs/promises';
import { UsageError } from '../../errors.js';
import { cutText, type Document, PIECE_LENGTH, type ReadStatistics } from './document.js';
import type { SourceFile } from './files.js';

const READ_BYTES = 1 << 20;
const INSPECTED_BYTES = 1 << 16;
// Invalid bytes of a text become U+FFFD. Compressed and other binary data without a NUL byte is mostly invalid; text in
// an 8-bit encoding has a few percent, and a short text may have only a few characters besides.
const INVALID_SHARE = 0.3;
const LEAST_INVALID = 16;

/** Yields each file as one document; a large one in pieces that continue each other. Binary files are counted. */
export async function* readTextDocuments(
  files: readonly SourceFile[],
  statistics: ReadStatistics,
): AsyncGenerator<Document> {
  for (const file of files) yield* readTextFile(file, statistics);
}

async function* readTextFile(file: SourceFile, statistics: ReadStatistics): AsyncGenerator<Document> {
  const handle = await openFile(file.path);
  try {
    const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
    const buffer = Buffer.allocUnsafe(READ_BYTES);
    let pending = '';
    let continues = false;
    for (let first = true; ; first = false) {
      const { bytesRead } = await handle.read(buffer, 0, READ_BYTES);
      const bytes = buffer.subarray(0, bytesRead);
      statistics.bytes += bytesRead;
      if (first && looksBinary(bytes.subarray(0, INSPECTED_BYTES))) {
        statistics.skippedFiles++;
        statistics.firstSkipped ??= file.path;
        return;
      }
      pending += decoder.decode(bytes, { stream: bytesRead > 0 });
      if (bytesRead === 0) break;
      if (pending.length <= PIECE_LENGTH) continue;
      const pieces = [...cutText(pending)];
      pending = pieces.pop()!;
      for (const text of pieces) {
        yield { text, origin: file.path, continues };
        continues = true;
      }
    }
    if (pending.length > 0) yield { text: pending, origin: file.path, continues };
  } finally {
    await handle.close();
  }
}

/** True for a NUL byte near the start, or where much of the start is not UTF-8. */
export function looksBinary(start: Uint8Array): boolean {
  if (start.includes(0)) return true;
  // `stream` leaves out a character that the end of the inspected part cuts in two.
  const text = new TextDecoder('utf-8').decode(start, { stream: true });
  let invalid = 0;
  for (let at = text.indexOf('\uFFFD'); at >= 0; at = text.indexOf('\uFFFD', at + 1)) invalid++;
  return invalid >= LEAST_INVALID && invalid > INVALID_SHARE * text.length;
}

async function openFile(path: string): Promise<FileHandle> {
  try {
    return await open(path);
  } catch (error) {
    throw new UsageError(`data.path: cannot read ${path}: ${(error as Error).message}`, { cause: error });
  }
}
