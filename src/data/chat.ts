/** Conversations as the text and tokens that a chat model was trained on, through the Jinja template of its tokenizer. */
import { UsageError } from '../errors.js';
import { LimitedTemplate } from './chat-template.js';
import type { ChatTemplates, Tokenizer } from './tokenizer.js';

/** A turn of a conversation. Templates may use further keys, such as `tool_calls`. */
export interface ChatMessage {
  readonly role: string;
  readonly content?: unknown;
  readonly [key: string]: unknown;
}

/** Options of `applyChatTemplate`. */
export interface ChatTemplateOptions {
  /** Ends the text where the model's answer begins. Default: false. */
  readonly addGenerationPrompt?: boolean;
  /** Further variables of the template, such as `tools` or `enable_thinking`. */
  readonly variables?: Readonly<Record<string, unknown>>;
  /** Name of a template, where a model has several. Default: `default`. */
  readonly template?: string;
}

/**
 * The text of a conversation. It contains special tokens as strings: encode it with `parseSpecial`, or use `encodeChat`.
 * Throws a `UsageError` if the tokenizer has no template, or with the template's own message if it refuses the messages.
 */
export function applyChatTemplate(
  tokenizer: Tokenizer,
  messages: readonly ChatMessage[],
  { addGenerationPrompt = false, variables = {}, template = 'default' }: ChatTemplateOptions = {},
): string {
  const { chat } = tokenizer;
  if (!chat?.templates.has(template)) throw noTemplate(tokenizer, template);
  try {
    const values = { messages, add_generation_prompt: addGenerationPrompt, ...variables };
    return renderChat(chat, template, values, messages.length);
  } catch (error) {
    // The stack, or the length of a string.
    const isTooLarge = error instanceof RangeError;
    const reason = isTooLarge
      ? 'it is nested too deeply, or its text is too long; use another one'
      : (error as Error).message;
    throw new UsageError(`chat template: ${reason}`, { cause: error });
  }
}

/** Renders a template with these variables. Throws what the template throws. `messages`: their number, for the limits. */
export function renderChat(
  chat: ChatTemplates,
  template: string,
  variables: Readonly<Record<string, unknown>>,
  messages: number,
): string {
  // Templates test `if tools`, and `is not none`: both variables are always passed by transformers.
  const values = { tools: null, documents: null, ...chat.variables, ...variables };
  return compile(chat, template, chat.templates.get(template) ?? '').render(values, messages);
}

/** Token ids of `applyChatTemplate`. The template writes the begin-of-text token itself, so none is added. */
export function encodeChat(
  tokenizer: Tokenizer,
  messages: readonly ChatMessage[],
  options: ChatTemplateOptions = {},
): Int32Array {
  return tokenizer.encode(applyChatTemplate(tokenizer, messages, options), { parseSpecial: true });
}

/** Throws a `UsageError` that names the remedy unless the tokenizer has a template. */
export function requireChatTemplate(tokenizer: Tokenizer, name = 'default'): void {
  if (!tokenizer.chat?.templates.has(name)) throw noTemplate(tokenizer, name);
}

function noTemplate(tokenizer: Tokenizer, name: string): UsageError {
  const names = [...(tokenizer.chat?.templates.keys() ?? [])];
  return new UsageError(
    names.length > 0
      ? `tokenizer ${tokenizer.name} has no chat template "${name}"; it has ${names.join(', ')}`
      : `tokenizer ${tokenizer.name} has no chat template; put a chat_template.jinja beside its tokenizer.json, ` +
          'or use a model that was trained for chat',
  );
}

// Parsing takes longer than rendering, and a server renders the same template for every request.
const compiledTemplates = new WeakMap<ChatTemplates, Map<string, LimitedTemplate>>();

function compile(chat: ChatTemplates, name: string, source: string): LimitedTemplate {
  const known = compiledTemplates.get(chat) ?? new Map<string, LimitedTemplate>();
  const template = known.get(name) ?? new LimitedTemplate(source);
  compiledTemplates.set(chat, known.set(name, template));
  return template;
}
