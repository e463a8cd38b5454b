/** Decoding for tokenizers whose tokens are byte strings. */

import { TrefoilError } from '../../errors.js';
import type { StreamDecoder } from '../tokenizer.js';

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
