/**
 * The tokens of one part of a corpus, in one file that only the build that wrote it reads, from start to end.
 *
 * The file is a sequence of blocks: the numbers of tokens and of documents that begin in the block (uint32 each), where
 * these documents begin in it (uint32 each), the tokens. The last block has the number `END` in place of a number of tokens,
 * the number of skipped files, and the SHA-256 of everything before the hash. Numbers are little-endian.
 */

import { createHash } from 'node:crypto';
import { closeSync, fstatSync, openSync, renameSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { UsageError } from '../../errors.js';
import { readFully, writeFully } from '../../files.js';
import type { Tokenizer } from '../tokenizer.js';
import { partialName } from './folders.js';
import { bytesPerToken, type TokenArray, type TokenType, tokenView } from './token-type.js';
import { TokenWriter } from './token-writer.js';

const BLOCK_TOKENS = 1 << 18;
const BLOCK_DOCUMENTS = 1 << 13;
const END = 2 ** 32 - 1;
const HEADER = 2;
const HASH_BYTES = 32;

export function partFile(folder: string, unit: number): string {
  return join(folder, `part-${String(unit).padStart(6, '0')}`);
}

/**
 * Writes a part in bounded memory. The file gets its name when it is complete, but is not forced to disk, which would make
 * the disk write every token twice: a part that a power failure cuts short is tokenised again (`isWhole`).
 */
export class PartWriter extends TokenWriter {
  readonly #path: string;
  readonly #aside: string;
  readonly #descriptor: number;
  readonly #hash = createHash('sha256');
  /** Header and document starts of the block. */
  readonly #head = new Uint32Array(HEADER + BLOCK_DOCUMENTS);
  readonly #block: TokenArray;
  #blockTokens = 0;
  #blockDocuments = 0;
  #open = true;

  constructor(path: string, tokenizer: Tokenizer) {
    super(tokenizer);
    this.#block = tokenView(this.type, new ArrayBuffer(BLOCK_TOKENS * bytesPerToken(this.type)), BLOCK_TOKENS);
    this.#path = path;
    this.#aside = partialName(path);
    this.#descriptor = openSync(this.#aside, 'wx');
  }

  finish(skippedFiles: number): void {
    try {
      this.endDocument();
      this.#flush();
      this.#write(Uint32Array.of(END, skippedFiles));
      writeFully(this.#descriptor, this.#hash.digest());
      this.#close();
      renameSync(this.#aside, this.#path);
    } catch (error) {
      this.abandon();
      throw error;
    }
  }

  /** Removes the file, unless it is complete. */
  abandon(): void {
    this.#close();
    rmSync(this.#aside, { force: true });
  }

  protected override beginDocument(): void {
    if (this.#blockDocuments === BLOCK_DOCUMENTS || this.#blockTokens === BLOCK_TOKENS) this.#flush();
    this.#head[HEADER + this.#blockDocuments++] = this.#blockTokens;
    super.beginDocument();
  }

  protected put(ids: Int32Array): void {
    for (let position = 0; position < ids.length; ) {
      if (this.#blockTokens === BLOCK_TOKENS) this.#flush();
      const taken = ids.subarray(position, position + BLOCK_TOKENS - this.#blockTokens);
      this.#block.set(taken, this.#blockTokens);
      this.#blockTokens += taken.length;
      this.tokens += taken.length;
      position += taken.length;
    }
  }

  #flush(): void {
    this.#head[0] = this.#blockTokens;
    this.#head[1] = this.#blockDocuments;
    this.#write(this.#head.subarray(0, HEADER + this.#blockDocuments));
    this.#write(this.#block.subarray(0, this.#blockTokens));
    this.#blockTokens = 0;
    this.#blockDocuments = 0;
  }

  #close(): void {
    if (this.#open) closeSync(this.#descriptor);
    this.#open = false;
  }

  #write({ buffer, byteOffset, byteLength }: ArrayBufferView): void {
    const bytes = new Uint8Array(buffer, byteOffset, byteLength);
    this.#hash.update(bytes);
    writeFully(this.#descriptor, bytes);
  }
}

export interface PartReading {
  readonly type: TokenType;
  /** Compare the hash. Needed for a part of an earlier run; one of this run comes from memory. */
  readonly verify: boolean;
  /** Receives block by block the tokens and where documents begin in them. Both are valid during the call only. */
  readonly take: (ids: TokenArray, starts: Uint32Array) => void;
}

/** Whether a part is there and ends as one does. Most file systems cut short what they have lost; the hash finds other damage. */
export function isWhole(path: string): boolean {
  let descriptor: number;
  try {
    descriptor = openSync(path, 'r');
  } catch {
    return false;
  }
  try {
    const end = new Uint32Array(1);
    const from = fstatSync(descriptor).size - HEADER * end.byteLength - HASH_BYTES;
    return from >= 0 && readFully(descriptor, new Uint8Array(end.buffer), from) === end.byteLength && end[0] === END;
  } finally {
    closeSync(descriptor);
  }
}

/** Returns the number of skipped files. Throws after the last block if the hash does not match. */
export function readPart(path: string, { type, verify, take }: PartReading): number {
  const head = new Uint32Array(HEADER + BLOCK_DOCUMENTS);
  const block = tokenView(type, new ArrayBuffer(BLOCK_TOKENS * bytesPerToken(type)), BLOCK_TOKENS);
  const hash = createHash('sha256');
  const descriptor = openSync(path, 'r');
  let position = 0;
  const read = <Numbers extends Uint32Array | TokenArray>(target: Numbers, count: number): Numbers => {
    if (count > target.length) throw damaged(path);
    const bytes = new Uint8Array(target.buffer, target.byteOffset, count * target.BYTES_PER_ELEMENT);
    if (readFully(descriptor, bytes, position) < bytes.length) throw damaged(path);
    position += bytes.length;
    if (verify) hash.update(bytes);
    return target.subarray(0, count) as Numbers;
  };
  try {
    for (;;) {
      const [tokens, documents] = read(head, HEADER);
      if (tokens === END) {
        const expected = new Uint8Array(HASH_BYTES);
        readFully(descriptor, expected, position);
        if (verify && !hash.digest().equals(expected)) throw damaged(path);
        return documents;
      }
      const starts = read(head.subarray(HEADER), documents);
      take(read(block, tokens), starts);
    }
  } finally {
    closeSync(descriptor);
  }
}

function damaged(path: string): UsageError {
  return new UsageError(`${path}: damaged (its SHA-256 does not match); remove it and start again`);
}
