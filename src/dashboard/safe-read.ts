/** Reads growing log files line by line, in pieces, so that a server stays responsive while it reads gigabytes. */
import { closeSync, constants, fstatSync, openSync, type Stats } from 'node:fs';
import { UsageError } from '../errors.js';
import { errorCode, fileError, readFully } from '../files.js';

const NEWLINE = 0x0a;
/** Bytes that are read at once. Callers of `readLines` ask for at least as many: longer lines are skipped, not waited for. */
export const PIECE_BYTES = 1024 * 1024;

/**
 * Uses a regular file of a run folder. Links are refused: a folder that another person wrote must not make the server show
 * files from elsewhere. Returns undefined if the file is missing.
 */
function withRegularFile<Result>(path: string, use: (descriptor: number, facts: Stats) => Result): Result | undefined {
  let descriptor: number;
  try {
    // O_NONBLOCK: opening a pipe without a writer would block.
    descriptor = openSync(path, constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
  } catch (error) {
    if (errorCode(error) === 'ENOENT') return undefined;
    if (errorCode(error) === 'ELOOP')
      throw new UsageError(`${path}: is a symbolic link; links in runs are not followed`);
    throw fileError('read', path, error);
  }
  try {
    const facts = fstatSync(descriptor);
    if (!facts.isFile()) throw new UsageError(`${path}: is not a regular file`);
    return use(descriptor, facts);
  } catch (error) {
    throw fileError('read', path, error);
  } finally {
    closeSync(descriptor);
  }
}

/** Reads a text file of at most `limit` bytes; undefined if it is missing. */
export function readSmallFile(path: string, limit: number): string | undefined {
  return withRegularFile(path, (descriptor, { size }) => {
    if (size > limit) throw new UsageError(`${path}: has ${size} bytes; at most ${limit} are shown`);
    const bytes = new Uint8Array(size);
    return new TextDecoder().decode(bytes.subarray(0, readFully(descriptor, bytes, 0)));
  });
}

/** The whole lines in bytes [from, to) of a file, with the offset of each. `end` is where the next read continues. */
export function readLines(
  path: string,
  from: number,
  to: number,
  onLine: (line: string, offset: number) => void,
): { readonly end: number; readonly size: number; readonly inode: number } | undefined {
  return withRegularFile(path, (descriptor, { size, ino: inode }) => {
    const last = Math.min(to, size);
    let position = from;
    while (position < last) {
      const piece = Buffer.allocUnsafe(Math.min(PIECE_BYTES, last - position));
      const read = readFully(descriptor, piece, position);
      const whole = piece.subarray(0, read).lastIndexOf(NEWLINE) + 1;
      if (whole === 0) {
        // A line longer than a whole piece is not a record: skip it.
        if (read < PIECE_BYTES) break;
        position += read;
        continue;
      }
      let start = 0;
      while (start < whole) {
        const end = piece.indexOf(NEWLINE, start);
        onLine(piece.toString('utf8', start, end), position + start);
        start = end + 1;
      }
      position += whole;
    }
    return { end: position, size, inode };
  });
}
