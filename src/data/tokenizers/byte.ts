/** A token is one byte of UTF-8. Id 0 separates documents, as text has no NUL. */

import type { Tokenizer } from '../tokenizer.js';
import { checkedId, createByteStreamDecoder, decodeUtf8 } from './bytes.js';

const SEPARATOR = 0;
const BYTES = Array.from({ length: 256 }, (_, value) => Uint8Array.of(value));

export function createByteTokenizer(): Tokenizer {
  return {
    name: 'byte',
    vocabSize: 256,
    separator: SEPARATOR,
    identity: 'byte',
    encode: (text) => new Int32Array(Buffer.from(text, 'utf8')),
    byteLength: (id) => (id === SEPARATOR ? 0 : 1),
    tokenBytes: (id) => (id === SEPARATOR ? null : BYTES[checkedId(id, 256, 'byte')]),
    decode: (ids) => decodeUtf8(Uint8Array.from(ids, (id) => checkedId(id, 256, 'byte'))),
    createStreamDecoder: () => createByteStreamDecoder((id) => BYTES[checkedId(id, 256, 'byte')]),
  };
}
