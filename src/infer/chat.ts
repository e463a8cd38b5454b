/** A conversation of messages with a chat model, through the chat template of its tokenizer. */
import { type ChatMessage, encodeChat } from '../data/chat.js';
import { Conversation } from './conversation.js';
import type { GenerateOptions, Generation, TextSource } from './generate.js';

/** Options of a `Chat`. */
export interface ChatOptions extends GenerateOptions {
  /** The first message: how the model should behave. */
  readonly system?: string | undefined;
}

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

  free(): void {
    this.#talk.free();
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
