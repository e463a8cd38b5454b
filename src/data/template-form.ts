/**
 * How a chat template writes what a model answers. Found by rendering marked messages: a call in an assistant message, and
 * content in its place; the text around the marks is the form.
 */
import { threadMilliseconds } from '../time-limit.js';
import { type CallForm, REASONING, type TemplateForm, type WithIds } from './answer-form.js';
import { type ChatMessage, renderChat } from './chat.js';
import type { ChatTemplates } from './tokenizer.js';

/** Processor time after which the rest of a template is not looked at. By the clock, the form would depend on other programs. */
const MAX_MS = 1000;
const CONTENT = 'Qmarkedcontent';
const NAMES = ['qmarkednamea', 'qmarkednameb'] as const;
/** `ID_LENGTH` letters and digits: Mistral's template refuses others, and a regular expression finds them. */
const IDS = ['qmarkida1', 'qmarkidb2'] as const;
const ARGUMENTS = [{ qmarkkeya: 'qmarkvaluea' }, { qmarkkeyb: 'qmarkvalueb' }] as const;
const USER: ChatMessage = { role: 'user', content: 'Hello' };

const forms = new WeakMap<ChatTemplates, Map<string, TemplateForm>>();

/** The form of a template, found once. `template`: its name. */
export function templateForm(chat: ChatTemplates, template = 'default'): TemplateForm {
  const known = forms.get(chat) ?? new Map<string, TemplateForm>();
  const form = known.get(template) ?? findForm(new Probe(chat, template));
  forms.set(chat, known.set(template, form));
  return form;
}

/** Renders marked messages; null where the template refuses them. */
class Probe {
  readonly #chat: ChatTemplates;
  readonly #template: string;
  readonly #startedAt = threadMilliseconds();

  constructor(chat: ChatTemplates, template: string) {
    this.#chat = chat;
    this.#template = template;
  }

  text(messages: readonly ChatMessage[], variables: Readonly<Record<string, unknown>> = {}): string | null {
    // A template that is slow for every message must not be so a dozen times.
    if (threadMilliseconds() - this.#startedAt > MAX_MS) return null;
    const values = { messages, add_generation_prompt: false, tools: null, ...variables };
    try {
      return renderChat(this.#chat, this.#template, values, messages.length);
    } catch {
      return null; // a template refuses by an error of its own, and what it refuses is the answer
    }
  }
}

function findForm(probe: Probe): TemplateForm {
  const parameters = { type: 'object', properties: { qmarkkeya: { type: 'string' } } };
  const tools = NAMES.map((name) => ({
    type: 'function',
    function: { name, description: name, parameters },
  }));
  const writesTools = probe.text([USER], { tools })?.includes(NAMES[0]) ?? false;
  const takesSystem = probe.text([{ role: 'system', content: CONTENT }, USER])?.includes(CONTENT) ?? false;
  const found = [false, true].map((asText) => callForm(probe, tools, asText));
  const isJson = (form: CallForm | 'other' | null) => form !== null && form !== 'other';
  const takesText = !isJson(found[0]) && isJson(found[1]);
  const calls = found[takesText ? 1 : 0];
  const asked = assistant(0, 1, takesText);
  const result = { role: 'tool', content: CONTENT, tool_call_id: IDS[0], name: NAMES[0] };
  const known = isJson(calls) ? asked : { role: 'assistant', content: NAMES[0] };
  return {
    calls: calls === 'other' ? null : calls,
    hasOtherCalls: found.includes('other') && !isJson(calls),
    takesText,
    writesTools,
    writesResults:
      (writesTools || isJson(calls)) && (probe.text([USER, known, result], { tools })?.includes(CONTENT) ?? false),
    takesSystem,
    mayReason: mayReason(probe),
  };
}

/** An assistant message with the calls `from` to before `to`. */
function assistant(from: number, to: number, asText: boolean): ChatMessage {
  const calls = NAMES.slice(from, to).map((name, i) => {
    const value = ARGUMENTS[from + i];
    return {
      id: IDS[from + i],
      type: 'function',
      function: { name, arguments: asText ? JSON.stringify(value) : value },
    };
  });
  return { role: 'assistant', content: '', tool_calls: calls };
}

function callForm(probe: Probe, tools: readonly object[], asText: boolean): CallForm | 'other' | null {
  const plain = probe.text([USER, { role: 'assistant', content: CONTENT }], { tools });
  const one = probe.text([USER, assistant(0, 1, asText)], { tools });
  if (plain === null || one === null) return null;
  const [head, tail] = plain.split(CONTENT);
  const from = commonStart(head, one);
  const call = findCall(one, 0, from);
  if (!call) return one.indexOf(NAMES[0], from) >= 0 ? 'other' : null;
  const before = one.slice(from, call.name);
  const rest = one.slice(call.end);
  const end = rest.endsWith(tail ?? '') ? rest.slice(0, rest.length - (tail ?? '').length) : /^[\s}\]]*/.exec(rest)![0];
  const brace = before.search(/(\[\s*)?\{/);
  const marker = (brace < 0 ? before : before.slice(0, brace)).trim();
  const first = marker === '' ? (/^\s*(\[\s*)?\{\s*"\w+"/.exec(before)?.[0] ?? '').trimStart() : marker;
  if (first === '') return 'other'; // nothing tells a call from a text
  const open = before.slice(before.indexOf(first) + first.length);
  const middle = withoutIds(one.slice(call.name + NAMES[0].length, call.start));
  return { marker: first, isFirst: marker === '', open, middle, between: between(), end: withoutIds(end.trimEnd()) };

  /** Null if the template refuses two calls, or writes them in another way. */
  function between(): WithIds | null {
    const two = probe.text([USER, assistant(0, 2, asText)], { tools });
    const left = two === null ? null : findCall(two, 0, from);
    const right = two === null ? null : findCall(two, 1, from);
    if (two === null || !left || !right || right.name < left.end) return null;
    const isSame = two.slice(0, left.name) === one!.slice(0, call!.name);
    return isSame ? withoutIds(two.slice(left.end, right.name)) : null;
  }
}

/** Places in the text of call `i`: its name, and its arguments; null if they are not one JSON object after the name. */
function findCall(text: string, i: number, from: number): { name: number; start: number; end: number } | null {
  const name = text.indexOf(NAMES[i], from);
  const key = text.indexOf(Object.keys(ARGUMENTS[i])[0], name);
  if (name < 0 || key < 0 || text.indexOf(NAMES[i], name + 1) >= 0) return null;
  const start = text.lastIndexOf('{', key);
  const end = text.indexOf('}', key) + 1;
  if (start < name || end === 0) return null;
  try {
    const isSame = JSON.stringify(JSON.parse(text.slice(start, end))) === JSON.stringify(ARGUMENTS[i]);
    return isSame ? { name, start, end } : null;
  } catch {
    return null; // not JSON, such as arguments in tags
  }
}

function withoutIds(text: string): WithIds {
  return text.split(new RegExp(IDS.join('|')));
}

function commonStart(a: string, b: string): number {
  let length = 0;
  while (length < a.length && a[length] === b[length]) length += 1;
  return length;
}

/** Whether the template opens reasoning, writes it, or removes it from answers of earlier turns. */
function mayReason(probe: Probe): boolean {
  const { open, close } = REASONING;
  const inside = `${open}\n${CONTENT}\n${close}\n\nHello`;
  const turns = [USER, { role: 'assistant', content: inside }, USER];
  const texts = [
    probe.text([USER], { add_generation_prompt: true }),
    probe.text([USER], { add_generation_prompt: true, enable_thinking: false }),
    probe.text([USER, { role: 'assistant', content: 'Hello', reasoning_content: CONTENT }]),
  ];
  const removed = probe.text(turns);
  return texts.some((text) => text?.includes(open)) || (removed !== null && !removed.includes(CONTENT));
}
