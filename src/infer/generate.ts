/**
 * Text generation, token by token, on the decode cache; on a GPU each token is one replay of a CUDA graph. With the
 * reference kernels every token runs the model over the whole context again, which is the slow reference of the decode
 * path. Positions are absolute and the context is never truncated.
 */
import { setImmediate } from 'node:timers/promises';
import { UsageError } from '../errors.js';
import { type ContextReader, contextReader } from './decode.js';
import type { TokenMask } from './engine/request.js';
import type { LoadedModel } from './load-model.js';
import { createSampler, deviceDraws, type SamplingOptions } from './sampler.js';
import { type ResponseFormat, StructuredOutput } from './structured/structured-output.js';

/** Options of `generate` and `generateAll`. */
export interface GenerateOptions {
  /** Default 128. */
  readonly maxNewTokens?: number;
  /** Maximum tokens in the context, prompt included. Default 32,768. */
  readonly maxContext?: number;
  /** How tokens are drawn. Default: temperature 1 from the whole vocabulary. */
  readonly sampling?: SamplingOptions;
  /** Strings that end the text. They are not part of it. */
  readonly stop?: readonly string[];
  /**
   * The form of the text: any JSON object, or a document of a JSON schema. The text is always a whole document within
   * `maxNewTokens`. Not together with `stop`.
   */
  readonly responseFormat?: ResponseFormat;
  /** An AbortSignal: once aborted, generation ends before the next token with the finish reason `aborted`. */
  readonly signal?: { readonly aborted: boolean };
}

/**
 * Why a text ended. `separator`: the model ended its document. `stop`: a stop string, or the end of a structured text.
 * `length`: `maxNewTokens`. `context`: `maxContext`. `aborted`: the signal.
 */
export type FinishReason = 'separator' | 'stop' | 'length' | 'context' | 'aborted';

/** The result of one prompt. */
export interface Generation {
  /** The drawn tokens, without the one that ended the text. */
  readonly tokens: readonly number[];
  readonly finishReason: FinishReason;
}

/** Memory and time per token grow with the context; a longer one must be requested. */
export const DEFAULT_MAX_CONTEXT = 32_768;

export const DEFAULT_NEW_TOKENS = 128;

/** A piece of the text of prompt `index`. */
export interface TextPiece {
  readonly index: number;
  readonly text: string;
}

/** A model with its tokenizer and config, as `loadModel` returns them. */
export type TextSource = Pick<LoadedModel, 'model' | 'tokenizer' | 'config'> & Partial<Pick<LoadedModel, 'endTokens'>>;

/** Yields pieces of text as they become final; returns the tokens and why the text ended. */
export async function* generate(
  source: TextSource,
  prompt: string | readonly number[],
  options: GenerateOptions = {},
): AsyncGenerator<string, Generation, void> {
  const stream = generateAll(source, [prompt], options);
  try {
    for (;;) {
      const { done, value } = await stream.next();
      if (done) return value[0];
      yield value.text;
    }
  } finally {
    await stream.return([]);
  }
}

/** Generates for several prompts, texts or token ids, as one batch. Each gets the text it would get alone. */
export async function* generateAll(
  { model, tokenizer, config, endTokens = [] }: TextSource,
  prompts: readonly (string | readonly number[])[],
  options: GenerateOptions = {},
): AsyncGenerator<TextPiece, Generation[], void> {
  const { maxNewTokens = DEFAULT_NEW_TOKENS, maxContext = DEFAULT_MAX_CONTEXT, sampling, stop = [], signal } = options;
  expectPositiveInteger('max-new-tokens', maxNewTokens);
  expectPositiveInteger('max-context', maxContext);
  if (stop.includes('')) throw new UsageError('stop: an empty text would stop at once; give at least one character');
  const vocabulary = usedVocabulary({ model, tokenizer });
  const sequences = prompts.map((prompt, index) => {
    const context = encodePrompt(prompt, tokenizer, vocabulary);
    if (context.length >= maxContext) throw promptTooLong(context.length, maxContext);
    return new GeneratedSequence(index, context, tokenizer.createStreamDecoder(), new StopFilter(stop));
  });
  const { responseFormat } = options;
  if (responseFormat && stop.length > 0) throw new UsageError('stop: not supported together with responseFormat');
  const ends = [...(tokenizer.endTokens ?? [tokenizer.separator]), ...endTokens];
  const structured = new StructuredOutput(tokenizer, vocabulary, ends);
  const masks = responseFormat
    ? sequences.map(({ context }) =>
        structured.mask(responseFormat, Math.min(maxNewTokens, maxContext - context.length)),
      )
    : [];
  const reader = contextReader(model, config, vocabulary);
  const limits = { maxNewTokens, maxContext, signal };
  try {
    yield* extend(reader, sequences, {
      tokenizer,
      endTokens,
      vocabulary,
      sampling,
      masks,
      endsForGood: true,
      ...limits,
    });
  } finally {
    reader.free();
  }
  return sequences.map(({ tokens, finishReason }) => ({ tokens, finishReason: finishReason ?? 'length' }));
}

/** Number of tokens that may be drawn: rows that pad the embedding are not tokens. */
export function usedVocabulary({ model, tokenizer }: Pick<LoadedModel, 'model' | 'tokenizer'>): number {
  return Math.min(model.shape.vocabSize, tokenizer.vocabSize);
}

export interface ExtendOptions {
  readonly signal?: GenerateOptions['signal'] | undefined;
  readonly tokenizer: LoadedModel['tokenizer'];
  /** Tokens that end a text, besides the separator. */
  readonly endTokens?: readonly number[];
  readonly vocabulary: number;
  readonly sampling?: SamplingOptions | undefined;
  /** By the index of the sequence. */
  readonly masks?: readonly TokenMask[];
  readonly maxNewTokens: number;
  readonly maxContext: number;
  /** A sequence that has finished is not continued. Then a GPU computes the step after a token before the host has it. */
  readonly endsForGood?: boolean;
}

/** Draws tokens for all sequences until each is finished. */
export async function* extend(
  reader: ContextReader,
  sequences: readonly GeneratedSequence[],
  options: ExtendOptions,
): AsyncGenerator<TextPiece, void, void> {
  const { tokenizer, endTokens = [], vocabulary, sampling, masks = [], maxNewTokens, maxContext, signal } = options;
  const sample = createSampler(sampling);
  const ends = new Set([...(tokenizer.endTokens ?? [tokenizer.separator]), ...endTokens]);
  const draws = masks.length === 0 ? deviceDraws(sampling) : null;
  for (let active = sequences; active.length > 0; active = active.filter(({ finishReason }) => finishReason === null)) {
    if (signal?.aborted) {
      for (const sequence of active) {
        const text = sequence.finish('aborted');
        if (text !== '') yield { index: sequence.index, text };
      }
      return;
    }
    const settings = draws?.isArgmax === false ? active.flatMap(({ drawn }) => draws.settings(drawn)) : null;
    const hasNext = active.every(({ drawn, context }) => drawn + 1 < maxNewTokens && context.length + 1 < maxContext);
    const scores = reader.next(
      active.map(({ context }) => context),
      settings && Float64Array.from(settings),
      options.endsForGood && draws?.isArgmax && hasNext,
    );
    const chosen = draws ? (scores.chosen?.() ?? null) : null;
    // The sampler draws what rounding could decide, and reports what is wrong with logits that are not finite.
    const logits = chosen?.every((token) => token >= 0) ? null : scores.logits();
    for (const [i, sequence] of active.entries()) {
      const mask = masks[sequence.index];
      const candidates = logits?.[i].subarray(0, vocabulary);
      if (candidates) mask?.apply(candidates);
      let token = candidates ? sample(candidates, sequence.drawn, sequence.seen) : (chosen?.[i] ?? -1);
      if (candidates && mask?.narrow?.(token, candidates)) token = sample(candidates, sequence.drawn, sequence.seen);
      mask?.accept(token);
      let text = sequence.add(token, ends.has(token), maxNewTokens, maxContext);
      if (mask?.isComplete || (ends.has(token) && mask?.isCut)) text += sequence.complete(mask.isCut ?? false);
      if (text !== '') yield { index: sequence.index, text };
    }
    await setImmediate(); // the model blocks the event loop: let output and signals through
  }
}

export function promptTooLong(length: number, maxContext: number): UsageError {
  return new UsageError(
    `the prompt has ${length} tokens and max-context is ${maxContext}: shorten the prompt, or raise maxContext (--max-context)`,
  );
}

export function encodePrompt(
  prompt: string | readonly number[],
  tokenizer: LoadedModel['tokenizer'],
  vocabulary: number,
): number[] {
  if (typeof prompt !== 'string') {
    if (prompt.length === 0) throw new UsageError('a prompt has no tokens; give at least one');
    expectInVocabulary(prompt, tokenizer, vocabulary);
    return [...prompt];
  }
  const { separator, documentStart = [] } = tokenizer;
  // A document begins after a separator, so an empty prompt starts there.
  const start = prompt === '' && documentStart.length === 0 ? [separator] : documentStart;
  const ids = [...start, ...tokenizer.encode(prompt, { parseSpecial: true })];
  expectInVocabulary(
    ids,
    tokenizer,
    vocabulary,
    prompt === '' ? 'the separator, which replaces an empty prompt,' : undefined,
  );
  return ids;
}

/** Refuses tokens that the model does not have. */
export function expectInVocabulary(
  ids: readonly number[],
  tokenizer: LoadedModel['tokenizer'],
  vocabulary: number,
  where = 'the prompt',
): void {
  const unknown = ids.find((id) => id >= vocabulary);
  if (unknown === undefined) return;
  throw new UsageError(
    `${where} holds token ${unknown} of tokenizer ${tokenizer.name}, but the model has ${vocabulary} tokens: ` +
      'it was trained on synthetic tokens or another vocabulary and cannot continue this text',
  );
}

function expectPositiveInteger(name: string, value: number): void {
  if (!Number.isSafeInteger(value) || value < 1)
    throw new UsageError(`${name}: ${value} is not allowed; use an integer of at least 1`);
}

type Decoder = ReturnType<LoadedModel['tokenizer']['createStreamDecoder']>;

/** One sequence that is being generated: the prompt, the tokens drawn after it, why it ended, and its stop strings. */
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
