/** A text under way: the prompt, what was drawn after it, and why it ended. */
import type { LoadedModel } from './load-model.js';
import type { StopFilter } from './stop.js';

/** `separator`: the model ended its document. `context`: the context is full. */
export type FinishReason = 'separator' | 'stop' | 'length' | 'context';

type Decoder = ReturnType<LoadedModel['tokenizer']['createStreamDecoder']>;

/** One prompt and what was drawn after it. */
export class Draft {
  readonly index: number;
  /** The prompt and the text so far. */
  readonly context: number[];
  /** Its tokens, each once. */
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

  get drawn(): number {
    return this.context.length - this.#promptLength;
  }

  get tokens(): number[] {
    return this.context.slice(this.#promptLength);
  }

  /** More is said before the next text; what was drawn belongs to the context now. */
  say(tokens: readonly number[], decoder: Decoder, filter: StopFilter): void {
    for (const token of tokens) {
      this.context.push(token);
      this.seen.add(token);
    }
    this.#promptLength = this.context.length;
    this.#decoder = decoder;
    this.#filter = filter;
    this.finishReason = null;
  }

  /** Takes the next token; returns the text that is certain now. */
  add(token: number, isSeparator: boolean, maxNewTokens: number, maxContext: number): string {
    if (isSeparator) {
      this.finishReason = 'separator';
      return this.#rest();
    }
    this.context.push(token);
    this.seen.add(token);
    const { text, stopped } = this.#filter.push(this.#decoder.push(token));
    if (stopped) {
      this.finishReason = 'stop';
      return text;
    }
    if (this.drawn === maxNewTokens) this.finishReason = 'length';
    else if (this.context.length === maxContext) this.finishReason = 'context';
    return this.finishReason === null ? text : text + this.#rest();
  }

  #rest(): string {
    // A character whose last bytes were never drawn is left out rather than shown as a replacement character.
    const rest = this.#filter.push(this.#decoder.end().replace(/\uFFFD+$/, ''));
    if (!rest.stopped) return rest.text + this.#filter.end();
    this.finishReason = 'stop';
    return rest.text;
  }
}
