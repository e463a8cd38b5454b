/** Reads growing log files line by line, in pieces, so that a server stays responsive while it reads gigabytes. */
import { readFully, readText, withFile } from '../files.js';

const NEWLINE = 0x0a;
/** Bytes that are read at once. Callers of `readLines` ask for at least as many: longer lines are skipped, not waited for. */
export const PIECE_BYTES = 1024 * 1024;

/** Reads a text file of at most `limit` bytes; undefined if it is missing. */
export function readSmallFile(path: string, limit: number): string | undefined {
  return readText(path, { links: 'refused', limit });
}

/**
 * The whole lines in bytes [from, to) of a file, with the offset of each. `end` is where the next read continues. A line of
 * fewer bytes than `shortest` cannot be a record and is passed as '', since a file of garbage has millions of them.
 */
export function readLines(
  path: string,
  from: number,
  to: number,
  onLine: (line: string, offset: number) => void,
  shortest = 1,
): { readonly end: number; readonly size: number; readonly inode: number } | undefined {
  const read = (descriptor: number, size: number, inode: number) => {
    const last = Math.min(to, size);
    let position = from;
    while (position < last) {
      const piece = Buffer.allocUnsafe(Math.min(PIECE_BYTES, last - position));
      const length = readFully(descriptor, piece, position);
      const whole = piece.subarray(0, length).lastIndexOf(NEWLINE) + 1;
      if (whole === 0) {
        // A line longer than a whole piece is not a record: skip it.
        if (length < PIECE_BYTES) break;
        position += length;
        continue;
      }
      let start = 0;
      while (start < whole) {
        const end = piece.indexOf(NEWLINE, start);
        const text = end - start < shortest ? '' : piece.toString('utf8', start, end);
        if (end > start) onLine(text, position + start);
        start = end + 1;
      }
      position += whole;
    }
    return { end: position, size, inode };
  };
  // Links are refused: a folder that another person wrote must not make the server show files from elsewhere.
  return withFile(path, read, { links: 'refused' });
}
