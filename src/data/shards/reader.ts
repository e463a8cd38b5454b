/** Reads token shards by position. Opening checks all files; a read takes at most one system call. */

import { createHash } from 'node:crypto';
import { closeSync, readSync } from 'node:fs';
import { totalmem } from 'node:os';
import { join } from 'node:path';
import { TrefoilError, UsageError } from '../../errors.js';
import { openRegularFile } from '../../files.js';
import { DamagedShards, readIndex, type ShardFile, type ShardIndex } from './format.js';
import { bytesPerToken, type TokenArray, tokenView } from './token-type.js';

/** Size of a sequential read. A larger one gains nothing; a smaller one costs system calls. */
const READ_AHEAD_BYTES = 1 << 18;
const HASHED_BYTES = 1 << 20;

interface OpenShard {
  readonly path: string;
  readonly descriptor: number;
  /** Position of its first token in the whole stream. */
  readonly start: number;
  readonly end: number;
}

export interface ShardOptions {
  /** Read every file once and compare its SHA-256. Sizes and the index are always checked. Default true. */
  verify?: boolean;
}

export class ShardReader {
  readonly folder: string;
  readonly index: ShardIndex;
  /** Position of the first token of each document, ascending: 8 bytes per document. */
  readonly documentStarts: Float64Array;
  readonly #shards: readonly OpenShard[];
  readonly #buffer: TokenArray;
  /** The tokens in the buffer: [#from, #to) of the stream. */
  #from = 0;
  #to = 0;
  /** End of the last request: one that begins there is sequential, and triggers read-ahead. */
  #expected = -1;

  private constructor(folder: string, index: ShardIndex, documentStarts: Float64Array, shards: readonly OpenShard[]) {
    this.folder = folder;
    this.index = index;
    this.documentStarts = documentStarts;
    this.#shards = shards;
    const capacity = READ_AHEAD_BYTES / bytesPerToken(index.dtype);
    this.#buffer = tokenView(index.dtype, new ArrayBuffer(READ_AHEAD_BYTES), capacity);
  }

  static open(folder: string, options: ShardOptions = {}): ShardReader {
    const index = readIndex(folder);
    const verify = options.verify ?? true;
    const documentStarts = readDocumentStarts(folder, index, verify);
    const shards: OpenShard[] = [];
    try {
      let start = 0;
      for (const { tokens } of index.shards) {
        const end = start + tokens.bytes / bytesPerToken(index.dtype);
        const path = join(folder, tokens.file);
        const descriptor = openChecked(path, tokens);
        shards.push({ path, descriptor, start, end });
        if (verify) verifyHash(path, descriptor, tokens);
        start = end;
      }
      if (start !== index.tokens || !shards.every((shard) => Number.isInteger(shard.end))) {
        throw damaged(folder, `its files hold ${start} tokens, the index says ${index.tokens}`);
      }
      return new ShardReader(folder, index, documentStarts, shards);
    } catch (error) {
      for (const shard of shards) closeSync(shard.descriptor);
      throw error;
    }
  }

  close(): void {
    for (const shard of this.#shards) closeSync(shard.descriptor);
  }

  readTokens(from: number, count: number): Int32Array {
    const tokens = new Int32Array(count);
    this.readInto(from, count, tokens, 0);
    return tokens;
  }

  /** Copies tokens [from, from + count) of the stream to `target`. */
  readInto(from: number, count: number, target: Int32Array, at: number): void {
    if (!(from >= 0 && count >= 0 && from + count <= this.index.tokens)) {
      throw new TrefoilError(`${this.folder}: tokens ${from} to ${from + count} are outside its ${this.index.tokens}`);
    }
    const sequential = from === this.#expected || (from >= this.#from && from <= this.#to);
    const end = from + count;
    for (let position = from; position < end; ) {
      if (position < this.#from || position >= this.#to) this.#fill(position, end - position, sequential);
      const taken = Math.min(end, this.#to) - position;
      const first = position - this.#from;
      target.set(this.#buffer.subarray(first, first + taken), at + position - from);
      position += taken;
    }
    this.#expected = end;
    this.#checkRange(from, count, target, at);
  }

  /**
   * Kernels use an id as an index: one outside the vocabulary would read out of bounds. Hashes do not protect from this,
   * as another program may have written the shards.
   */
  #checkRange(from: number, count: number, target: Int32Array, at: number): void {
    const { vocabSize } = this.index;
    for (let index = 0; index < count; index++) {
      if (target[at + index] >>> 0 < vocabSize) continue;
      const id = target[at + index] >>> 0;
      throw damaged(this.folder, `token ${from + index} is ${id}, outside the vocabulary of ${vocabSize}`);
    }
  }

  /** Fills the buffer from `position` on: with the wanted tokens, or completely if reads are sequential. */
  #fill(position: number, wanted: number, sequential: boolean): void {
    const shard = this.#shards.find((candidate) => position < candidate.end)!;
    const { length: capacity, BYTES_PER_ELEMENT: width } = this.#buffer;
    const count = Math.min(sequential ? capacity : Math.min(wanted, capacity), shard.end - position);
    const bytes = new Uint8Array(this.#buffer.buffer, 0, count * width);
    // After a failed read the buffer must count as empty.
    this.#from = this.#to = 0;
    readFully(shard.path, shard.descriptor, bytes, (position - shard.start) * width);
    this.#from = position;
    this.#to = position + count;
  }
}

/** All document starts. File sizes are checked before the array is allocated. */
function readDocumentStarts(folder: string, index: ShardIndex, verify: boolean): Float64Array {
  const files = index.shards.map(({ documents, base = 0 }) => ({ ...documents, base }));
  const bytes = files.reduce((sum, file) => sum + file.bytes, 0);
  if (bytes !== index.documents * 8) {
    throw damaged(folder, `its document files have ${bytes} bytes, not 8 for each of ${index.documents} documents`);
  }
  for (const file of files) closeSync(openChecked(join(folder, file.file), file));
  // A file with holes may have any size.
  if (bytes > totalmem()) throw damaged(folder, `${index.documents} documents take more memory than this machine has`);
  const starts = new Float64Array(index.documents);
  let offset = 0;
  for (const file of files) {
    const path = join(folder, file.file);
    const descriptor = openChecked(path, file);
    try {
      if (verify) verifyHash(path, descriptor, file);
      readFully(path, descriptor, new Uint8Array(starts.buffer, offset, file.bytes), 0);
    } finally {
      closeSync(descriptor);
    }
    const counted = starts.subarray(offset / 8, (offset + file.bytes) / 8);
    if (file.base > 0) for (let i = 0; i < counted.length; i++) counted[i] += file.base;
    offset += file.bytes;
  }
  for (let document = 0; document < starts.length; document++) {
    const least = document === 0 ? 0 : starts[document - 1] + 1;
    const valid = document === 0 ? starts[0] === 0 : Number.isInteger(starts[document]) && starts[document] >= least;
    if (!valid || starts[document] >= index.tokens)
      throw damaged(folder, `document ${document} begins at an impossible place`);
  }
  return starts;
}

export function openChecked(path: string, expected: ShardFile): number {
  const { descriptor, size } = openShardFile(path);
  if (size === expected.bytes) return descriptor;
  closeSync(descriptor);
  throw new DamagedShards(`${path}: damaged (${size} bytes, not ${expected.bytes}); prepare the shards again`);
}

function openShardFile(path: string) {
  try {
    return openRegularFile(path);
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    throw new DamagedShards(`${error.message}; prepare the shards again`, { cause: error });
  }
}

export function verifyHash(path: string, descriptor: number, expected: ShardFile): void {
  const hash = createHash('sha256');
  const buffer = new Uint8Array(HASHED_BYTES);
  for (let offset = 0; offset < expected.bytes; offset += buffer.length) {
    const part = buffer.subarray(0, Math.min(buffer.length, expected.bytes - offset));
    readFully(path, descriptor, part, offset);
    hash.update(part);
  }
  if (hash.digest('hex') === expected.sha256) return;
  throw new DamagedShards(`${path}: damaged (its SHA-256 does not match the index); prepare the shards again`);
}

function readFully(path: string, descriptor: number, bytes: Uint8Array, offset: number): void {
  for (let done = 0; done < bytes.length; ) {
    const count = readSync(descriptor, bytes, done, bytes.length - done, offset + done);
    if (count === 0) throw new DamagedShards(`${path}: ends early; it was cut short while in use`);
    done += count;
  }
}

function damaged(folder: string, reason: string): DamagedShards {
  return new DamagedShards(`${folder}: damaged (${reason}); prepare the shards again`);
}
