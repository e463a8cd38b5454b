/** Conversations with tools: the messages and variables that a chat template takes, or their text where it knows no tools. */
import { UsageError } from '../errors.js';
import { HERMES, ID_LENGTH, type TemplateForm } from './answer-form.js';
import type { ChatMessage } from './chat.js';

/** A tool as templates and the OpenAI API describe it. */
export interface ToolDescription {
  readonly type: 'function';
  readonly function: {
    readonly name: string;
    readonly description?: string;
    /** A JSON schema of an object. */
    readonly parameters?: unknown;
  };
}

/** A call in an assistant message. */
interface WrittenCall {
  readonly id?: unknown;
  readonly function: { readonly name: string; readonly arguments: string | object };
}

/** Messages and tools that a template is rendered with. */
export interface PreparedChat {
  readonly messages: readonly ChatMessage[];
  readonly tools: readonly ToolDescription[] | null;
}

/** Writes calls, results and tools in the form that the template knows. Throws a `UsageError` for a call that is not one. */
export function prepareChat(
  form: TemplateForm,
  messages: readonly ChatMessage[],
  tools: readonly ToolDescription[],
): PreparedChat {
  const called = messages.map((message, i) => withCalls(form, message, i));
  const answered = form.writesResults ? called : withResults(called);
  if (tools.length === 0) return { messages: answered, tools: null };
  if (form.writesTools && !form.hasOtherCalls) return { messages: answered, tools };
  return { messages: withToolsText(form, answered, toolsText(tools)), tools: null };
}

function withCalls(form: TemplateForm, message: ChatMessage, index: number): ChatMessage {
  const { tool_calls: calls, ...rest } = message;
  if (message.role === 'tool' && hasIds(form)) return { ...message, tool_call_id: shortId(message['tool_call_id']) };
  if (calls === undefined || calls === null) return message;
  if (!Array.isArray(calls)) throw new UsageError(`messages.${index}.tool_calls: expected a list of calls`);
  if (calls.length === 0) return rest;
  const checked = calls.map((call, i) => checkedCall(call, `messages.${index}.tool_calls.${i}`));
  if (!form.calls)
    return { ...rest, content: [textOf(message), ...checked.map(hermesCall)].filter(Boolean).join('\n') };
  const written = checked.map(({ id, function: { name, arguments: given } }) => ({
    id: hasIds(form) ? shortId(id) : id,
    type: 'function',
    function: { name, arguments: form.takesText ? JSON.stringify(given) : given },
  }));
  return { ...rest, content: message.content ?? '', tool_calls: written };
}

function checkedCall(call: unknown, place: string): WrittenCall {
  const { id, function: of } = (call ?? {}) as { id?: unknown; function?: { name?: unknown; arguments?: unknown } };
  if (typeof of !== 'object' || of === null || typeof of.name !== 'string')
    throw new UsageError(`${place}: expected a call of a function with its name`);
  return { id, function: { name: of.name, arguments: argumentsOf(of.arguments, `${place}.function.arguments`) } };
}

/** Templates print an object as JSON; a text would be quoted. */
function argumentsOf(given: unknown, place: string): object {
  let value: unknown = given ?? {};
  if (typeof value === 'string')
    try {
      value = value.trim() === '' ? {} : (JSON.parse(value) as unknown);
    } catch {
      throw new UsageError(`${place}: is not JSON`);
    }
  if (typeof value !== 'object' || value === null || Array.isArray(value))
    throw new UsageError(`${place}: expected a JSON object`);
  return value;
}

function hermesCall({ function: { name, arguments: given } }: WrittenCall): string {
  const call = JSON.stringify({ name, arguments: given });
  return `${HERMES.marker}\n${call}\n</tool_call>`;
}

/** Results as messages of the user, those of one turn in one message: many templates want the roles to alternate. */
function withResults(messages: readonly ChatMessage[]): ChatMessage[] {
  const all: ChatMessage[] = [];
  let wasResult = false;
  for (const message of messages) {
    const isResult = message.role === 'tool';
    const text = isResult ? `<tool_response>\n${textOf(message)}\n</tool_response>` : '';
    const last = all.at(-1);
    if (!isResult) all.push(message);
    else if (wasResult && last) all[all.length - 1] = { role: 'user', content: `${textOf(last)}\n${text}` };
    else all.push({ role: 'user', content: text });
    wasResult = isResult;
  }
  return all;
}

/** The text that describes tools to a model whose template does not. */
function toolsText(tools: readonly ToolDescription[]): string {
  return [
    'These functions can be called. Each line between the tags describes one, with a JSON schema of its arguments:',
    `<tools>\n${tools.map((tool) => JSON.stringify(tool)).join('\n')}\n</tools>`,
    'A call is one JSON object with the name and the arguments of the function, between two tags:',
    '<tool_call>\n{"name": "the name", "arguments": {"the name of an argument": "its value"}}\n</tool_call>',
    'Several calls follow one another. Their results come between the tags <tool_response> and </tool_response>.',
  ].join('\n');
}

function withToolsText(form: TemplateForm, messages: readonly ChatMessage[], text: string): readonly ChatMessage[] {
  if (!form.takesSystem) return beforeUser(messages, text);
  const [first, ...rest] = messages;
  if (first?.role !== 'system') return [{ role: 'system', content: text }, ...messages];
  return [{ ...first, content: `${textOf(first)}\n\n${text}` }, ...rest];
}

/** The text as the beginning of the first message of the user, for templates without a system message. */
function beforeUser(messages: readonly ChatMessage[], text: string): readonly ChatMessage[] {
  const at = messages.findIndex(({ role }) => role === 'user');
  return messages.map((message, i) => (i === at ? { ...message, content: `${text}\n\n${textOf(message)}` } : message));
}

function textOf({ content }: ChatMessage): string {
  return typeof content === 'string' ? content : '';
}

function hasIds({ calls }: TemplateForm): boolean {
  return calls !== null && [calls.middle, calls.between ?? [], calls.end].some(({ length }) => length > 1);
}

/** The same short id for the same id: templates that write ids refuse long ones. */
function shortId(id: unknown): string {
  const text = String(id ?? '');
  if (new RegExp(`^[A-Za-z0-9]{${ID_LENGTH}}$`).test(text)) return text;
  let hash = 0xcbf29ce484222325n;
  for (const byte of Buffer.from(text)) hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  return hash.toString(36).padStart(ID_LENGTH, '0').slice(-ID_LENGTH);
}
