/** The interface of tokenizers, and the choice of one by name. Implementations are in `tokenizers/`. */

import { existsSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { UsageError } from '../errors.js';
import { modelFolder } from '../hub/cache.js';
import { BUILT_IN_TOKENIZERS, createBuiltInTokenizer, isBuiltInTokenizer } from './tokenizers/built-in.js';
import { createHuggingFaceTokenizer } from './tokenizers/huggingface.js';
import type { TokenBuffer } from './tokenizers/token-buffer.js';

/** Text to token ids and back. */
export interface Tokenizer {
  readonly name: string;
  /** One more than the largest id: the rows an embedding table needs. */
  readonly vocabSize: number;
  /** Written after every document. */
  readonly separator: number;
  /** Equal for equal behaviour, independent of the file's place. Part of cache keys and of prepared shards. */
  readonly identity: string;
  /**
   * By default strings that look like special tokens are encoded as text: a document cannot inject a separator. Tokenizers
   * without special tokens ignore the options.
   */
  encode(text: string, options?: EncodeOptions): Int32Array;
  /** Appends the ids to a buffer, for callers that encode many texts and want no array for each. */
  encodeInto?(text: string, tokens: TokenBuffer): void;
  /** UTF-8 bytes of the text of a token; 0 for the separator. */
  byteLength(id: number): number;
  /**
   * The bytes of the text that a token adds; null for special tokens, which have none. Absent where the text of a token
   * depends on its neighbours, but for a space that the first token of a text may lose.
   */
  tokenBytes?(id: number): Uint8Array | null;
  /** The text of these tokens; bytes that are no valid UTF-8 become U+FFFD. */
  decode(ids: ArrayLike<number>, options?: DecodeOptions): string;
  /** For output token by token: keeps the bytes of an incomplete character until it is complete. */
  createStreamDecoder(options?: DecodeOptions): StreamDecoder;
  /** Written before every document and prompt, such as a begin-of-text token. Absent: nothing. */
  readonly documentStart?: readonly number[];
  /** Tokens that end a generated text. Absent: the separator. */
  readonly endTokens?: readonly number[];
  /** Chat templates of the model the tokenizer belongs to; see `applyChatTemplate`. Absent or empty: none. */
  readonly chat?: ChatTemplates;
}

/** Options of `Tokenizer.encode`. */
export interface EncodeOptions {
  /** Strings of special tokens become these tokens: for text from a chat template or a trusted person. */
  readonly parseSpecial?: boolean;
  /** Puts the tokens around the text that the tokenizer puts around every text, such as a begin-of-text token. */
  readonly addSpecial?: boolean;
}

/** Options of decoding. */
export interface DecodeOptions {
  /** Leaves special tokens out. */
  readonly skipSpecial?: boolean;
}

/** Jinja templates that write a conversation as text. */
export interface ChatTemplates {
  /** By name; `default` is used unless another is asked for. */
  readonly templates: ReadonlyMap<string, string>;
  /** Variables of the templates: strings of special tokens, such as `bos_token`. */
  readonly variables: Readonly<Record<string, string | readonly string[]>>;
}

/** Decodes tokens one by one into text. */
export interface StreamDecoder {
  /** The text that this token completes; empty inside a multi-byte character. */
  push(id: number): string;
  /** The rest of the text; an incomplete character becomes U+FFFD. */
  end(): string;
}

/** `byte`, `gpt2`, `stories`, the path of a tokenizer.json (or of the folder that holds one), or a model of the hub in the cache. */
export function createTokenizer(name: string): Tokenizer {
  if (isBuiltInTokenizer(name)) return createBuiltInTokenizer(name);
  const spec = modelFolder(name);
  if (!existsSync(spec)) {
    throw new UsageError(
      `data.tokenizer: "${spec}" is not one of ${BUILT_IN_TOKENIZERS.join(', ')} and not an existing tokenizer.json file`,
    );
  }
  if (!statSync(spec).isDirectory()) return createHuggingFaceTokenizer(spec);
  const file = join(spec, 'tokenizer.json');
  if (!existsSync(file)) throw new UsageError(`data.tokenizer: the folder ${spec} has no tokenizer.json`);
  return createHuggingFaceTokenizer(file);
}

/** Refuses a tokenizer with more tokens than the model has. */
export function checkVocabulary(name: string, tokenizer: Tokenizer, vocabSize: number | null | undefined): void {
  if (vocabSize === null || vocabSize === undefined || tokenizer.vocabSize <= vocabSize) return;
  throw new UsageError(
    `data.tokenizer: ${name} has ${tokenizer.vocabSize} tokens, more than the vocabulary of ` +
      `${vocabSize}; raise it to at least ${tokenizer.vocabSize} or choose another tokenizer`,
  );
}
