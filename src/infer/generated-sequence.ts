/** One sequence that is being generated: the prompt, the tokens drawn after it, and why it ended. */
import type { LoadedModel } from './load-model.js';
import type { StopFilter } from './stop.js';

/**
 * Why a text ended. `separator`: the model ended its document. `stop`: a stop string. `length`: `maxNewTokens`.
 * `context`: `maxContext`. `aborted`: the signal.
 */
export type FinishReason = 'separator' | 'stop' | 'length' | 'context' | 'aborted';

type Decoder = ReturnType<LoadedModel['tokenizer']['createStreamDecoder']>;

export class GeneratedSequence {
  readonly index: number;
  /** The prompt and the tokens drawn so far. */
  readonly context: number[];
  /** The distinct tokens of the context, for the repetition penalty. */
  readonly seen: Set<number>;
  finishReason: FinishReason | null = null;
  #promptLength: number;
  #decoder: Decoder;
  #filter: StopFilter;

  constructor(index: number, context: number[], decoder: Decoder, filter: StopFilter) {
    this.index = index;
    this.context = context;
    this.seen = new Set(context);
    this.#promptLength = context.length;
    this.#decoder = decoder;
    this.#filter = filter;
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
      this.seen.add(token);
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
    this.seen.add(token);
    const { text, stopped } = this.#filter.push(this.#decoder.push(token));
    if (stopped) {
      this.finishReason = 'stop';
      return text;
    }
    if (this.drawn === maxNewTokens) return text + this.finish('length');
    return this.context.length === maxContext ? text + this.finish('context') : text;
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
