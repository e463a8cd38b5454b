/** `POST /v1/responses` of the OpenAI API, without state: items become messages, and a chat answer becomes items. */
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

/** Parameters that need a server which keeps answers. */
const STATEFUL = ['previous_response_id', 'conversation', 'background', 'prompt'];
/** Accepted without effect: hints, and fields about storing. */
const IGNORED = [
  ...['store', 'include', 'truncation', 'service_tier', 'prompt_cache_key', 'prompt_cache_retention'],
  ...['safety_identifier', 'max_tool_calls', 'context_management'],
];
const OWN = [
  'input',
  'instructions',
  'tools',
  'tool_choice',
  'parallel_tool_calls',
  'text',
  'max_output_tokens',
  'reasoning',
  'stop',
];

type Fields = Readonly<Record<string, unknown>>;

export function chatOfResponses(given: Fields): TranslatedBody {
  for (const name of STATEFUL)
    if (given[name] !== undefined && given[name] !== false)
      throw new HttpError(400, `${name}: this server keeps no answers; send the whole conversation as input`, {
        param: name,
        code: 'unsupported_parameter',
      });
  if (given['top_logprobs'] !== undefined && given['top_logprobs'] !== 0)
    throw new HttpError(400, 'top_logprobs is not supported here: use /v1/chat/completions', {
      param: 'top_logprobs',
      code: 'unsupported_parameter',
    });
  const { input, instructions, tools, tool_choice: choice, text, reasoning, max_output_tokens: most, stop } = given;
  const effort = isObject(reasoning) ? reasoning['effort'] : undefined;
  const format = isObject(text) ? responseFormat(text['format']) : undefined;
  const body = {
    ...picked(given, [...PASSED, 'parallel_tool_calls']),
    messages: [
      ...(instructions === undefined ? [] : [{ role: 'system', content: instructions }]),
      ...messagesOf(input),
    ],
    ...(tools === undefined ? {} : { tools: toolsOf(tools) }),
    ...(choice === undefined ? {} : { tool_choice: choiceOf(choice) }),
    ...(format === undefined ? {} : { response_format: format }),
    ...(most === undefined ? {} : { max_completion_tokens: most }),
    ...(stop === undefined ? {} : { stop }),
    ...(effort === undefined || effort === null ? {} : { reasoning_effort: effort }),
  };
  const known = [...PASSED, ...OWN, ...IGNORED, ...STATEFUL, 'top_logprobs'];
  const unknown = Object.keys(given).filter((name) => !known.includes(name));
  return { body, echoed: echoedOf(given), unknown };
}

/** Fields that an answer repeats, with the defaults of the API. Those that `IGNORED` lists, but for names, had no effect. */
function echoedOf(given: Fields): Fields {
  const tools = Array.isArray(given['tools']) ? given['tools'] : [];
  return {
    ...picked(given, ['user', 'safety_identifier', 'prompt_cache_key']),
    instructions: given['instructions'] ?? null,
    tools: tools.map((tool: Fields) => ({ parameters: null, ...tool, strict: tool['strict'] ?? true })),
    tool_choice: given['tool_choice'] ?? 'auto',
    parallel_tool_calls: given['parallel_tool_calls'] ?? true,
    text: { format: { type: 'text' }, ...withoutNulls(given['text']) },
    reasoning: { effort: null, summary: null, ...withoutNulls(given['reasoning']) },
    max_output_tokens: given['max_output_tokens'] ?? null,
    temperature: given['temperature'] ?? 1,
    top_p: given['top_p'] ?? 1,
    metadata: given['metadata'] ?? {},
  };
}

function withoutNulls(value: unknown): Fields {
  return isObject(value) ? Object.fromEntries(Object.entries(value).filter(([, of]) => of !== null)) : {};
}

interface Message {
  role: string;
  content: string;
  reasoning_content?: string;
  tool_calls?: object[];
}

/** Items of one turn of the assistant become one message. */
function messagesOf(input: unknown): unknown[] {
  if (typeof input === 'string') return [{ role: 'user', content: input }];
  if (!Array.isArray(input)) throw new HttpError(400, 'input: expected a text or a list of items', { param: 'input' });
  const messages: Message[] = [];
  const assistant = () => {
    const last = messages.at(-1);
    if (last?.role === 'assistant') return last;
    const message: Message = { role: 'assistant', content: '' };
    messages.push(message);
    return message;
  };
  for (const [i, item] of input.entries()) {
    const at = `input.${i}`;
    if (!isObject(item)) throw new HttpError(400, `${at}: expected an item`, { param: at });
    const { type = 'message' } = item;
    if (type === 'message') {
      const { role } = item;
      const content = textOf(item['content'], `${at}.content`);
      if (typeof role !== 'string') throw new HttpError(400, `${at}.role: expected a text`, { param: `${at}.role` });
      if (role === 'assistant') assistant().content += content;
      else messages.push({ role, content });
    } else if (type === 'function_call') {
      const { call_id: id, name, arguments: given } = item;
      const message = assistant();
      message.tool_calls ??= [];
      message.tool_calls.push({ id, type: 'function', function: { name, arguments: given } });
    } else if (type === 'function_call_output') {
      const content = textOf(item['output'], `${at}.output`);
      messages.push({ role: 'tool', content, ...{ tool_call_id: item['call_id'] } });
    } else if (type === 'reasoning') {
      const parts = [item['summary'], item['content']].find((list) => Array.isArray(list) && list.length > 0);
      if (parts !== undefined) assistant().reasoning_content = textOf(parts, at);
    } else if (type === 'item_reference') {
      const message = `${at}: this server keeps no items; send the item itself (store: false in most clients)`;
      throw new HttpError(400, message, { param: at, code: 'unsupported_parameter' });
    } else {
      const shown = String(type).slice(0, 60);
      throw new HttpError(400, `${at}.type: items of the type ${shown} are not supported`, { param: `${at}.type` });
    }
  }
  return messages;
}

const TEXTS = ['input_text', 'output_text', 'text', 'summary_text', 'reasoning_text', 'refusal'];

function textOf(content: unknown, at: string): string {
  if (typeof content === 'string') return content;
  const isText = (part: unknown): part is Fields => isObject(part) && TEXTS.includes(String(part['type']));
  const textIn = (part: Fields) => part['text'] ?? part['refusal'];
  if (Array.isArray(content) && content.every((part) => isText(part) && typeof textIn(part) === 'string'))
    return content.map(textIn).join('');
  throw new HttpError(400, `${at}: expected a text, or a list of parts that are texts`, { param: at });
}

function toolsOf(tools: unknown): unknown {
  if (!Array.isArray(tools)) return tools; // refused by the chat
  return tools.map((tool, i) => {
    if (!isObject(tool) || tool['type'] !== 'function') {
      const at = `tools.${i}.type`;
      throw new HttpError(400, `${at}: only tools of the type function are supported`, { param: at });
    }
    const { type, ...rest } = tool;
    return { type, function: rest };
  });
}

function choiceOf(choice: unknown): unknown {
  if (!isObject(choice) || choice['type'] !== 'function') return choice;
  return { type: 'function', function: { name: choice['name'] } };
}

function responseFormat(format: unknown): unknown {
  if (!isObject(format) || format['type'] !== 'json_schema') return format ?? undefined;
  const { type, ...schema } = format;
  return { type, json_schema: schema };
}

type Item = { type: 'message' | 'reasoning' | 'function_call'; id: string; text: string; name: string; callId: string };
type ItemStatus = 'in_progress' | 'completed' | 'incomplete';

export class ResponsesTranslation implements Translation {
  readonly #request: TranslatedRequest;
  readonly #items: Item[] = [];
  #sequence = 0;
  /** Whether the last item is not done. */
  #isOpen = false;
  #finish: string | null = null;

  constructor(request: TranslatedRequest) {
    this.#request = request;
  }

  begin(): string {
    const response = this.#response('in_progress');
    return this.#event('response.created', {}, response) + this.#event('response.in_progress', {}, response);
  }

  chunk({ delta = {}, finish_reason: finish }: ChatChoice): string {
    this.#finish = finish ?? this.#finish;
    let frames = '';
    if (delta.reasoning_content) frames += this.#text('reasoning', delta.reasoning_content);
    if (delta.content) frames += this.#text('message', delta.content);
    for (const { id, function: of } of delta.tool_calls ?? [])
      frames += id === undefined ? this.#arguments(of.arguments) : this.#open('function_call', of.name ?? '', id);
    return frames;
  }

  end(usage: ChatUsage): string {
    const isCut = this.#finish === 'length';
    const frames = this.#close(isCut);
    const status = isCut ? 'incomplete' : 'completed';
    return frames + this.#event(`response.${status}`, {}, this.#response(status, usage));
  }

  fail(error: HttpError): string {
    const { message } = error;
    const response = this.#response('failed', null, { code: 'server_error', message });
    return this.#close(true) + this.#event('response.failed', {}, response);
  }

  whole({ message = {}, finish_reason: finish }: ChatChoice, usage: ChatUsage): string {
    if (message.reasoning_content) this.#add('reasoning').text = message.reasoning_content;
    if (message.content) this.#add('message').text = message.content;
    for (const { id, function: of } of message.tool_calls ?? [])
      this.#add('function_call', of.name, id).text = of.arguments;
    this.#finish = finish;
    return this.#response(finish === 'length' ? 'incomplete' : 'completed', usage);
  }

  /** `response`: JSON of the member with this name. */
  #event(type: string, fields: object, response?: string): string {
    const event = JSON.stringify({ type, sequence_number: this.#sequence, ...fields });
    this.#sequence += 1;
    return eventFrame(response === undefined ? event : `${event.slice(0, -1)},"response":${response}}`, {
      event: type,
    });
  }

  /** JSON of the response with the items so far. */
  #response(status: string, usage: ChatUsage | null = null, error: object | null = null): string {
    const { id, model, created, echoed } = this.#request;
    const isCut = status !== 'completed';
    const last = this.#items.at(-1);
    const output = this.#items.map((item) => itemOf(item, endOf(item, isCut && item === last)));
    const response = {
      ...{ id, object: 'response', created_at: created, status, error },
      incomplete_details: status === 'incomplete' ? { reason: 'max_output_tokens' } : null,
      ...{ model, output, previous_response_id: null, store: false, truncation: 'disabled' },
      ...(usage && { usage: usageOf(usage) }),
    };
    return `${JSON.stringify(response).slice(0, -1)},${echoed.slice(1)}`;
  }

  #add(type: Item['type'], name = '', callId = ''): Item {
    const prefix = { message: 'msg', reasoning: 'rs', function_call: 'fc' }[type];
    const id = `${prefix}_${this.#request.id.slice(-32).replaceAll('-', '')}${this.#items.length}`;
    const item = { type, id, text: '', name, callId };
    this.#items.push(item);
    return item;
  }

  #open(type: Item['type'], name = '', callId = ''): string {
    let frames = this.#close();
    const item = this.#add(type, name, callId);
    this.#isOpen = true;
    frames += this.#event('response.output_item.added', { output_index: this.#at, item: itemOf(item, 'in_progress') });
    if (type === 'message')
      frames += this.#event('response.content_part.added', { ...this.#place, part: textPart('') });
    if (type === 'reasoning')
      frames += this.#event('response.reasoning_summary_part.added', { ...this.#summary, part: summaryPart('') });
    return frames;
  }

  /** `isCut`: the answer ends here, because the tokens are used up or the server failed. */
  #close(isCut = false): string {
    const item = this.#items.at(-1);
    if (!item || !this.#isOpen) return '';
    this.#isOpen = false;
    const { type, text, id, name } = item;
    let frames = '';
    if (type === 'message')
      frames =
        this.#event('response.output_text.done', { ...this.#place, text, logprobs: [] }) +
        this.#event('response.content_part.done', { ...this.#place, part: textPart(text) });
    if (type === 'reasoning')
      frames =
        this.#event('response.reasoning_summary_text.done', { ...this.#summary, text }) +
        this.#event('response.reasoning_summary_part.done', { ...this.#summary, part: summaryPart(text) });
    if (type === 'function_call')
      frames = this.#event('response.function_call_arguments.done', {
        ...{ item_id: id, output_index: this.#at, name, arguments: text },
      });
    return (
      frames +
      this.#event('response.output_item.done', { output_index: this.#at, item: itemOf(item, endOf(item, isCut)) })
    );
  }

  #text(type: 'message' | 'reasoning', delta: string): string {
    const frames = this.#isOpen && this.#items.at(-1)?.type === type ? '' : this.#open(type);
    this.#items[this.#at].text += delta;
    if (type === 'message')
      return frames + this.#event('response.output_text.delta', { ...this.#place, delta, logprobs: [] });
    return frames + this.#event('response.reasoning_summary_text.delta', { ...this.#summary, delta });
  }

  #arguments(delta: string): string {
    const item = this.#items[this.#at];
    item.text += delta;
    return this.#event('response.function_call_arguments.delta', { item_id: item.id, output_index: this.#at, delta });
  }

  get #at(): number {
    return this.#items.length - 1;
  }

  get #place(): object {
    return { item_id: this.#items[this.#at].id, output_index: this.#at, content_index: 0 };
  }

  get #summary(): object {
    return { item_id: this.#items[this.#at].id, output_index: this.#at, summary_index: 0 };
  }
}

function usageOf(usage: ChatUsage): object {
  return {
    input_tokens: usage.prompt_tokens,
    input_tokens_details: { ...usage.prompt_tokens_details, cache_write_tokens: 0 },
    output_tokens: usage.completion_tokens,
    output_tokens_details: usage.completion_tokens_details ?? { reasoning_tokens: 0 },
    total_tokens: usage.total_tokens,
  };
}

function textPart(text: string): object {
  return { type: 'output_text', text, annotations: [], logprobs: [] };
}

function summaryPart(text: string): object {
  return { type: 'summary_text', text };
}

/** How an item ended. Arguments of calls are whole also where the tokens are used up. */
function endOf({ type }: Item, isCut: boolean): ItemStatus {
  return isCut && type !== 'function_call' ? 'incomplete' : 'completed';
}

function itemOf({ type, id, text, name, callId }: Item, status: ItemStatus): object {
  const isDone = status !== 'in_progress';
  if (type === 'message') return { type, id, status, role: 'assistant', content: isDone ? [textPart(text)] : [] };
  if (type === 'reasoning') return { type, id, summary: isDone ? [summaryPart(text)] : [] };
  return { type, id, status, call_id: callId, name, arguments: text };
}
