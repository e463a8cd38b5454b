/** What a source of text yields, and how a text too long to handle at once is cut. */

export interface Document {
  readonly text: string;
  /** For messages: the file, and the line where there is one. */
  readonly origin: string;
  /** True when this text goes on where the one before it ended: no separator between them. */
  readonly continues?: boolean;
}

/** Counted by a source while it is read. */
export interface ReadStatistics {
  /** Bytes taken from disk (compressed where the file is). */
  bytes: number;
  /** Files passed over because they are not UTF-8 text. */
  skippedFiles: number;
  /** The first of them, so that a message can show one. */
  firstSkipped?: string;
}

/** Texts longer than this are tokenised in pieces, so memory does not grow with the largest file. */
export const PIECE_LENGTH = 1 << 20;

// The same set as in the word patterns of the tokenizers. JavaScript's \s has U+FEFF too, and lacks U+0085.
const SPACE = /\p{White_Space}/u;

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
