/** Text to token ids and back. One file per kind in `tokenizers/`; this file says what they share and picks one. */

import { existsSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { UsageError } from '../errors.js';
import type { TokenBuffer } from './token-buffer.js';
import { createByteTokenizer } from './tokenizers/byte.js';
import { createGpt2Tokenizer } from './tokenizers/gpt2.js';
import { createHuggingFaceTokenizer } from './tokenizers/huggingface.js';
import { createStoryTokenizer } from './tokenizers/stories.js';

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

const BUILT_IN = { byte: createByteTokenizer, gpt2: createGpt2Tokenizer, stories: createStoryTokenizer } as const;

/** Whether `spec` names a tokenizer of Trefoil; otherwise it is a path. */
export function isBuiltInTokenizer(spec: string): spec is keyof typeof BUILT_IN {
  return Object.hasOwn(BUILT_IN, spec);
}

/** `byte`, `gpt2`, `stories`, or the path of a tokenizer.json (or of the folder that holds one). */
export function createTokenizer(spec: string): Tokenizer {
  if (isBuiltInTokenizer(spec)) return BUILT_IN[spec]();
  if (!existsSync(spec)) {
    throw new UsageError(
      `data.tokenizer: "${spec}" is not one of ${Object.keys(BUILT_IN).join(', ')} and not an existing tokenizer.json file`,
    );
  }
  return createHuggingFaceTokenizer(statSync(spec).isDirectory() ? join(spec, 'tokenizer.json') : spec);
}
