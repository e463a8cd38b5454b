/** Texts that a person and a model write in turns: as lines, or as the messages of a chat template. */
import { type ChatMessage, encodeChat } from '../data/chat.js';
import type { BatchEngine } from './engine/engine.js';
import { DEFAULT_MAX_CONTEXT } from './engine/request.js';
import type { KeptPages } from './engine/sequence.js';
import { advance, GeneratedText, type GenerateOptions, type Generation, ownEngine } from './generate.js';
import { type TextSource, usedVocabulary } from './load.js';
import { encodePrompt, expectInVocabulary, promptTooLong } from './prompt.js';

/** A text in turns. Its pages are kept from turn to turn, so a turn reads only its own tokens. */
export class Conversation {
  readonly #source: TextSource;
  readonly #options: GenerateOptions;
  readonly #kept: KeptPages = { pages: null };
  #engine: BatchEngine | null = null;
  #context: readonly number[] = [];
  #turns = 0;

  constructor(source: TextSource, options: GenerateOptions = {}) {
    this.#source = source;
    this.#options = options;
  }

  /** Tokens of the text so far. */
  get length(): number {
    return this.#context.length;
  }

  /** Appends `text` as a line of its own; yields the text that the model writes after it, as it becomes final. */
  async *say(text: string): AsyncGenerator<string, Generation, void> {
    const { tokenizer } = this.#source;
    if (this.length > 0) return yield* this.#append([...tokenizer.encode(`\n${text}`, { parseSpecial: true })]);
    return yield* this.#append(encodePrompt(text, tokenizer, usedVocabulary(this.#source)));
  }

  /**
   * Continues a context that is given as a whole. Only the tokens after the text so far are read, if the context begins with
   * it; otherwise the text so far is dropped.
   */
  async *continue(context: readonly number[]): AsyncGenerator<string, Generation, void> {
    const held = this.#context;
    // Even where all of it is known, one token must be read for the scores of the next.
    if (context.length > held.length && held.every((token, i) => token === context[i]))
      return yield* this.#append(context.slice(held.length));
    const { maxContext = DEFAULT_MAX_CONTEXT } = this.#options;
    if (context.length >= maxContext) throw promptTooLong(context.length, maxContext);
    this.reset();
    return yield* this.#append(context);
  }

  async *#append(tokens: readonly number[]): AsyncGenerator<string, Generation, void> {
    const { sampling, maxContext = DEFAULT_MAX_CONTEXT } = this.#options;
    expectInVocabulary(tokens, this.#source.tokenizer, usedVocabulary(this.#source));
    const prompt = [...this.#context, ...tokens];
    if (prompt.length >= maxContext) throw promptTooLong(prompt.length, maxContext);
    this.#engine ??= ownEngine(this.#source, this.#options);
    // A different seed for each turn: the same one would repeat the draws of the first turn.
    const turned = { ...this.#options, sampling: { ...sampling, seed: (sampling?.seed ?? 0) + this.#turns } };
    const written = new GeneratedText(this.#engine, prompt, turned, this.#kept);
    this.#turns += 1;
    try {
      for await (const { text } of advance(this.#engine, [written], turned)) yield text;
      return { tokens: written.tokens, finishReason: written.finishReason ?? 'length' };
    } finally {
      this.#context = [...prompt, ...written.tokens];
      if (!written.isEnded) this.#engine?.cancel();
      if (this.#engine?.failure) this.#dropEngine();
    }
  }

  /** Starts a new text. */
  reset(): void {
    void this.#dropEngine();
    this.#context = [];
  }

  /** Frees the pages at once. Resolves when the files of `prefixCacheDir` are written. */
  async free(): Promise<void> {
    this.#context = [];
    await this.#dropEngine();
  }

  #dropEngine(): Promise<void> | undefined {
    const closed = this.#engine?.close();
    this.#engine = null;
    this.#kept.pages?.free();
    this.#kept.pages = null;
    return closed;
  }
}

/** Options of a `Chat`. */
export interface ChatOptions extends GenerateOptions {
  /** The first message: how the model should behave. */
  readonly system?: string | undefined;
}

/** A conversation of messages with a chat model, through the chat template of its tokenizer. */
export class Chat {
  readonly #source: TextSource;
  readonly #talk: Conversation;
  readonly #first: readonly ChatMessage[];
  #messages: ChatMessage[];

  constructor(source: TextSource, { system, ...options }: ChatOptions = {}) {
    this.#source = source;
    this.#talk = new Conversation(source, options);
    this.#first = firstMessages(system);
    this.#messages = [...this.#first];
  }

  /** The messages so far. */
  get messages(): readonly ChatMessage[] {
    return this.#messages;
  }

  /** Tokens of the conversation so far. */
  get length(): number {
    return this.#talk.length;
  }

  /**
   * Sends a message; yields the answer as it becomes final. An answer that is cut off counts as far as it was yielded.
   *
   * The template writes the whole conversation for every turn. The cache serves as far as that begins with the tokens it
   * holds; a template that rewrites older answers (removed reasoning, trimmed space) makes the model read it all again.
   */
  async *say(content: string): AsyncGenerator<string, Generation, void> {
    const messages = [...this.#messages, { role: 'user', content }];
    const context = encodeChat(this.#source.tokenizer, messages, { addGenerationPrompt: true });
    const stream = this.#talk.continue([...context]);
    let answer = '';
    let hasBegun = false;
    try {
      for (;;) {
        const { done, value } = await stream.next();
        hasBegun = true;
        if (done) return value;
        answer += value;
        yield value;
      }
    } finally {
      // Not after an error before the first token, such as a message that is too long: it was never sent.
      if (hasBegun) this.#messages = [...messages, { role: 'assistant', content: answer }];
      await stream.return({ tokens: [], finishReason: 'aborted' });
    }
  }

  /** Forgets everything but the system message. */
  reset(): void {
    this.#talk.reset();
    this.#messages = [...this.#first];
  }

  /** As that of `Conversation`. */
  free(): Promise<void> {
    return this.#talk.free();
  }
}

/** The tokens of a conversation of one message, up to where the answer begins. */
export function encodeChatPrompt(source: TextSource, prompt: string, system?: string): readonly number[] {
  const messages = [...firstMessages(system), { role: 'user', content: prompt }];
  return [...encodeChat(source.tokenizer, messages, { addGenerationPrompt: true })];
}

function firstMessages(system: string | undefined): readonly ChatMessage[] {
  return system === undefined ? [] : [{ role: 'system', content: system }];
}
