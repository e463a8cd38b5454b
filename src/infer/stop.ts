/** Ends a stream of text at the first stop string, wherever pieces split it: a possible beginning is held back. */

export interface StopPiece {
  /** Text that is final: no stop string begins in it. */
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
    const final = text.length - this.#possibleStart(text);
    this.#held = text.slice(final);
    return { text: text.slice(0, final), stopped: false };
  }

  /** The text held back, when the stream has ended. */
  end(): string {
    const held = this.#held;
    this.#held = '';
    return held;
  }

  /** Start of the stop string that completes first, so that the result does not depend on how the text was split. */
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

  /** Length of the longest suffix of `text` that is a prefix of a stop string. */
  #possibleStart(text: string): number {
    const longest = Math.max(0, ...this.#stops.map((stop) => stop.length - 1));
    for (let length = Math.min(longest, text.length); length > 0; length--)
      if (this.#stops.some((stop) => stop.startsWith(text.slice(-length)))) return length;
    return 0;
  }
}
