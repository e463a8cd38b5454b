/**
 * Between the trainer and a log file. The trainer must neither stop nor wait because a disk is full or slow: records that
 * cannot be written now are kept in memory up to a limit and written later; what does not fit is dropped and counted.
 */

/** Where records end up: an AppendFile, or in tests something that fails on demand. */
export interface SinkTarget {
  readonly path: string;
  append(bytes: Uint8Array): void;
  sync(): void;
  close(): void;
}

export interface SinkOptions {
  /** Told in one line when writing begins to fail and when it works again. */
  onProblem?: (message: string) => void;
  /** Bytes kept in memory while the target does not take them. */
  maxPendingBytes?: number;
  /** Milliseconds that never go back. */
  now?: () => number;
}

const DEFAULT_PENDING_BYTES = 1024 * 1024;
const FIRST_PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 30_000;
/** A write that took longer than this is followed by a pause of so many times its length: at most 1/20 of the time is lost. */
const SLOW_WRITE_MS = 50;
const SLOW_PAUSE_FACTOR = 20;

export class Sink {
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

  /** Records that were given up for lack of memory or at the end. */
  get drops(): number {
    return this.#drops;
  }

  /** Whether the last attempt to write failed. */
  get failing(): boolean {
    return this.#failures > 0;
  }

  /** Takes one whole record. Never throws. */
  write(record: Uint8Array): void {
    this.#pending.push(record);
    this.#pendingBytes += record.length;
    if (this.#now() >= this.#pausedUntil) this.#drain();
    // The oldest go first: whoever looks at a run in trouble needs the newest.
    while (this.#pendingBytes > this.#maxPendingBytes) {
      this.#pendingBytes -= this.#pending.shift()!.length;
      this.#drops++;
    }
  }

  /** Writes what is kept, even during a pause, and waits for the disk. Returns whether all of it is there. Never throws. */
  flush(): boolean {
    if (!this.#drain()) return false;
    return this.#attempt(() => this.#target.sync());
  }

  /** The last attempt: what cannot be written now is dropped. Never throws. */
  close(): void {
    this.#drain();
    this.#drops += this.#pending.length;
    this.#pending = [];
    this.#pendingBytes = 0;
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
    const started = this.#now();
    try {
      action();
    } catch (error) {
      this.#failures++;
      const pause = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** (this.#failures - 1));
      this.#pausedUntil = this.#now() + pause;
      // Once per outage: a message per step would bury everything else.
      if (this.#failures === 1)
        this.#onProblem(`${message(error)}; training goes on, records are kept and tried again`);
      return false;
    }
    const took = this.#now() - started;
    if (took > SLOW_WRITE_MS) this.#pausedUntil = this.#now() + took * SLOW_PAUSE_FACTOR;
    if (this.#failures > 0) this.#onProblem(`${this.#target.path}: writing again, ${this.#drops} records were lost`);
    this.#failures = 0;
    return true;
  }
}

function message(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
