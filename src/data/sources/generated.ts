/** Computed documents, for measurements and tests with more documents than a disk holds. */

import { absorb, mix32, Purpose } from '../hash.js';
import type { PartReader, ReadRequest } from './reader.js';

const BLOCK_DOCUMENTS = 1000;

/** `file.location` is `documents:bytes`: documents per part, and their mean length. */
export async function openGenerated({ file, part }: ReadRequest): Promise<PartReader> {
  const [documents, bytes] = file.location.split(':').map(Number);
  const seed = absorb(absorb(absorb(0, Purpose.generated), part), documents);
  return {
    async read(position) {
      const first = position * BLOCK_DOCUMENTS;
      if (first >= documents) return undefined;
      const count = Math.min(BLOCK_DOCUMENTS, documents - first);
      return {
        documents: Array.from({ length: count }, (_, i) => letters(absorb(seed, first + i), bytes)),
        next: position + 1,
      };
    },
    close: async () => {},
  };
}

/** Between half and one and a half times `mean` lower-case letters and spaces. */
function letters(seed: number, mean: number): Uint8Array {
  const length = Math.floor(mean / 2) + (seed % (mean + 1));
  const text = new Uint8Array(length);
  for (let index = 0; index < length; index++) {
    const letter = mix32(seed + index) % 32;
    text[index] = letter < 26 ? 97 + letter : 32;
  }
  return text;
}
