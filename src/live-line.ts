/** A progress line: rewritten in place on a terminal; elsewhere printed at intervals, or not at all. */

/** The part of a stream that a live line needs; process.stderr is one. */
export interface Terminal {
  /** Writes text as it is, without a line end. */
  write(text: string): unknown;
  readonly isTTY?: boolean;
  readonly columns?: number;
}

/** Width of terminals that do not report theirs, or report 0. */
const DEFAULT_COLUMNS = 80;

export class LiveLine {
  readonly #stream: Terminal | null;
  readonly #everyMs: number;
  readonly #clock: () => number;
  #printed: number;
  #shown = false;

  /** Without a terminal, a line is printed at most every `everyMs`; the first one after that time, or at once (`isEager`). */
  constructor(
    stream: Terminal | null,
    { everyMs = Number.POSITIVE_INFINITY, isEager = false, clock = () => performance.now() } = {},
  ) {
    this.#stream = stream;
    this.#everyMs = everyMs;
    this.#clock = clock;
    this.#printed = isEager ? Number.NEGATIVE_INFINITY : clock();
  }

  /** Whether the stream is a terminal. */
  get isLive(): boolean {
    return this.#stream?.isTTY === true;
  }

  show(text: string): void {
    if (this.isLive) {
      const columns = this.#stream!.columns || DEFAULT_COLUMNS;
      this.#stream!.write(`\r\x1b[K${text.slice(0, columns - 1)}`);
      this.#shown = true;
    } else if (this.#stream && this.#clock() - this.#printed >= this.#everyMs) {
      this.#printed = this.#clock();
      this.#stream.write(`${text}\n`);
    }
  }

  /** Removes the line before something else is printed. */
  clear(): void {
    if (this.#shown) this.#stream!.write('\r\x1b[K');
    this.#shown = false;
  }
}
