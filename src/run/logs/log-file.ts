/**
 * Log files and their writers. `AppendFile` grows by whole records, so a reader that tails it never sees half of one. `Sink`
 * writes to a file that may fail: records that cannot be written now are kept in memory up to a limit and retried with
 * back-off; the oldest of those that do not fit are dropped and counted. It never throws because of the disk.
 */
import {
  closeSync,
  constants,
  fstatSync,
  fsyncSync,
  ftruncateSync,
  openSync,
  readSync,
  rmSync,
  type Stats,
  writeSync,
} from 'node:fs';
import { UsageError } from '../../errors.js';
import { explainFileError, fileError } from '../../files.js';

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

/** Takes the bytes of records for one file. */
interface RecordSink {
  /** Records that were dropped. */
  readonly drops: number;
  write(record: Uint8Array): void;
  /** Writes and fsyncs what is kept; false if that failed. Never throws. */
  flush(): boolean;
  close(): void;
}

/** Where a sink writes: an AppendFile, or in tests something that fails on demand. */
export interface SinkTarget {
  readonly path: string;
  append(bytes: Uint8Array): void;
  sync(): void;
  close(): void;
}

export interface SinkOptions {
  /** Receives one line when writing starts to fail, and one when it works again. */
  onProblem?: (message: string) => void;
  /** Bytes kept in memory while the target does not take them. */
  maxPendingBytes?: number;
  /** A monotonic clock in milliseconds. */
  now?: () => number;
}

const DEFAULT_PENDING_BYTES = 1024 * 1024;
const FIRST_PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 30_000;

export class Sink implements RecordSink {
  readonly #target: SinkTarget;
  readonly #onProblem: (message: string) => void;
  readonly #maxPendingBytes: number;
  readonly #now: () => number;
  #pending: Uint8Array[] = [];
  #pendingBytes = 0;
  #drops = 0;
  #failures = 0;
  #pausedUntil = Number.NEGATIVE_INFINITY;

  constructor(target: SinkTarget, options: SinkOptions = {}) {
    this.#target = target;
    this.#onProblem = options.onProblem ?? (() => {});
    this.#maxPendingBytes = options.maxPendingBytes ?? DEFAULT_PENDING_BYTES;
    this.#now = options.now ?? (() => performance.now());
  }

  /** Records dropped because too many were pending, or at the end. */
  get drops(): number {
    return this.#drops;
  }

  write(record: Uint8Array): void {
    this.#pending.push(record);
    this.#pendingBytes += record.length;
    if (this.#now() >= this.#pausedUntil) this.#drain();
    // The oldest are dropped first: the newest matter most to someone who examines a run in trouble.
    while (this.#pendingBytes > this.#maxPendingBytes) {
      this.#pendingBytes -= this.#pending.shift()!.length;
      this.#drops++;
    }
  }

  /** Also retries during a back-off pause. */
  flush(): boolean {
    if (!this.#drain()) return false;
    return this.#attempt(() => this.#target.sync());
  }

  /** Tries once more; what cannot be written then is dropped. Never throws. */
  close(): void {
    this.#drain();
    if (this.#pending.length > 0) {
      this.#drops += this.#pending.length;
      this.#onProblem(`${this.#target.path}: ${this.#drops} records were lost`);
    }
    this.#pending = [];
    this.#pendingBytes = 0;
    this.#failures = 0; // a file that can be closed is not one that can be written again
    this.#attempt(() => this.#target.close());
  }

  #drain(): boolean {
    if (this.#pending.length === 0) return true;
    const bytes = this.#pending.length === 1 ? this.#pending[0] : Buffer.concat(this.#pending);
    if (!this.#attempt(() => this.#target.append(bytes))) return false;
    this.#pending = [];
    this.#pendingBytes = 0;
    return true;
  }

  #attempt(action: () => void): boolean {
    try {
      action();
    } catch (error) {
      this.#failures++;
      const pause = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** (this.#failures - 1));
      this.#pausedUntil = this.#now() + pause;
      // Once per outage: a message per step would hide everything else.
      if (this.#failures === 1)
        this.#onProblem(`${message(error)}; training goes on, records are kept and tried again`);
      return false;
    }
    if (this.#failures > 0) this.#onProblem(`${this.#target.path}: writing again, ${this.#drops} records were lost`);
    this.#failures = 0;
    return true;
  }
}

/** A file with one record, which each write replaces. */
export class InPlaceFile implements RecordSink {
  readonly drops = 0;
  readonly #path: string;
  readonly #descriptor: number;
  readonly #onProblem: (message: string) => void;
  #isFailing = false;

  constructor(path: string, descriptor: number, onProblem: (message: string) => void) {
    this.#path = path;
    this.#descriptor = descriptor;
    this.#onProblem = onProblem;
  }

  write(record: Uint8Array): void {
    try {
      writeSync(this.#descriptor, record, 0, record.length, 0);
      this.#isFailing = false;
    } catch (error) {
      if (!this.#isFailing)
        this.#onProblem(`${this.#path}: cannot write: ${explainFileError(error)}; training goes on`);
      this.#isFailing = true;
    }
  }

  flush(): boolean {
    return !this.#isFailing;
  }

  /** Also removes the file: a run that has ended is in no section. */
  close(): void {
    closeSync(this.#descriptor);
    rmSync(this.#path, { force: true });
  }
}

function message(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
