/** `POST /v1/messages` and `/v1/messages/count_tokens` of the Anthropic API: content blocks become messages of a chat and back. */
import { HttpError } from '../../http/error.js';
import { eventFrame } from '../../http/event-stream.js';
import {
  type ChatChoice,
  type ChatUsage,
  isObject,
  PASSED,
  picked,
  type TranslatedBody,
  type TranslatedRequest,
  type Translation,
} from './translation.js';

/** Accepted without effect. */
const IGNORED = ['service_tier', 'betas', 'context_management', 'cache_control', 'inference_geo'];
const OWN = [
  ...['messages', 'system', 'tools', 'tool_choice', 'max_tokens', 'stop_sequences', 'thinking', 'output_config'],
  'output_format',
];

type Fields = Readonly<Record<string, unknown>>;
type Block = Fields & { readonly type: string };

export function chatOfMessages(given: Fields): TranslatedBody {
  const { system, tools, tool_choice: choice, max_tokens: most, stop_sequences: stop, thinking } = given;
  const config = isObject(given['output_config']) ? given['output_config'] : {};
  const format = config['format'] ?? given['output_format'];
  const wantsThinking = isObject(thinking) ? thinking['type'] !== 'disabled' : undefined;
  const kwargs = isObject(given['chat_template_kwargs']) ? given['chat_template_kwargs'] : {};
  const body = {
    ...picked(
      given,
      PASSED.filter((name) => name !== 'metadata'),
    ),
    messages: [
      ...(system === undefined ? [] : [{ role: 'system', content: textOf(system, 'system') }]),
      ...messagesOf(given['messages']),
    ],
    ...(tools === undefined ? {} : { tools: toolsOf(tools) }),
    ...choiceOf(choice),
    ...(most === undefined ? {} : { max_tokens: most }),
    ...(stop === undefined ? {} : { stop }),
    ...(wantsThinking === undefined ? {} : { chat_template_kwargs: { enable_thinking: wantsThinking, ...kwargs } }),
    ...(config['effort'] === undefined ? {} : { reasoning_effort: config['effort'] }),
    ...(isObject(format)
      ? { response_format: { type: format['type'], json_schema: { schema: format['schema'] } } }
      : {}),
  };
  const unknown = Object.keys(given).filter((name) => ![...PASSED, ...OWN, ...IGNORED].includes(name));
  return { body, echoed: {}, unknown };
}

/** Results of tools are blocks of the user here, and messages of their own in a chat. */
function messagesOf(messages: unknown): unknown[] {
  if (!Array.isArray(messages)) throw wrong('messages', 'expected a list of messages');
  return messages.flatMap((message, i) => {
    const at = `messages.${i}`;
    if (!isObject(message)) throw wrong(at, 'expected a message');
    const { role, content } = message;
    if (role !== 'user' && role !== 'assistant' && role !== 'system')
      throw wrong(`${at}.role`, 'expected user or assistant');
    if (typeof content === 'string') return [{ role, content }];
    if (!Array.isArray(content)) throw wrong(`${at}.content`, 'expected a text or a list of blocks');
    return role === 'assistant' ? [assistantOf(content, at)] : userOf(role, content, at);
  });
}

function assistantOf(blocks: readonly unknown[], at: string): object {
  const calls: object[] = [];
  let [text, reasoning] = ['', ''];
  for (const [i, block] of blocks.entries()) {
    const of = blockOf(block, `${at}.content.${i}`);
    if (of['type'] === 'tool_use')
      calls.push({ id: of['id'], type: 'function', function: { name: of['name'], arguments: of['input'] ?? {} } });
    else if (of['type'] === 'thinking') reasoning += String(of['thinking'] ?? '');
    else if (of['type'] !== 'redacted_thinking') text += textIn(of, `${at}.content.${i}`);
  }
  return {
    ...{ role: 'assistant', content: text },
    ...(reasoning === '' ? {} : { reasoning_content: reasoning }),
    ...(calls.length === 0 ? {} : { tool_calls: calls }),
  };
}

function userOf(role: string, blocks: readonly unknown[], at: string): object[] {
  const messages: object[] = [];
  let text = '';
  for (const [i, block] of blocks.entries()) {
    const place = `${at}.content.${i}`;
    const of = blockOf(block, place);
    if (of['type'] !== 'tool_result') text += textIn(of, place);
    else
      messages.push({
        ...{ role: 'tool', tool_call_id: of['tool_use_id'] },
        content: of['content'] === undefined ? '' : textOf(of['content'], `${place}.content`),
      });
  }
  return text === '' && messages.length > 0 ? messages : [...messages, { role, content: text }];
}

function blockOf(block: unknown, at: string): Fields {
  if (isObject(block)) return block;
  throw wrong(at, 'expected a block');
}

function textIn(block: Fields, at: string): string {
  if (block['type'] === 'text' && typeof block['text'] === 'string') return block['text'];
  throw wrong(at, `blocks of the type ${String(block['type']).slice(0, 60)} are not supported here`);
}

function textOf(content: unknown, at: string): string {
  if (typeof content === 'string') return content;
  if (!Array.isArray(content)) throw wrong(at, 'expected a text or a list of blocks of text');
  return content.map((block, i) => textIn(blockOf(block, `${at}.${i}`), `${at}.${i}`)).join('\n');
}

function toolsOf(tools: unknown): unknown {
  if (!Array.isArray(tools)) throw wrong('tools', 'expected a list of tools');
  return tools.map((tool, i) => {
    const { type = 'custom', name, description, input_schema: parameters } = blockOf(tool, `tools.${i}`);
    if (type !== 'custom') throw wrong(`tools.${i}.type`, 'only tools with an input_schema are supported');
    return { type: 'function', function: { name, description, parameters } };
  });
}

const CHOICES: Readonly<Record<string, string>> = { auto: 'auto', any: 'required', none: 'none' };

function choiceOf(choice: unknown): object {
  if (choice === undefined) return {};
  if (!isObject(choice)) throw wrong('tool_choice', 'expected an object with a type');
  const { type, name, disable_parallel_tool_use: isSingle } = choice;
  const wanted = type === 'tool' ? { type: 'function', function: { name } } : CHOICES[String(type)];
  if (wanted === undefined) throw wrong('tool_choice.type', 'expected auto, any, tool or none');
  return { tool_choice: wanted, ...(isSingle === true ? { parallel_tool_calls: false } : {}) };
}

function wrong(param: string, message: string): HttpError {
  return new HttpError(400, `${param}: ${message}`, { param });
}

const TYPES: Readonly<Record<number, string>> = {
  400: 'invalid_request_error',
  401: 'authentication_error',
  403: 'permission_error',
  404: 'not_found_error',
  413: 'request_too_large',
  429: 'rate_limit_error',
  503: 'overloaded_error',
};

/** The body of an error in the form of this protocol. */
export function messagesError({ status, message }: HttpError): object {
  const type = TYPES[status] ?? (status < 500 ? 'invalid_request_error' : 'api_error');
  return { type: 'error', error: { type, message } };
}

const REASONS: Readonly<Record<string, string>> = { length: 'max_tokens', tool_calls: 'tool_use' };

export class MessagesTranslation implements Translation {
  readonly #request: TranslatedRequest;
  /** The type of the block that is being written. */
  #open: string | null = null;
  #index = -1;
  #end: ChatChoice = { finish_reason: 'stop' };

  constructor(request: TranslatedRequest) {
    this.#request = request;
  }

  begin(): string {
    const { promptTokens } = this.#request;
    const usage = wholeUsage({
      ...{ prompt_tokens: promptTokens, completion_tokens: 0, total_tokens: promptTokens },
      prompt_tokens_details: { cached_tokens: 0 },
    });
    return this.#event('message_start', { message: this.#message([], null, usage) });
  }

  chunk(choice: ChatChoice): string {
    const { delta = {}, finish_reason: finish } = choice;
    if (finish !== null) this.#end = choice;
    let frames = '';
    if (delta.reasoning_content)
      frames +=
        this.#begin({ type: 'thinking', thinking: '', signature: '' }) +
        this.#delta({ type: 'thinking_delta', thinking: delta.reasoning_content });
    if (delta.content)
      frames +=
        this.#begin({ type: 'text', text: '', citations: null }) +
        this.#delta({ type: 'text_delta', text: delta.content });
    for (const { id, function: of } of delta.tool_calls ?? [])
      frames +=
        id === undefined
          ? this.#delta({ type: 'input_json_delta', partial_json: of.arguments })
          : this.#stop() + this.#begin({ ...toolUse(id, of.name), input: {} });
    return frames;
  }

  end(usage: ChatUsage): string {
    const delta = { ...stopOf(this.#end), container: null };
    return (
      this.#stop() + this.#event('message_delta', { delta, usage: usageOf(usage) }) + this.#event('message_stop', {})
    );
  }

  fail(error: HttpError): string {
    return eventFrame(JSON.stringify(messagesError(error)), { event: 'error' });
  }

  whole(choice: ChatChoice, usage: ChatUsage): string {
    const { message = {} } = choice;
    const content: object[] = [];
    if (message.reasoning_content)
      content.push({ type: 'thinking', thinking: message.reasoning_content, signature: '' });
    if (message.content) content.push({ type: 'text', text: message.content, citations: null });
    for (const { id, function: of } of message.tool_calls ?? [])
      content.push({ ...toolUse(id, of.name), input: JSON.parse(of.arguments) as unknown });
    return JSON.stringify(this.#message(content, choice, wholeUsage(usage)));
  }

  #message(content: readonly object[], choice: ChatChoice | null, usage: object): object {
    const stop = choice ? stopOf(choice) : { stop_reason: null, stop_sequence: null, stop_details: null };
    const { id, model } = this.#request;
    const none = { container: null, diagnostics: null };
    return { id, type: 'message', role: 'assistant', model, content, ...stop, ...none, usage };
  }

  #event(type: string, fields: object): string {
    return eventFrame(JSON.stringify({ type, ...fields }), { event: type });
  }

  /** Begins a block, unless one of its type is being written. */
  #begin(block: Block): string {
    if (this.#open === block.type) return '';
    const frames = this.#stop();
    this.#open = block.type;
    this.#index += 1;
    return frames + this.#event('content_block_start', { index: this.#index, content_block: block });
  }

  #delta(delta: object): string {
    return this.#event('content_block_delta', { index: this.#index, delta });
  }

  #stop(): string {
    if (this.#open === null) return '';
    this.#open = null;
    return this.#event('content_block_stop', { index: this.#index });
  }
}

function stopOf({ finish_reason: finish, stop_reason: stop }: ChatChoice): object {
  const isStop = stop !== undefined && finish === 'stop';
  const reason = isStop ? 'stop_sequence' : (REASONS[finish ?? ''] ?? 'end_turn');
  return { stop_reason: reason, stop_sequence: isStop ? stop : null, stop_details: null };
}

function toolUse(id: string | undefined, name: string | undefined): Block {
  return { type: 'tool_use', ...{ id, name, caller: { type: 'direct' } } };
}

/** Tokens from the prefix cache are counted apart. */
function usageOf({
  prompt_tokens: prompt,
  completion_tokens: output,
  prompt_tokens_details: { cached_tokens: cached },
  completion_tokens_details: details,
}: ChatUsage): object {
  return {
    ...{ input_tokens: prompt - cached, cache_creation_input_tokens: 0, cache_read_input_tokens: cached },
    ...{ output_tokens: output, server_tool_use: null },
    output_tokens_details: details ? { thinking_tokens: details.reasoning_tokens } : null,
  };
}

/** The usage of a message; the fields that are null belong to what this server does not have. */
function wholeUsage(usage: ChatUsage): object {
  return { ...usageOf(usage), ...{ cache_creation: null, inference_geo: null, service_tier: null, speed: null } };
}
