/** A text that a person and a model write in turns. What was read stays in the cache: a turn costs what it adds. */
import { type ContextReader, contextReader } from './context-reader.js';
import { Draft } from './draft.js';
import {
  DEFAULT_MAX_CONTEXT,
  DEFAULT_NEW_TOKENS,
  encodePrompt,
  type GenerateOptions,
  type Generation,
  promptTooLong,
  type Source,
  usedVocabulary,
  writeDrafts,
} from './generate.js';
import { StopFilter } from './stop.js';

export class Conversation {
  readonly #source: Source;
  readonly #options: GenerateOptions;
  readonly #vocabulary: number;
  #reader: ContextReader | null = null;
  #draft: Draft | null = null;
  #turns = 0;

  constructor(source: Source, options: GenerateOptions = {}) {
    this.#source = source;
    this.#options = options;
    this.#vocabulary = usedVocabulary(source);
  }

  /** Tokens of the text so far. */
  get length(): number {
    return this.#draft?.context.length ?? 0;
  }

  /** Adds `text` on a line of its own; yields what the model writes after it, as it becomes certain. */
  async *say(text: string): AsyncGenerator<string, Generation, void> {
    const { model, tokenizer, config } = this.#source;
    const { maxNewTokens = DEFAULT_NEW_TOKENS, maxContext = DEFAULT_MAX_CONTEXT, sampling, stop = [] } = this.#options;
    const tokens = encodePrompt(this.#draft ? `\n${text}` : text, tokenizer, this.#vocabulary);
    if (this.length + tokens.length >= maxContext) throw promptTooLong(this.length + tokens.length, maxContext);
    const [decoder, filter] = [tokenizer.createStreamDecoder(), new StopFilter(stop)];
    if (this.#draft) this.#draft.say(tokens, decoder, filter);
    const draft = this.#draft ?? new Draft(0, tokens, decoder, filter);
    this.#draft = draft;
    this.#reader ??= contextReader(model, config, this.#vocabulary);
    // Another seed each turn: the same draws would follow each of them.
    const turned = { ...sampling, seed: (sampling?.seed ?? 0) + this.#turns };
    this.#turns += 1;
    const options = { tokenizer, vocabulary: this.#vocabulary, sampling: turned, maxNewTokens, maxContext };
    for await (const piece of writeDrafts(this.#reader, [draft], options)) yield piece.text;
    return { tokens: draft.tokens, finishReason: draft.finishReason ?? 'length' };
  }

  /** Forgets what was said. */
  reset(): void {
    this.#reader?.free();
    this.#reader = null;
    this.#draft = null;
  }

  free(): void {
    this.reset();
  }
}
