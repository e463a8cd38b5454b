/** Decoding for tokenizers whose tokens are byte strings. */

import { TrefoilError } from '../../errors.js';
import type { StreamDecoder } from '../tokenizer.js';

/** Invalid bytes become U+FFFD. `ignoreBOM` means "keep it": a decoder must not drop what was encoded. */
export function decodeUtf8(bytes: Uint8Array): string {
  return new TextDecoder('utf-8', { ignoreBOM: true }).decode(bytes);
}

export function createByteStreamDecoder(bytesOf: (id: number) => Uint8Array): StreamDecoder {
  // The decoder itself keeps the bytes of an unfinished character between calls.
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  return {
    push: (id) => decoder.decode(bytesOf(id), { stream: true }),
    end: () => decoder.decode(),
  };
}

/** A model with a padded vocabulary may sample an id that no token has: said by name, not as "undefined". */
export function checkedId(id: number, vocabSize: number, name: string): number {
  if (Number.isInteger(id) && id >= 0 && id < vocabSize) return id;
  throw new TrefoilError(`token ${id} is outside the vocabulary of tokenizer ${name} (0 to ${vocabSize - 1})`);
}
