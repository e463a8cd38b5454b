/**
 * Reading a part of a file block by block. A block is what is read, decoded and shuffled at once: a row group of a Parquet
 * file, some megabytes of lines, one file of text. A block is found again by its position alone, at once (only in
 * compressed lines by reading the file from its start), and that is what makes a cursor small and resuming quick.
 */

import type { BlobOpener } from './blob.js';
import { openGenerated } from './generated.js';
import { openLines } from './lines.js';
import { openParquet } from './parquet.js';
import type { CorpusFile } from './spec.js';
import { openText } from './text.js';

/** A document: text, or UTF-8 that is decoded when its turn comes, which keeps a block small. */
export type RawDocument = string | Uint8Array;

export interface Block {
  readonly documents: readonly RawDocument[];
  /** Position of the block after it. */
  readonly next: number;
}

export interface PartReader {
  /** The block at a position (0 is the first); undefined after the last. */
  read(position: number): Promise<Block | undefined>;
  close(): Promise<void>;
}

export interface ReadRequest {
  readonly file: CorpusFile;
  /** Part `part` of `file.parts`. */
  readonly part: number;
  readonly textField: string;
  readonly opener: BlobOpener;
}

const READERS = { parquet: openParquet, jsonl: openLines, text: openText, generated: openGenerated };

export function openPart(request: ReadRequest): Promise<PartReader> {
  return READERS[request.file.kind](request);
}

/** Invalid bytes become U+FFFD; a byte order mark stays, as it was written. */
export function documentText(document: RawDocument): string {
  if (typeof document === 'string') return document;
  return Buffer.from(document.buffer, document.byteOffset, document.byteLength).toString('utf8');
}

export function documentBytes(document: RawDocument): number {
  return typeof document === 'string' ? Buffer.byteLength(document) : document.byteLength;
}
