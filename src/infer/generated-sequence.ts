/** One sequence that is being generated: the prompt, the tokens drawn after it, why it ended, and its stop strings. */
import type { LoadedModel } from './load-model.js';

/**
 * Why a text ended. `separator`: the model ended its document. `stop`: a stop string, or the end of a structured text.
 * `length`: `maxNewTokens`. `context`: `maxContext`. `aborted`: the signal.
 */
export type FinishReason = 'separator' | 'stop' | 'length' | 'context' | 'aborted';

type Decoder = ReturnType<LoadedModel['tokenizer']['createStreamDecoder']>;

export class GeneratedSequence {
  readonly index: number;
  /** The prompt and the tokens drawn so far. */
  readonly context: number[];
  /** The distinct tokens of the context, for the repetition penalty; collected when first read. */
  readonly seen: Iterable<number> = { [Symbol.iterator]: () => this.#distinct() };
  finishReason: FinishReason | null = null;
  #seen: Set<number> | null = null;
  #promptLength: number;
  #decoder: Decoder;
  #filter: StopFilter;

  constructor(index: number, context: number[], decoder: Decoder, filter: StopFilter) {
    this.index = index;
    this.context = context;
    this.#promptLength = context.length;
    this.#decoder = decoder;
    this.#filter = filter;
  }

  #distinct(): Iterator<number> {
    this.#seen ??= new Set(this.context);
    return this.#seen.values();
  }

  /** Number of tokens drawn. */
  get drawn(): number {
    return this.context.length - this.#promptLength;
  }

  /** Tokens drawn. */
  get tokens(): number[] {
    return this.context.slice(this.#promptLength);
  }

  /** Appends a further prompt; what was drawn so far becomes part of the context. */
  continueWith(tokens: readonly number[], decoder: Decoder, filter: StopFilter): void {
    for (const token of tokens) {
      this.context.push(token);
      this.#seen?.add(token);
    }
    this.#promptLength = this.context.length;
    this.#decoder = decoder;
    this.#filter = filter;
    this.finishReason = null;
  }

  /** Adds the next token; returns the text that is final now. */
  add(token: number, isEnd: boolean, maxNewTokens: number, maxContext: number): string {
    if (isEnd) return this.finish('separator');
    this.context.push(token);
    this.#seen?.add(token);
    const { text, stopped } = this.#filter.push(this.#decoder.push(token));
    if (stopped) {
      this.finishReason = 'stop';
      return text;
    }
    if (this.drawn === maxNewTokens) return text + this.finish('length');
    return this.context.length === maxContext ? text + this.finish('context') : text;
  }

  /** The last token completed a structured text, which was shortened to fit if `isCut`; returns the text held back. */
  complete(isCut: boolean): string {
    const text = this.finishReason === null ? this.finish('stop') : '';
    this.finishReason = isCut ? 'length' : 'stop';
    return text;
  }

  /** Ends the sequence; returns the text that was held back. */
  finish(reason: FinishReason): string {
    this.finishReason = reason;
    // A character whose last bytes were never drawn is omitted instead of shown as a replacement character.
    const rest = this.#filter.push(this.#decoder.end().replace(/\uFFFD+$/, ''));
    if (!rest.stopped) return rest.text + this.#filter.end();
    this.finishReason = 'stop';
    return rest.text;
  }
}

/** Text of a stream after the stop filter. */
export interface StopPiece {
  /** Text that is final: no stop string begins in it. */
  readonly text: string;
  readonly stopped: boolean;
}

/** Ends a stream of text at the first stop string, wherever pieces split it: a possible beginning is held back. */
export class StopFilter {
  readonly #stops: readonly string[];
  #held = '';

  constructor(stops: readonly string[]) {
    this.#stops = stops;
  }

  push(piece: string): StopPiece {
    if (this.#stops.length === 0) return { text: piece, stopped: false };
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
