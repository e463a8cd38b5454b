/** One text that the engine writes: its tokens and what is sent about them, its pages, and why it ended. */
import type { Tokenizer } from '../../data/tokenizer.js';
import type { CachedSequence } from '../../model/cache.js';
import type { PromptLookup } from './drafts.js';
import type { EventSink } from './interface.js';
import type { PrefixKeys } from './prefix/keys.js';
import type { CheckedRequest, FinishReason, PositionLogprobs, TokenLogprob, TokenMask } from './request.js';
import { UnusableLogits } from './sampler.js';

/** The same for all texts of an engine. */
export interface SequenceLimits {
  /** Tokens below it can be drawn. */
  readonly vocabulary: number;
  readonly endTokens: readonly number[];
  readonly maxContext: number;
}

/** Pages that outlive a request: the next request continues them. The holder frees them. */
export interface KeptPages {
  pages: CachedSequence | null;
}

export interface SequenceOptions {
  readonly request: CheckedRequest;
  readonly limits: SequenceLimits;
  readonly sink: EventSink;
  readonly decoder: ReturnType<Tokenizer['createStreamDecoder']>;
  /** Bytes of pages that its longest possible text needs. */
  readonly reserved: number;
  readonly kept: KeptPages | null;
}

export class Sequence {
  readonly request: CheckedRequest;
  readonly reserved: number;
  readonly kept: KeptPages | null;
  /** The prompt and the tokens drawn so far. */
  readonly context: number[];
  /** The keys and values read so far; null while it waits and after its end. */
  pages: CachedSequence | null = null;
  /** Keys of its prefixes in the prefix cache; null while it waits, and without such a cache. */
  keys: PrefixKeys | null = null;
  /** Guesses tokens, if the engine speculates. */
  drafts: PromptLookup | null = null;
  /** Tokens of the prompt that were not read because their pages were there. */
  cachedTokens = 0;
  isCancelled = false;
  /** While the beginning of the prompt is read from files. */
  isLoading = false;
  /** Whether the logits after the prompt, which no file has yet, are to be stored. */
  storesLogits = false;
  readonly #limits: SequenceLimits;
  readonly #sink: EventSink;
  readonly #decoder: SequenceOptions['decoder'];
  readonly #stops: StopFilter;
  readonly #promptLogprobs: PositionLogprobs[] = [];
  readonly #submittedAt = performance.now();
  #startedAt = 0;
  #readAt = 0;
  #mask: TokenMask | null = null;
  #seen: Set<number> | null = null;
  /** How often each token was drawn; null if no penalty counts them. */
  readonly #counts: Map<number, number> | null;
  #finishReason: FinishReason | null = null;

  constructor({ request, limits, sink, decoder, reserved, kept }: SequenceOptions) {
    this.request = request;
    this.reserved = reserved;
    this.kept = kept;
    this.context = plainArray(request.prompt);
    this.#limits = limits;
    this.#sink = sink;
    this.#decoder = decoder;
    this.#stops = new StopFilter(request.stop);
    this.#counts = request.countsTokens ? new Map() : null;
  }

  /** Number of tokens drawn. */
  get drawn(): number {
    return this.context.length - this.request.prompt.length;
  }

  /** Whether the prompt is read, or what follows it is known. */
  get isWriting(): boolean {
    return this.#readAt > 0;
  }

  /** Whether there may be a token after the one that is being computed. */
  get hasNext(): boolean {
    const { drawn, context, request } = this;
    return drawn + 1 < request.maxNewTokens && context.length + 1 < this.#limits.maxContext;
  }

  /** Whether `token` is followed by another one; a stop string may still end the text. */
  goesOnAfter(token: number): boolean {
    return this.hasNext && !this.#isEnd(token);
  }

  /** Whether the next token depends on more than a device's draw: a mask, a minimum, or log-probabilities are wanted. */
  get needsLogits(): boolean {
    const { draws, logprobs, minNewTokens } = this.request;
    return draws === null || logprobs !== null || this.#mask !== null || this.drawn < minNewTokens;
  }

  /** Creates the mask, which is the caller's function and may throw. */
  prepare(): void {
    this.#mask = this.request.mask?.() ?? null;
  }

  /** Begins with `pages`, which hold the beginning of the prompt. */
  start(pages: CachedSequence): void {
    this.#startedAt = performance.now();
    this.continueFrom(pages);
    if (this.cachedTokens > 0) this.progress();
  }

  /** Takes pages that hold more of the prompt, before any was read. */
  continueFrom(pages: CachedSequence): void {
    this.pages?.free();
    this.pages = pages;
    this.cachedTokens = pages.length;
  }

  /** Sends how much of the prompt is read. */
  progress(processed = this.pages?.length ?? 0): void {
    this.#sink.push({ type: 'progress', total: this.request.prompt.length, cached: this.cachedTokens, processed });
  }

  /** Adds log-probabilities of the prompt: row `i` of `logits` follows token `first + i`. */
  addPromptLogprobs(first: number, logits: readonly Float32Array[]): void {
    const { prompt, promptLogprobs } = this.request;
    for (const [i, row] of logits.entries()) {
      const next = prompt[first + i + 1];
      if (next !== undefined)
        this.#promptLogprobs.push(positionLogprobs(row, next, promptLogprobs ?? 0, this.#limits.vocabulary));
    }
  }

  /** The prompt is read, or what follows it is known. A request of no tokens ends here. */
  endPrompt(): void {
    this.#readAt = performance.now();
    this.progress(this.request.prompt.length);
    this.#sink.push({ type: 'prompt', logprobs: this.#promptLogprobs });
    if (this.request.maxNewTokens === 0) this.end('length');
  }

  /** The answer begins with the logits after the prompt, before its pages are there. */
  beginWith(logits: Float32Array): void {
    this.storesLogits = false;
    this.cachedTokens = this.request.prompt.length;
    this.endPrompt();
    if (this.pages) this.draw([logits]);
  }

  /** Draws a token from each row of `logits` while `guesses` are what was drawn; returns how many were. */
  draw(logits: readonly Float32Array[], guesses: readonly number[] = []): number {
    let right = 0;
    try {
      for (const row of logits) {
        this.#drawOne(row);
        if (this.pages === null || right === guesses.length || this.context.at(-1) !== guesses[right]) break;
        right += 1;
      }
    } catch (error) {
      this.release(error); // logits that are not finite end their request, not the engine
    }
    return right;
  }

  /** Takes the token that the device has drawn; negative where a logit is not finite. */
  take(token: number): void {
    if (token >= 0) this.#accept(token, null);
    else this.release(new UnusableLogits(`a logit of token ${this.context.length} is not finite`));
  }

  #drawOne(logits: Float32Array): void {
    const { request, drawn } = this;
    const { vocabulary, endTokens } = this.#limits;
    const mask = this.#mask;
    const isEarly = drawn < request.minNewTokens && !mask?.isConstrained;
    let candidates = logits.subarray(0, vocabulary);
    if (mask || isEarly) {
      candidates = candidates.slice();
      mask?.apply(candidates);
      if (isEarly) for (const token of endTokens) candidates[token] = Number.NEGATIVE_INFINITY;
    }
    const sample = () => request.sample(candidates, drawn, this.#distinct, this.#counts ?? undefined);
    let token = sample();
    if (mask?.narrow?.(token, candidates)) token = sample();
    this.#accept(token, logits);
  }

  /** The next token is `token`. */
  #accept(token: number, logits: Float32Array | null): void {
    const mask = this.#mask;
    mask?.accept(token);
    const isEnd = this.#isEnd(token);
    let text = isEnd ? this.#finish('separator') : this.#append(token);
    if (mask?.isComplete || (isEnd && mask?.isCut)) {
      if (this.#finishReason === null) text += this.#finish('stop');
      this.#finishReason = mask.isCut ? 'length' : 'stop';
    }
    if (isEnd) {
      this.#sendEnd(text);
      return;
    }
    const { logprobs: count } = this.request;
    const { vocabulary } = this.#limits;
    const logprobs =
      count === null || logits === null ? {} : { logprobs: positionLogprobs(logits, token, count, vocabulary) };
    this.#sink.push({ type: 'token', token, text, ...logprobs });
    if (this.#finishReason !== null) this.#sendEnd('');
  }

  #isEnd(token: number): boolean {
    return !this.request.ignoreSeparator && this.#limits.endTokens.includes(token);
  }

  /** Adds a token to the text; returns the text that is final now. */
  #append(token: number): string {
    this.context.push(token);
    this.#seen?.add(token);
    this.#counts?.set(token, 1 + (this.#counts.get(token) ?? 0));
    const piece = this.#decoder.push(token);
    const { text, stopped } = this.#mask?.isConstrained
      ? { text: this.#stops.end() + piece, stopped: false }
      : this.#stops.push(piece);
    if (stopped) {
      this.#finishReason = 'stop';
      return text;
    }
    if (this.drawn === this.request.maxNewTokens) return text + this.#finish('length');
    return this.context.length === this.#limits.maxContext ? text + this.#finish('context') : text;
  }

  /** Sets why the text ended; returns the text that was held back. */
  #finish(reason: FinishReason): string {
    this.#finishReason = reason;
    // A character whose last bytes were never drawn is omitted instead of shown as a replacement character.
    const rest = this.#stops.push(this.#decoder.end().replace(/\uFFFD+$/, ''));
    if (!rest.stopped) return rest.text + this.#stops.end();
    this.#finishReason = 'stop';
    return rest.text;
  }

  /** Ends the text. */
  end(reason: FinishReason): void {
    this.#sendEnd(this.#finish(reason));
  }

  #sendEnd(text: string): void {
    const now = performance.now();
    const startedAt = this.#startedAt || now;
    const readAt = this.#readAt || now;
    const usage = {
      promptTokens: this.request.prompt.length,
      cachedTokens: this.cachedTokens,
      newTokens: this.drawn,
      queueSeconds: (startedAt - this.#submittedAt) / 1000,
      prefillSeconds: (readAt - startedAt) / 1000,
      decodeSeconds: (now - readAt) / 1000,
    };
    const { matched } = this.#stops;
    const stop = matched === null ? {} : { stop: matched };
    this.#sink.push({ type: 'end', text, finishReason: this.#finishReason ?? 'aborted', ...stop, usage });
    this.release();
  }

  /** Gives the pages back. No event follows; with an error the request has failed. */
  release(error: unknown = null): void {
    const { pages, kept } = this;
    this.pages = null;
    if (pages && kept) {
      // Guesses that were not drawn are taken back. A step that was launched ahead has read what was drawn.
      pages.truncate(Math.max(pages.settled, Math.min(pages.length, this.context.length - 1)));
      kept.pages = pages;
    } else pages?.free();
    this.#sink.end(error);
  }

  /** The distinct tokens of the context, for the repetition penalty; collected when first read. */
  readonly #distinct: Iterable<number> = {
    [Symbol.iterator]: () => {
      this.#seen ??= new Set(this.context);
      return this.#seen.values();
    },
  };
}

/** Text of a stream after the stop filter. */
export interface StopPiece {
  /** Text that is final: no stop string begins in it. */
  readonly text: string;
  readonly stopped: boolean;
}

/** Ends a stream of text at the first stop string, wherever pieces split it: a possible beginning is held back. */
export class StopFilter {
  readonly #stops: readonly StopString[];
  /** The stop string that was found. */
  matched: string | null = null;
  /** Text that may be the beginning of a stop string: as many characters as the longest match has. */
  #held = '';

  constructor(stops: readonly string[]) {
    this.#stops = stops.map((stop) => new StopString(stop));
  }

  push(piece: string): StopPiece {
    if (this.#stops.length === 0) return { text: piece, stopped: false };
    const text = this.#held + piece;
    let held = this.#held.length;
    for (let at = this.#held.length; at < text.length; at++) {
      held = 0;
      let longest = 0;
      for (const stop of this.#stops) {
        const length = stop.push(text[at]);
        if (length > held) held = length;
        if (!stop.isComplete || length <= longest) continue;
        longest = length;
        this.matched = stop.text;
      }
      if (longest === 0) continue;
      this.end();
      return { text: text.slice(0, at + 1 - longest), stopped: true };
    }
    this.#held = text.slice(text.length - held);
    return { text: text.slice(0, text.length - held), stopped: false };
  }

  /** The text held back, when the stream has ended. */
  end(): string {
    const held = this.#held;
    this.#held = '';
    for (const stop of this.#stops) stop.reset();
    return held;
  }
}

/** How much of a stop string the last characters are (Knuth, Morris and Pratt): a character takes constant time in the mean. */
class StopString {
  readonly text: string;
  /** For each length of a match: that of the longest shorter one that ends at the same place. */
  readonly #shorter: Int32Array;
  #length = 0;

  constructor(text: string) {
    this.text = text;
    this.#shorter = new Int32Array(text.length + 1);
    for (let length = 2, match = 0; length <= text.length; length++) {
      while (match > 0 && text[match] !== text[length - 1]) match = this.#shorter[match];
      if (text[match] === text[length - 1]) match += 1;
      this.#shorter[length] = match;
    }
  }

  get isComplete(): boolean {
    return this.#length === this.text.length;
  }

  reset(): void {
    this.#length = 0;
  }

  /** The number of characters that match after this one. */
  push(character: string): number {
    if (this.isComplete) this.#length = this.#shorter[this.#length];
    while (this.#length > 0 && this.text[this.#length] !== character) this.#length = this.#shorter[this.#length];
    if (this.text[this.#length] === character) this.#length += 1;
    return this.#length;
  }
}

/**
 * The log-probability of `token` and the `count` most probable tokens of the first `vocabulary`. The sum runs over all
 * logits, as the loss does, in float64.
 */
export function positionLogprobs(
  logits: Float32Array,
  token: number,
  count: number,
  vocabulary: number,
): PositionLogprobs {
  const normalizer = logSumExp(logits);
  const entry = (id: number): TokenLogprob => ({ token: id, logprob: logits[id] - normalizer });
  return { ...entry(token), top: largest(logits.subarray(0, vocabulary), count).map(entry) };
}

function logSumExp(logits: Float32Array): number {
  let most = Number.NEGATIVE_INFINITY;
  for (const logit of logits) if (logit > most) most = logit;
  let sum = 0;
  for (const logit of logits) sum += Math.exp(logit - most);
  return most + Math.log(sum);
}

/** Indices of the `count` largest logits, largest first, the lower index first among equals. */
function largest(logits: Float32Array, count: number): number[] {
  const best: number[] = [];
  if (count === 0) return best;
  for (let token = 0; token < logits.length; token++) {
    if (best.length === count && logits[token] <= logits[best[count - 1]]) continue;
    let at = best.length;
    while (at > 0 && logits[token] > logits[best[at - 1]]) at -= 1;
    best.splice(at, 0, token);
    if (best.length > count) best.pop();
  }
  return best;
}

/** Several times as fast as `Array.from` of a typed array. */
export function plainArray(values: ArrayLike<number>): number[] {
  const result = new Array<number>(values.length);
  for (let i = 0; i < values.length; i++) result[i] = values[i];
  return result;
}
