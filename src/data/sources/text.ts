/** Plain text: a file is one document, decompressed if its name says so. Also the cutting of long texts into pieces. */

import { readBytes } from './bytes.js';
import type { DocumentBlock, PartReader, ReadRequest } from './reader.js';

/** Texts longer than this are tokenised in pieces, so memory does not grow with the largest file. */
export const PIECE_LENGTH = 1 << 20;
/** Characters of a file that are one block; a longer file is several blocks that continue each other. */
const BLOCK_LENGTH = 1 << 28;
const INSPECTED_BYTES = 1 << 16;
// Invalid bytes of a text become U+FFFD. Compressed and other binary data without a NUL byte is mostly invalid; text in
// an 8-bit encoding has a few percent, and a short text may have only a few characters besides.
const INVALID_SHARE = 0.3;
const MIN_INVALID = 16;
const REPLACEMENT = '\uFFFD';
const REPLACEMENT_BYTES = Buffer.from(REPLACEMENT);

// The same set as in the word patterns of the tokenizers. JavaScript's \s has U+FEFF too, and lacks U+0085.
const SPACE = /\p{White_Space}/u;

export async function openText({ file }: ReadRequest, blockLength = BLOCK_LENGTH): Promise<PartReader> {
  let blocks: AsyncGenerator<DocumentBlock> | undefined;
  let position = 0;
  return {
    async read(wanted) {
      // Blocks can only be read in order: going back reads the file again from its start.
      if (blocks === undefined || wanted < position) {
        await blocks?.return(undefined);
        blocks = textBlocks(file.location, blockLength);
        position = 0;
      }
      for (;;) {
        const { value, done } = await blocks.next();
        if (done) return undefined;
        if (position++ === wanted) return value;
      }
    },
    close: async () => {
      await blocks?.return(undefined);
    },
  };
}

async function* textBlocks(path: string, blockLength: number): AsyncGenerator<DocumentBlock> {
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  let text = '';
  let replaced = 0;
  let blocks = 0;
  let isFirstChunk = true;
  for await (const bytes of readBytes(path)) {
    if (isFirstChunk && looksBinary(bytes.subarray(0, INSPECTED_BYTES))) {
      yield { documents: [], next: 1, skipped: 'binary' };
      return;
    }
    isFirstChunk = false;
    const decoded = decoder.decode(bytes, { stream: true });
    replaced += countReplaced(decoded, bytes);
    text += decoded;
    if (text.length <= blockLength) continue;
    // A block ends where a piece ends, so that the pieces are those of the whole text.
    const pieces = [...cutText(text)];
    text = pieces.pop()!;
    yield { documents: [pieces.join('')], next: blocks + 1, continues: blocks > 0, isPartial: true, replaced };
    blocks++;
    replaced = 0;
  }
  const last = decoder.decode();
  text += last;
  replaced += last.length;
  if (text.length > 0) yield { documents: [text], next: blocks + 1, continues: blocks > 0, replaced };
}

/** Invalid sequences of `bytes` that decoding has replaced; U+FFFD that the file itself holds does not count. */
function countReplaced(decoded: string, bytes: Uint8Array): number {
  let count = countOccurrences((from) => decoded.indexOf(REPLACEMENT, from));
  if (count === 0) return 0;
  const buffer = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  count -= countOccurrences((from) => buffer.indexOf(REPLACEMENT_BYTES, from));
  return Math.max(0, count);
}

function countOccurrences(find: (from: number) => number): number {
  let count = 0;
  for (let at = find(0); at >= 0; at = find(at + 1)) count++;
  return count;
}

/** True for a NUL byte near the start, or where much of the start is not UTF-8. */
function looksBinary(start: Uint8Array): boolean {
  if (start.includes(0)) return true;
  // `stream` leaves out a character that the end of the inspected part cuts in two.
  const text = new TextDecoder('utf-8').decode(start, { stream: true });
  const invalid = countReplaced(text, start);
  return invalid >= MIN_INVALID && invalid > INVALID_SHARE * text.length;
}

/**
 * The pieces of a text, each of at most `length` UTF-16 units.
 * A cut lies before white space that follows something else: GPT-2's word pattern never joins across that place, so
 * the tokens are the same as without the cut. Only a run without any such place is cut inside, at a whole character.
 */
export function* cutText(text: string, length = PIECE_LENGTH): Generator<string> {
  let start = 0;
  while (text.length - start > length) {
    const end = findCut(text, start, start + length);
    yield text.slice(start, end);
    start = end;
  }
  if (start < text.length) yield text.slice(start);
}

function findCut(text: string, start: number, limit: number): number {
  for (let end = limit; end > start; end--) {
    if (SPACE.test(text[end]) && !SPACE.test(text[end - 1])) return end;
  }
  const splitsPair = isHighSurrogate(text.charCodeAt(limit - 1)) && limit - 1 > start;
  return splitsPair ? limit - 1 : limit;
}

function isHighSurrogate(unit: number): boolean {
  return unit >= 0xd800 && unit <= 0xdbff;
}
