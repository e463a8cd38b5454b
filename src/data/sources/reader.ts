/**
 * Reads a part of a file block by block. A block is what is read, decoded and shuffled at once: a row group of a Parquet
 * file, some megabytes of lines, a file of text. Its position alone finds it again, without reading what lies before it
 * (except in compressed files), so cursors are small and resuming is quick.
 */

import type { BlobOpener } from './blob.js';
import { openLines } from './lines.js';
import type { CorpusFile } from './spec.js';
import { openText } from './text.js';

/** A document: text, or UTF-8 bytes that are decoded when the document is used, which keeps blocks small. */
export type RawDocument = string | Uint8Array;

export interface DocumentBlock {
  readonly documents: readonly RawDocument[];
  /** Position of the block after it. */
  readonly next: number;
  /** The first document goes on where the last one of the block before ended. */
  readonly continues?: boolean;
  /** The last document goes on in the next block. */
  readonly isPartial?: boolean;
  /** Why the file has no documents. */
  readonly skipped?: 'binary';
  /** Invalid UTF-8 sequences that became U+FFFD; known for text files only. */
  readonly replaced?: number;
}

export interface PartReader {
  /** The block at a position (0 is the first); undefined after the last. */
  read(position: number): Promise<DocumentBlock | undefined>;
  close(): Promise<void>;
}

export interface ReadRequest {
  readonly file: CorpusFile;
  /** Part `part` of `file.parts`. */
  readonly part: number;
  readonly textField: string;
  readonly opener: BlobOpener;
}

const READERS = {
  // Imported when it is needed: it takes a quarter of the time in which a worker thread starts.
  parquet: async (request: ReadRequest) => (await import('./parquet.js')).openParquet(request),
  jsonl: openLines,
  text: openText,
};

export function openPart(request: ReadRequest): Promise<PartReader> {
  return READERS[request.file.kind](request);
}

/** Invalid bytes become U+FFFD; a byte order mark is kept. */
export function documentText(document: RawDocument): string {
  if (typeof document === 'string') return document;
  return Buffer.from(document.buffer, document.byteOffset, document.byteLength).toString('utf8');
}

export function documentBytes(document: RawDocument): number {
  return typeof document === 'string' ? Buffer.byteLength(document) : document.byteLength;
}
