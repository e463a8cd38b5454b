/** A file of plain text is one document; compressed ones are decompressed, and what is not text gives none. */

import { UsageError } from '../../errors.js';
import { readBytes } from '../documents/bytes.js';
import { looksBinary } from '../documents/text.js';
import type { PartReader, ReadRequest } from './reader.js';

/** Near what a string can hold. */
const LARGEST = 256 << 20;
const INSPECTED_BYTES = 1 << 16;

export async function openText({ file }: ReadRequest): Promise<PartReader> {
  return {
    async read(position) {
      if (position > 0) return undefined;
      const chunks: Uint8Array[] = [];
      let length = 0;
      const none = { documents: [], next: 1 };
      for await (const chunk of readBytes(file.location, { bytes: 0, skippedFiles: 0 })) {
        if (length === 0 && looksBinary(chunk.subarray(0, INSPECTED_BYTES))) return none;
        chunks.push(chunk);
        length += chunk.length;
        if (length > LARGEST)
          throw new UsageError(`${file.location}: a text of more than 256 MiB; use --dataset text, which cuts it`);
      }
      return { documents: [Buffer.concat(chunks)], next: 1 };
    },
    close: async () => {},
  };
}
