/** Ends a stream of text at the first stop string, however the pieces cut it: what may become one is held back. */

export interface StopPiece {
  /** Text that is certain: no stop string begins in it. */
  readonly text: string;
  readonly stopped: boolean;
}

export class StopFilter {
  readonly #stops: readonly string[];
  #held = '';

  constructor(stops: readonly string[]) {
    this.#stops = stops;
  }

  push(piece: string): StopPiece {
    const text = this.#held + piece;
    const cut = this.#cut(text);
    if (cut !== null) {
      this.#held = '';
      return { text: text.slice(0, cut), stopped: true };
    }
    const certain = text.length - this.#unsettled(text);
    this.#held = text.slice(certain);
    return { text: text.slice(0, certain), stopped: false };
  }

  /** What was held back, when nothing more comes. */
  end(): string {
    const held = this.#held;
    this.#held = '';
    return held;
  }

  /** Where the stop string begins that is complete first: so the result does not depend on how the text was cut. */
  #cut(text: string): number | null {
    let first: { begin: number; end: number } | null = null;
    for (const stop of this.#stops) {
      const begin = text.indexOf(stop);
      if (begin < 0) continue;
      const end = begin + stop.length;
      if (first === null || end < first.end || (end === first.end && begin < first.begin)) first = { begin, end };
    }
    return first?.begin ?? null;
  }

  /** Length of the longest end of `text` that begins a stop string. */
  #unsettled(text: string): number {
    const longest = Math.max(0, ...this.#stops.map((stop) => stop.length - 1));
    for (let length = Math.min(longest, text.length); length > 0; length--)
      if (this.#stops.some((stop) => stop.startsWith(text.slice(-length)))) return length;
    return 0;
  }
}
