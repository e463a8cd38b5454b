/** A file that grows by whole records: a reader that tails it never sees half of one. */
import {
  closeSync,
  constants,
  fstatSync,
  fsyncSync,
  ftruncateSync,
  openSync,
  readSync,
  type Stats,
  writeSync,
} from 'node:fs';
import { UsageError } from '../../errors.js';
import { fileError } from '../atomic.js';

const NEWLINE = 0x0a;
const REPAIR_CHUNK_BYTES = 64 * 1024;

export class AppendFile {
  readonly path: string;
  readonly descriptor: number;

  /**
   * Opens or creates the file. `lines` removes the incomplete line that a crash may have left at the end. A number is the
   * descriptor of a file that is already open.
   */
  constructor(path: string, source: 'lines' | 'binary' | number = 'lines') {
    this.path = path;
    if (typeof source === 'number') {
      this.descriptor = source;
      return;
    }
    try {
      // Without O_NONBLOCK, opening a pipe that has no reader would block before it could be refused.
      const flags = constants.O_RDWR | constants.O_APPEND | constants.O_CREAT | constants.O_NONBLOCK;
      this.descriptor = openSync(path, flags, 0o644);
    } catch (error) {
      throw fileError('open', path, error);
    }
    try {
      if (!this.#facts().isFile()) throw new UsageError(`${path}: is not a regular file; remove it`);
      if (source === 'lines') this.#removeHalfLine();
    } catch (error) {
      closeSync(this.descriptor);
      throw fileError('open', path, error);
    }
  }

  get size(): number {
    return this.#facts().size;
  }

  /**
   * Appends the bytes of one or more whole records with one write call. If the disk takes only a part of them, that part
   * is removed again, so that the file still ends with a whole record, and the error is thrown.
   */
  append(bytes: Uint8Array): void {
    const before = this.size;
    try {
      let offset = writeSync(this.descriptor, bytes, 0, bytes.length);
      // A short write means that the disk has just become full; the next call throws the reason.
      while (offset < bytes.length) offset += writeSync(this.descriptor, bytes, offset, bytes.length - offset);
    } catch (error) {
      if (this.size > before) ftruncateSync(this.descriptor, before);
      throw fileError('append', this.path, error);
    }
  }

  sync(): void {
    try {
      fsyncSync(this.descriptor);
    } catch (error) {
      throw fileError('sync', this.path, error);
    }
  }

  close(): void {
    closeSync(this.descriptor);
  }

  #facts(): Stats {
    return fstatSync(this.descriptor);
  }

  #removeHalfLine(): void {
    const { size } = this.#facts();
    const chunk = new Uint8Array(REPAIR_CHUNK_BYTES);
    let end = size;
    while (end > 0) {
      const start = Math.max(0, end - chunk.length);
      const read = readSync(this.descriptor, chunk, 0, end - start, start);
      const newline = chunk.subarray(0, read).lastIndexOf(NEWLINE);
      end = newline >= 0 ? start + newline + 1 : start;
      if (newline >= 0) break;
    }
    if (end < size) ftruncateSync(this.descriptor, end);
  }
}
