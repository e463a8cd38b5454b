/** The byte tokenizer, and decoding for all tokenizers whose tokens are byte strings. */

import { utf8 } from '../../bytes.js';
import { TrefoilError } from '../../errors.js';
import type { StreamDecoder, Tokenizer } from '../tokenizer.js';

/** Invalid bytes become U+FFFD. `ignoreBOM: true` keeps a byte order mark, so that decode inverts encode. */
export function decodeUtf8(bytes: Uint8Array): string {
  return new TextDecoder('utf-8', { ignoreBOM: true }).decode(bytes);
}

export function createByteStreamDecoder(bytesOf: (id: number) => Uint8Array): StreamDecoder {
  // The decoder keeps the bytes of an incomplete character between calls.
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  return {
    push: (id) => decoder.decode(bytesOf(id), { stream: true }),
    end: () => decoder.decode(),
  };
}

/** Throws for an id without a token, which a model with a padded vocabulary may sample. */
export function checkedId(id: number, vocabSize: number, name: string): number {
  if (Number.isInteger(id) && id >= 0 && id < vocabSize) return id;
  throw new TrefoilError(`token ${id} is outside the vocabulary of tokenizer ${name} (0 to ${vocabSize - 1})`);
}

const SEPARATOR = 0;
const BYTES = Array.from({ length: 256 }, (_, value) => Uint8Array.of(value));

/** A token is one byte of UTF-8. Id 0 separates documents, as text has no NUL. */
export function createByteTokenizer(): Tokenizer {
  return {
    name: 'byte',
    vocabSize: 256,
    separator: SEPARATOR,
    identity: 'byte',
    encode: (text) => new Int32Array(utf8(text)),
    byteLength: (id) => (id === SEPARATOR ? 0 : 1),
    tokenBytes: (id) => (id === SEPARATOR ? null : BYTES[checkedId(id, 256, 'byte')]),
    decode: (ids) => decodeUtf8(Uint8Array.from(ids, (id) => checkedId(id, 256, 'byte'))),
    createStreamDecoder: () => createByteStreamDecoder((id) => BYTES[checkedId(id, 256, 'byte')]),
  };
}
