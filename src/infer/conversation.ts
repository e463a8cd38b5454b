/** A text that a person and a model write in turns. The cache is kept, so a turn costs only its own tokens. */
import { type ContextReader, contextReader } from './decode.js';
import {
  DEFAULT_MAX_CONTEXT,
  DEFAULT_NEW_TOKENS,
  encodePrompt,
  expectInVocabulary,
  extend,
  GeneratedSequence,
  type GenerateOptions,
  type Generation,
  promptTooLong,
  StopFilter,
  type TextSource,
  usedVocabulary,
} from './generate.js';

export class Conversation {
  readonly #source: TextSource;
  readonly #options: GenerateOptions;
  readonly #vocabulary: number;
  #reader: ContextReader | null = null;
  #sequence: GeneratedSequence | null = null;
  #turns = 0;

  constructor(source: TextSource, options: GenerateOptions = {}) {
    this.#source = source;
    this.#options = options;
    this.#vocabulary = usedVocabulary(source);
  }

  /** Tokens of the text so far. */
  get length(): number {
    return this.#sequence?.context.length ?? 0;
  }

  /** Appends `text` as a line of its own; yields the text that the model writes after it, as it becomes final. */
  async *say(text: string): AsyncGenerator<string, Generation, void> {
    const { tokenizer } = this.#source;
    if (this.#sequence) return yield* this.#append([...tokenizer.encode(`\n${text}`, { parseSpecial: true })]);
    return yield* this.#append(encodePrompt(text, tokenizer, this.#vocabulary));
  }

  /**
   * Continues a context that is given as a whole. Only the tokens after the text so far are read, if the context begins with
   * it; otherwise the text so far is dropped.
   */
  async *continue(context: readonly number[]): AsyncGenerator<string, Generation, void> {
    const held = this.#sequence?.context ?? [];
    // Even where all of it is known, one token must be read for the scores of the next.
    if (context.length > held.length && held.every((token, i) => token === context[i]))
      return yield* this.#append(context.slice(held.length));
    const { maxContext = DEFAULT_MAX_CONTEXT } = this.#options;
    if (context.length >= maxContext) throw promptTooLong(context.length, maxContext);
    this.reset();
    return yield* this.#append(context);
  }

  async *#append(tokens: readonly number[]): AsyncGenerator<string, Generation, void> {
    const { model, tokenizer, config, endTokens = [] } = this.#source;
    const {
      maxNewTokens = DEFAULT_NEW_TOKENS,
      maxContext = DEFAULT_MAX_CONTEXT,
      sampling,
      stop = [],
      signal,
    } = this.#options;
    expectInVocabulary(tokens, tokenizer, this.#vocabulary);
    if (this.length + tokens.length >= maxContext) throw promptTooLong(this.length + tokens.length, maxContext);
    const [decoder, filter] = [tokenizer.createStreamDecoder(), new StopFilter(stop)];
    if (this.#sequence) this.#sequence.continueWith(tokens, decoder, filter);
    const sequence = this.#sequence ?? new GeneratedSequence(0, [...tokens], decoder, filter);
    this.#sequence = sequence;
    this.#reader ??= contextReader(model, config, this.#vocabulary);
    // A different seed for each turn: the same one would repeat the draws of the first turn.
    const turned = { ...sampling, seed: (sampling?.seed ?? 0) + this.#turns };
    this.#turns += 1;
    const limits = { maxNewTokens, maxContext, signal };
    const options = { tokenizer, endTokens, vocabulary: this.#vocabulary, sampling: turned, ...limits };
    for await (const piece of extend(this.#reader, [sequence], options)) yield piece.text;
    return { tokens: sequence.tokens, finishReason: sequence.finishReason ?? 'length' };
  }

  /** Starts a new text. */
  reset(): void {
    this.#reader?.free();
    this.#reader = null;
    this.#sequence = null;
  }

  free(): void {
    this.reset();
  }
}
