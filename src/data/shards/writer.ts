/** Writes token shards as a stream, in bounded memory. */

import { createHash, type Hash } from 'node:crypto';
import { closeSync, fsyncSync, openSync } from 'node:fs';
import { open } from 'node:fs/promises';
import { join } from 'node:path';
import { writeFully } from '../../files.js';
import type { Tokenizer } from '../tokenizer.js';
import {
  encodeIndex,
  INDEX_NAME,
  type ShardEntry,
  type ShardFile,
  type ShardIndex,
  type ShardIndexContent,
} from './format.js';
import { bytesPerToken, type TokenArray, tokenView } from './token-type.js';
import { TokenWriter } from './token-writer.js';

const BUFFERED_TOKENS = 1 << 18;
const BUFFERED_DOCUMENTS = 1 << 13;
const TOKENS_PER_SHARD = 2 ** 27;
/** Bytes of a file after which it is brought to disk while it is written. */
const SYNCED_BYTES = 1 << 25;

export class ShardWriter extends TokenWriter {
  readonly #folder: string;
  readonly #tokensPerShard: number;
  readonly #buffer: TokenArray;
  readonly #starts = new Float64Array(BUFFERED_DOCUMENTS);
  readonly #shards: ShardEntry[] = [];
  /** Token from which the positions of documents count. */
  #base = 0;
  #buffered = 0;
  #bufferedStarts = 0;
  #shardTokens = 0;
  #tokenFile: HashedFile | undefined;
  #documentFile: HashedFile | undefined;

  /** `folder` must exist and be used by this writer only. The caller renames it afterwards. */
  constructor(folder: string, tokenizer: Tokenizer, tokensPerShard = TOKENS_PER_SHARD) {
    super(tokenizer);
    this.#folder = folder;
    this.#tokensPerShard = tokensPerShard;
    this.#buffer = tokenView(this.type, new ArrayBuffer(BUFFERED_TOKENS * bytesPerToken(this.type)), BUFFERED_TOKENS);
  }

  /** Adds complete documents with their separators. `starts` are indices of `ids`. */
  appendTokens(ids: Int32Array | TokenArray, starts: ArrayLike<number>): void {
    let position = 0;
    for (let document = 0; document <= starts.length; document++) {
      const end = document === starts.length ? ids.length : starts[document];
      this.put(ids.subarray(position, end));
      position = end;
      if (document < starts.length) this.beginDocument();
    }
    this.insideDocument = false;
  }

  /** Begins a new shard, unless one has just begun. The positions of its documents count from here. */
  startGroup(): void {
    if (this.#base === this.tokens) return;
    this.#endShard();
    this.#base = this.tokens;
  }

  /** Writes the rest without an index, forces all files to disk, and returns what an index says of them. */
  end(skippedFiles: number): Omit<ShardIndexContent, 'format' | 'version'> {
    this.endDocument();
    if (this.#shardTokens > 0) this.#endShard();
    const { name, identity, vocabSize, separator } = this.tokenizer;
    return {
      tokenizer: { name, identity },
      vocabSize,
      dtype: this.type,
      separator,
      tokens: this.tokens,
      documents: this.documents,
      skippedFiles,
      shards: this.#shards,
    };
  }

  /** Writes the rest and the index, and forces all files to disk. */
  finish(skippedFiles = 0): ShardIndex {
    const { index, text } = encodeIndex(this.end(skippedFiles));
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

  protected override beginDocument(): void {
    // A document belongs to the shard of its first token.
    if (this.#shardTokens === this.#tokensPerShard) this.#endShard();
    if (this.#bufferedStarts === BUFFERED_DOCUMENTS) this.#flush();
    this.#starts[this.#bufferedStarts++] = this.tokens - this.#base;
    super.beginDocument();
  }

  protected put(ids: Int32Array | TokenArray): void {
    for (let position = 0; position < ids.length; ) {
      if (this.#shardTokens === this.#tokensPerShard) this.#endShard();
      if (this.#buffered === BUFFERED_TOKENS) this.#flush();
      const room = Math.min(BUFFERED_TOKENS - this.#buffered, this.#tokensPerShard - this.#shardTokens);
      const taken = ids.subarray(position, position + room);
      this.#buffer.set(taken, this.#buffered);
      this.#buffered += taken.length;
      this.#shardTokens += taken.length;
      this.tokens += taken.length;
      position += taken.length;
    }
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
    const [tokens, documents] = [this.#tokenFile!.close(), this.#documentFile!.close()];
    this.#shards.push({ tokens, documents, ...(this.#base > 0 && { base: this.#base }) });
    this.#tokenFile = undefined;
    this.#documentFile = undefined;
    this.#shardTokens = 0;
  }
}

/** A new file with a running hash of its content. */
class HashedFile {
  readonly #name: string;
  readonly #path: string;
  readonly #descriptor: number;
  readonly #hash: Hash = createHash('sha256');
  #bytes = 0;
  #syncedBytes = 0;
  #isSyncing = false;
  #open = true;

  constructor(folder: string, name: string) {
    this.#name = name;
    this.#path = join(folder, name);
    this.#descriptor = openSync(this.#path, 'wx');
  }

  write({ buffer, byteOffset, byteLength }: ArrayBufferView): void {
    const bytes = new Uint8Array(buffer, byteOffset, byteLength);
    this.#hash.update(bytes);
    this.#bytes += bytes.length;
    writeFully(this.#descriptor, bytes);
    if (this.#bytes - this.#syncedBytes >= SYNCED_BYTES) void this.#startSync();
  }

  /**
   * Brings what is written so far to disk meanwhile, so that `close` has less to wait for. One at a time: a slow disk must
   * not take all threads that read files. Errors are ignored, because `close` meets them again.
   */
  async #startSync(): Promise<void> {
    if (this.#isSyncing) return;
    this.#isSyncing = true;
    this.#syncedBytes = this.#bytes;
    try {
      // A descriptor of its own: the other may be closed before this ends.
      const handle = await open(this.#path, 'r+');
      await handle.datasync().finally(() => handle.close());
    } catch {
    } finally {
      this.#isSyncing = false;
    }
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
