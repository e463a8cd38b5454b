/** Text to token ids and back. One file per kind in `tokenizers/`; this file says what they share and picks one. */

import { existsSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { UsageError } from '../errors.js';
import type { TokenBuffer } from './token-buffer.js';
import { createByteTokenizer } from './tokenizers/byte.js';
import { createGpt2Tokenizer } from './tokenizers/gpt2.js';
import { createHuggingFaceTokenizer } from './tokenizers/huggingface.js';

/** Text to token ids and back. */
export interface Tokenizer {
  readonly name: string;
  /** One more than the largest id: the rows an embedding table needs. */
  readonly vocabSize: number;
  /** Written after every document. */
  readonly separator: number;
  /** Equal for equal behaviour, wherever the files lie: part of cache keys and of prepared shards. */
  readonly identity: string;
  /** Strings that look like special tokens are text here: a document can never inject a separator. */
  encode(text: string): Int32Array;
  /** The same behind what a buffer holds already, for callers that have many texts to encode and want no array for each. */
  encodeInto?(text: string, tokens: TokenBuffer): void;
  /** UTF-8 bytes of text that a token stands for; 0 for the separator. */
  byteLength(id: number): number;
  decode(ids: ArrayLike<number>): string;
  /** For output token by token: holds back the bytes of a character that is not complete yet. */
  createStreamDecoder(): StreamDecoder;
}

/** Decodes tokens one by one into text. */
export interface StreamDecoder {
  /** The text that became certain with this token; often empty inside a multi-byte character. */
  push(id: number): string;
  /** What is left at the end; an unfinished character becomes U+FFFD. */
  end(): string;
}

/** `byte`, `gpt2`, or the path of a tokenizer.json (or of the folder that holds one). */
export function createTokenizer(spec: string): Tokenizer {
  if (spec === 'byte') return createByteTokenizer();
  if (spec === 'gpt2') return createGpt2Tokenizer();
  if (!existsSync(spec)) {
    throw new UsageError(`data.tokenizer: "${spec}" is not byte, not gpt2 and not an existing tokenizer.json file`);
  }
  return createHuggingFaceTokenizer(statSync(spec).isDirectory() ? join(spec, 'tokenizer.json') : spec);
}
