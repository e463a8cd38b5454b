/** Work that is done between events: not all at once, so that requests that arrive meanwhile get their first byte. */

/** Work of one turn of the event loop [ms]; at least one piece is done. */
const TURN_MS = 1;

export class Turns {
  readonly #waiting: (() => void)[] = [];

  /** Calls `work`, which does not throw, in one of the next turns of the event loop, in the order of the calls. */
  add(work: () => void): void {
    this.#waiting.push(work);
    if (this.#waiting.length === 1) setImmediate(() => this.#turn());
  }

  #turn(): void {
    const startedAt = performance.now();
    do this.#waiting[0]();
    while (this.#waiting.shift() && this.#waiting.length > 0 && performance.now() - startedAt < TURN_MS);
    if (this.#waiting.length > 0) setImmediate(() => this.#turn());
  }
}
