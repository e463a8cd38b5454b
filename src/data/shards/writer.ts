/** Writes token shards as a stream, in bounded memory. */

import { createHash, type Hash } from 'node:crypto';
import { closeSync, fsyncSync, openSync } from 'node:fs';
import { join } from 'node:path';
import { TrefoilError } from '../../errors.js';
import { writeFully } from '../../files.js';
import type { Tokenizer } from '../tokenizer.js';
import {
  bytesPerToken,
  encodeIndex,
  INDEX_NAME,
  type ShardFile,
  type ShardIndex,
  type TokenArray,
  tokenTypeFor,
  tokenView,
} from './format.js';

const BUFFERED_TOKENS = 1 << 18;
const BUFFERED_DOCUMENTS = 1 << 13;
const TOKENS_PER_SHARD = 2 ** 27;

export class ShardWriter {
  tokens = 0;
  documents = 0;
  readonly #folder: string;
  readonly #tokenizer: Tokenizer;
  readonly #tokensPerShard: number;
  readonly #buffer: TokenArray;
  readonly #starts = new Float64Array(BUFFERED_DOCUMENTS);
  readonly #shards: { tokens: ShardFile; documents: ShardFile }[] = [];
  #buffered = 0;
  #bufferedStarts = 0;
  #shardTokens = 0;
  #insideDocument = false;
  #tokenFile: HashedFile | undefined;
  #documentFile: HashedFile | undefined;

  /** `folder` must exist and be used by this writer only. The caller renames it afterwards. */
  constructor(folder: string, tokenizer: Tokenizer, tokensPerShard = TOKENS_PER_SHARD) {
    this.#folder = folder;
    this.#tokenizer = tokenizer;
    this.#tokensPerShard = tokensPerShard;
    const type = tokenTypeFor(tokenizer.vocabSize);
    this.#buffer = tokenView(type, new ArrayBuffer(BUFFERED_TOKENS * bytesPerToken(type)), BUFFERED_TOKENS);
  }

  /** Adds tokens to the open document, or to a new one. */
  append(ids: ArrayLike<number>): void {
    const { vocabSize, name, documentStart = [] } = this.#tokenizer;
    for (let index = 0; index < ids.length; index++) {
      const id = ids[index];
      if (!(id >= 0 && id < vocabSize)) {
        throw new TrefoilError(`tokenizer ${name} gave token ${id}, outside its vocabulary of ${vocabSize}`);
      }
      if (!this.#insideDocument) {
        this.#beginDocument();
        for (const first of documentStart) this.#put(first);
      }
      this.#put(id);
    }
  }

  /** Adds complete documents with their separators, as `ShardReader` returns them. `starts` are indices of `ids`. */
  appendTokens(ids: Int32Array, starts: ArrayLike<number>): void {
    let position = 0;
    for (let document = 0; document <= starts.length; document++) {
      const end = document === starts.length ? ids.length : starts[document];
      for (; position < end; position += this.#putSome(ids.subarray(position, end)));
      if (document < starts.length) this.#beginDocument();
    }
    this.#insideDocument = false;
  }

  /** Ends the open document with the separator. A document without tokens is ignored. */
  endDocument(): void {
    if (!this.#insideDocument) return;
    this.#put(this.#tokenizer.separator);
    this.#insideDocument = false;
  }

  /** Writes the rest and the index, and forces all files to disk. */
  finish(skippedFiles = 0): ShardIndex {
    this.endDocument();
    this.#endShard();
    const { name, identity, vocabSize, separator } = this.#tokenizer;
    const { index, text } = encodeIndex({
      tokenizer: { name, identity },
      vocabSize,
      dtype: tokenTypeFor(vocabSize),
      separator,
      tokens: this.tokens,
      documents: this.documents,
      skippedFiles,
      shards: this.#shards,
    });
    const file = new HashedFile(this.#folder, INDEX_NAME);
    file.write(Buffer.from(text));
    file.close();
    return index;
  }

  /** Closes the files without finishing; the caller removes the folder. */
  abandon(): void {
    this.#tokenFile?.abandon();
    this.#documentFile?.abandon();
  }

  #beginDocument(): void {
    // A document belongs to the shard of its first token.
    if (this.#shardTokens === this.#tokensPerShard) this.#endShard();
    if (this.#bufferedStarts === BUFFERED_DOCUMENTS) this.#flush();
    this.#starts[this.#bufferedStarts++] = this.tokens;
    this.documents++;
    this.#insideDocument = true;
  }

  #put(id: number): void {
    if (this.#shardTokens === this.#tokensPerShard) this.#endShard();
    if (this.#buffered === BUFFERED_TOKENS) this.#flush();
    this.#buffer[this.#buffered++] = id;
    this.#shardTokens++;
    this.tokens++;
  }

  /** Copies as many of `ids` as fit the buffer and the shard; returns their number. */
  #putSome(ids: Int32Array): number {
    if (this.#shardTokens === this.#tokensPerShard) this.#endShard();
    if (this.#buffered === BUFFERED_TOKENS) this.#flush();
    const room = Math.min(BUFFERED_TOKENS - this.#buffered, this.#tokensPerShard - this.#shardTokens);
    const taken = ids.subarray(0, room);
    this.#buffer.set(taken, this.#buffered);
    this.#buffered += taken.length;
    this.#shardTokens += taken.length;
    this.tokens += taken.length;
    return taken.length;
  }

  #flush(): void {
    const number = String(this.#shards.length).padStart(5, '0');
    this.#tokenFile ??= new HashedFile(this.#folder, `tokens-${number}.bin`);
    this.#documentFile ??= new HashedFile(this.#folder, `docs-${number}.bin`);
    this.#tokenFile.write(this.#buffer.subarray(0, this.#buffered));
    this.#documentFile.write(this.#starts.subarray(0, this.#bufferedStarts));
    this.#buffered = 0;
    this.#bufferedStarts = 0;
  }

  #endShard(): void {
    this.#flush();
    this.#shards.push({ tokens: this.#tokenFile!.close(), documents: this.#documentFile!.close() });
    this.#tokenFile = undefined;
    this.#documentFile = undefined;
    this.#shardTokens = 0;
  }
}

/** A new file with a running hash of its content. */
class HashedFile {
  readonly #name: string;
  readonly #descriptor: number;
  readonly #hash: Hash = createHash('sha256');
  #bytes = 0;
  #open = true;

  constructor(folder: string, name: string) {
    this.#name = name;
    this.#descriptor = openSync(join(folder, name), 'wx');
  }

  write({ buffer, byteOffset, byteLength }: ArrayBufferView): void {
    const bytes = new Uint8Array(buffer, byteOffset, byteLength);
    this.#hash.update(bytes);
    this.#bytes += bytes.length;
    writeFully(this.#descriptor, bytes);
  }

  close(): ShardFile {
    fsyncSync(this.#descriptor);
    this.abandon();
    return { file: this.#name, bytes: this.#bytes, sha256: this.#hash.digest('hex') };
  }

  /** Closes the file without forcing it to disk. Idempotent. */
  abandon(): void {
    if (this.#open) closeSync(this.#descriptor);
    this.#open = false;
  }
}
