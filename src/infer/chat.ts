/** Texts that a person and a model write in turns: as lines, or as the messages of a chat template. */
import { type AnswerForm, HERMES, opensReasoning } from '../data/answer-form.js';
import { applyChatTemplate, type ChatMessage, encodeChat, requireChatTemplate } from '../data/chat.js';
import { prepareChat } from '../data/chat-tools.js';
import { templateForm } from '../data/template-form.js';
import { UsageError } from '../errors.js';
import { AnswerParser, type AnswerPart, joinParts } from './answer-parser.js';
import type { BatchEngine } from './engine/engine.js';
import { DEFAULT_MAX_CONTEXT } from './engine/request.js';
import type { KeptPages } from './engine/sequence.js';
import { ownEngine } from './generate.js';
import { encodePrompt, expectInVocabulary, promptTooLong } from './prompt.js';
import type { CallableTool, ToolCalls } from './structured/calls.js';
import type { JsonSchema } from './structured/schema.js';
import { type TextSource, usedVocabulary } from './text-source.js';
import { advance, GeneratedText, type GenerateOptions, type Generation } from './texts.js';

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
   * it; otherwise the text so far is dropped. `responseFormat` replaces that of the conversation.
   */
  async *continue(
    context: readonly number[],
    responseFormat?: GenerateOptions['responseFormat'],
  ): AsyncGenerator<string, Generation, void> {
    const held = this.#context;
    // Even where all of it is known, one token must be read for the scores of the next.
    if (context.length > held.length && held.every((token, i) => token === context[i]))
      return yield* this.#append(context.slice(held.length), responseFormat);
    const { maxContext = DEFAULT_MAX_CONTEXT } = this.#options;
    if (context.length >= maxContext) throw promptTooLong(context.length, maxContext);
    this.reset();
    return yield* this.#append(context, responseFormat);
  }

  async *#append(
    tokens: readonly number[],
    responseFormat = this.#options.responseFormat,
  ): AsyncGenerator<string, Generation, void> {
    const { sampling, maxContext = DEFAULT_MAX_CONTEXT } = this.#options;
    expectInVocabulary(tokens, this.#source.tokenizer, usedVocabulary(this.#source));
    const prompt = [...this.#context, ...tokens];
    if (prompt.length >= maxContext) throw promptTooLong(prompt.length, maxContext);
    this.#engine ??= ownEngine(this.#source, this.#options);
    // A different seed for each turn: the same one would repeat the draws of the first turn.
    const seed = (sampling?.seed ?? 0) + this.#turns;
    const turned = { ...this.#options, ...(responseFormat && { responseFormat }), sampling: { ...sampling, seed } };
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

/** A tool that a chat may call. */
export interface ChatTool {
  readonly name: string;
  /** JSON schema of the arguments, an object. */
  readonly schema: JsonSchema;
  /** Tells the model what the tool does. */
  readonly description?: string;
  /** Gets arguments that satisfy the schema. A result that is no text is given to the model as JSON. */
  run(given: Readonly<Record<string, unknown>>): unknown;
}

/** Options of a `Chat`. */
export interface ChatOptions extends GenerateOptions {
  /** The first message: how the model should behave. */
  readonly system?: string | undefined;
  /** Tools that answers may call. Not together with `responseFormat`. */
  readonly tools?: readonly ChatTool[];
  /** `required`, or the name of a tool: the first answer to each message calls one. Default `auto`. */
  readonly toolChoice?: string;
  /** Whether an answer may have several calls. Default true. */
  readonly parallelToolCalls?: boolean;
  /** Answers with calls after which a last one without tools is asked for. Default 8. */
  readonly maxRounds?: number;
  /** Called with every call and its result. */
  readonly onCall?: (call: { readonly name: string; readonly arguments: string }, result: unknown) => void;
  /** Further variables of the chat template, such as `enable_thinking`. */
  readonly variables?: Readonly<Record<string, unknown>>;
}

const MAX_ROUNDS = 8;

/** Tools, and whether they must be called. */
interface ToolOptions {
  readonly tools: readonly (CallableTool & { readonly description?: string })[];
  readonly toolChoice?: string;
  readonly parallelToolCalls?: boolean;
  readonly variables?: Readonly<Record<string, unknown>>;
}

/** The prompt of a chat with tools, the form of its answer, and how it is taken apart. */
function chatWithTools(
  { tokenizer }: TextSource,
  messages: readonly ChatMessage[],
  { tools, toolChoice = 'auto', parallelToolCalls = true, variables = {} }: ToolOptions,
): { readonly context: readonly number[]; readonly responseFormat?: ToolCalls; readonly answer: AnswerForm } {
  requireChatTemplate(tokenizer);
  const form = templateForm(tokenizer.chat!);
  const described = tools.map(({ name, description, schema }) => ({
    type: 'function' as const,
    function: { name, ...(description === undefined ? {} : { description }), parameters: schema },
  }));
  const prepared = prepareChat(form, messages, described);
  const text = applyChatTemplate(tokenizer, prepared.messages, {
    addGenerationPrompt: true,
    variables: { ...variables, tools: prepared.tools },
  });
  const context = [...tokenizer.encode(text, { parseSpecial: true })];
  const reasoning = opensReasoning(text) ? 'open' : form.mayReason ? 'possible' : null;
  if (tools.length === 0) return { context, answer: { calls: null, reasoning } };
  const isNamed = toolChoice !== 'auto' && toolChoice !== 'required';
  const named = tools.filter(({ name }) => !isNamed || name === toolChoice);
  if (named.length === 0)
    throw new UsageError(`toolChoice: ${toolChoice} is no tool; use auto, required or the name of a tool`);
  const isRequired = toolChoice !== 'auto';
  const calls = form.calls ?? HERMES;
  const answer = { calls, reasoning: isRequired && reasoning !== 'open' ? null : reasoning } as const;
  const callable = named.map(({ name, schema }) => ({ name, schema }));
  const rest = { isRequired, isParallel: parallelToolCalls, document: null };
  return { context, answer, responseFormat: { type: 'tool_calls', form: answer, tools: callable, ...rest } };
}

/** A conversation of messages with a chat model, through the chat template of its tokenizer. */
export class Chat {
  readonly #source: TextSource;
  readonly #talk: Conversation;
  readonly #options: ChatOptions;
  readonly #first: readonly ChatMessage[];
  #messages: ChatMessage[];

  constructor(source: TextSource, { system, ...options }: ChatOptions = {}) {
    const { tools = [], responseFormat } = options;
    if (tools.length > 0 && responseFormat) throw new UsageError('responseFormat: not supported together with tools');
    this.#source = source;
    this.#options = options;
    const { tools: _, toolChoice, parallelToolCalls, maxRounds, onCall, variables, ...generation } = options;
    this.#talk = new Conversation(source, generation);
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
   *
   * With tools, the calls of an answer are run, and the model goes on with their results. Only content is yielded.
   */
  async *say(content: string): AsyncGenerator<string, Generation, void> {
    if (this.#options.tools?.length) return yield* this.#sayWithTools(content, this.#options.tools);
    const messages = [...this.#messages, { role: 'user', content }];
    const { variables = {} } = this.#options;
    const context = encodeChat(this.#source.tokenizer, messages, { addGenerationPrompt: true, variables });
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

  async *#sayWithTools(content: string, tools: readonly ChatTool[]): AsyncGenerator<string, Generation, void> {
    const { maxRounds = MAX_ROUNDS, toolChoice = 'auto', parallelToolCalls = true, variables = {} } = this.#options;
    const asked: ChatMessage[] = [...this.#messages, { role: 'user', content }];
    for (let round = 0; ; round++) {
      const given = {
        ...{ tools: round < maxRounds ? tools : [], parallelToolCalls, variables },
        toolChoice: round === 0 ? toolChoice : 'auto',
      };
      const { context, responseFormat, answer } = chatWithTools(this.#source, asked, given);
      const parser = new AnswerParser(answer);
      const parts: AnswerPart[] = [];
      const stream = this.#talk.continue(context, responseFormat);
      let generation: Generation | null = null;
      let hasBegun = false;
      try {
        while (!generation) {
          const { done, value } = await stream.next();
          hasBegun = true;
          const more = done ? parser.end() : parser.push(value);
          parts.push(...more);
          for (const part of more) if (part.type === 'content') yield part.text;
          if (done) generation = value;
        }
      } finally {
        // An answer that is cut off counts as far as it was yielded, without its calls.
        if (hasBegun && !generation) this.#messages = [...asked, messageOf({ ...joinParts(parts), calls: [] }, round)];
        await stream.return({ tokens: [], finishReason: 'aborted' });
      }
      const parsed = joinParts(parts);
      const isWhole = generation.finishReason !== 'aborted';
      asked.push(messageOf(isWhole ? parsed : { ...parsed, calls: [] }, round));
      if (parsed.calls.length === 0 || !isWhole) {
        this.#messages = asked;
        return generation;
      }
      for (const [i, call] of parsed.calls.entries()) {
        const tool = tools.find(({ name }) => name === call.name);
        const result: unknown = await tool?.run(JSON.parse(call.arguments) as Record<string, unknown>);
        this.#options.onCall?.(call, result);
        const text = typeof result === 'string' ? result : (JSON.stringify(result) ?? '');
        asked.push({ role: 'tool', name: call.name, tool_call_id: callId(round, i), content: text });
      }
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

/** Nine letters or digits, as templates that write ids want them. */
function callId(round: number, i: number): string {
  return `call${String(100 * round + i).padStart(5, '0')}`;
}

function messageOf({ reasoning, content, calls }: ReturnType<typeof joinParts>, round: number): ChatMessage {
  return {
    ...{ role: 'assistant', content },
    ...(reasoning === '' ? {} : { reasoning_content: reasoning }),
    ...(calls.length === 0
      ? {}
      : { tool_calls: calls.map((call, i) => ({ id: callId(round, i), type: 'function', function: call })) }),
  };
}

/** The tokens of a conversation of one message, up to where the answer begins. */
export function encodeChatPrompt(source: TextSource, prompt: string, system?: string): readonly number[] {
  const messages = [...firstMessages(system), { role: 'user', content: prompt }];
  return [...encodeChat(source.tokenizer, messages, { addGenerationPrompt: true })];
}

/** The same with tools, and the form of the answer. */
export function encodeToolPrompt(
  source: TextSource,
  prompt: string,
  options: ToolOptions & { system?: string | undefined },
) {
  return chatWithTools(source, [...firstMessages(options.system), { role: 'user', content: prompt }], options);
}

function firstMessages(system: string | undefined): readonly ChatMessage[] {
  return system === undefined ? [] : [{ role: 'system', content: system }];
}
