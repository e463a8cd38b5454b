/** How token ids are stored: in as few bytes as the vocabulary needs. */

import { UsageError } from '../../errors.js';

export type TokenType = 'u8' | 'u16' | 'u32';

const TOKEN_ARRAYS = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array } as const;
export type TokenArray = Uint8Array | Uint16Array | Uint32Array;

export function bytesPerToken(type: TokenType): number {
  return TOKEN_ARRAYS[type].BYTES_PER_ELEMENT;
}

/** A view of `count` tokens from the start of a buffer. Assumes a little-endian machine, as Node itself does. */
export function tokenView(type: TokenType, buffer: ArrayBuffer, count: number): TokenArray {
  return new TOKEN_ARRAYS[type](buffer, 0, count);
}

export function tokenTypeFor(vocabSize: number): TokenType {
  if (vocabSize <= 2 ** 8) return 'u8';
  if (vocabSize <= 2 ** 16) return 'u16';
  if (vocabSize <= 2 ** 31) return 'u32';
  throw new UsageError(`data.tokenizer: a vocabulary of ${vocabSize} tokens is too large; at most 2^31 are supported`);
}
