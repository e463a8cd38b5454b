/** Forms of calls and reasoning, found in templates with the structure of well-known models'. */
import { describe, expect, it } from 'vitest';
import { threadMilliseconds } from '../time-limit.js';
import { HERMES, opensReasoning } from './answer-form.js';
import { applyChatTemplate, type ChatMessage } from './chat.js';
import { prepareChat, type ToolDescription } from './chat-tools.js';
import { templateForm } from './template-form.js';
import { TEMPLATES } from './testing/chat-templates.js';
import { createTokenizer } from './tokenizer.js';

const variables = { bos_token: '<s>', eos_token: '</s>' };
const chatOf = (source: string) => ({ templates: new Map([['default', source]]), variables });
const formOf = (name: keyof typeof TEMPLATES) => templateForm(chatOf(TEMPLATES[name]));

describe('the form of calls', () => {
  const tagged = { ...HERMES };
  it.each<[keyof typeof TEMPLATES, object | null]>([
    ['qwen25', tagged],
    ['qwen3', tagged],
    ['hermes', tagged],
    [
      'llama31',
      { marker: '{"name"', isFirst: true, open: ': "', middle: ['", "parameters": '], between: null, end: ['}'] },
    ],
    ['llama32', { marker: '{"name"', isFirst: true, between: null, end: ['}'] }],
    [
      'mistral',
      {
        marker: '[TOOL_CALLS]',
        isFirst: false,
        open: ' [{"name": "',
        middle: ['", "arguments": '],
        between: [', "id": "', '"}, {"name": "'],
        end: [', "id": "', '"}]'],
      },
    ],
    [
      'mistral11',
      { marker: '[TOOL_CALLS]', isFirst: false, open: '', middle: ['[ARGS]'], between: ['[TOOL_CALLS]'], end: [''] },
    ],
    ['smollm3', null],
    ['reasoner', null],
    ['pythonic', null],
    ['plain', null],
  ])('%s', (name, form) => {
    const { calls, hasOtherCalls } = formOf(name);
    if (form === null) expect(calls).toBeNull();
    else expect(calls).toMatchObject(form);
    expect(hasOtherCalls).toBe(name === 'pythonic');
  });

  it('is found in templates that take arguments as text', () => {
    const source = TEMPLATES.qwen25.replace('tool_call.arguments | tojson', "('' + tool_call.arguments)");
    expect(templateForm(chatOf(source))).toMatchObject({ takesText: true, calls: HERMES });
  });

  it('is found again without rendering', () => {
    const chat = chatOf(TEMPLATES.qwen3);
    expect(templateForm(chat)).toBe(templateForm(chat));
  });
});

it('reasoning is found where a template opens it or removes it from earlier answers', () => {
  const may = Object.keys(TEMPLATES).filter((name) => formOf(name as keyof typeof TEMPLATES).mayReason);
  expect(may.sort()).toEqual(['qwen3', 'reasoner', 'smollm3']);
  const golden = createTokenizer(new URL('../../test/golden/hf/tokenizer-qwen', import.meta.url).pathname);
  expect(templateForm(golden.chat!)).toMatchObject({ mayReason: true, calls: null, writesTools: false });
  expect(opensReasoning('<a><think>\n')).toBe(true);
  expect(opensReasoning('<a><think>\n\n</think>\n\n')).toBe(false);
});

describe('a conversation with tools', () => {
  const tools: ToolDescription[] = [
    { type: 'function', function: { name: 'get_time', description: 'The time', parameters: { type: 'object' } } },
  ];
  const call = (id: string, given: string | object) => ({
    id,
    type: 'function',
    function: { name: 'get_time', arguments: given },
  });
  const messages: ChatMessage[] = [
    { role: 'user', content: 'When?' },
    { role: 'assistant', content: '', tool_calls: [call('call_0123456789', '{"zone": "UTC"}')] },
    { role: 'tool', content: 'noon', tool_call_id: 'call_0123456789' },
  ];
  const textOf = (name: keyof typeof TEMPLATES, given = messages) => {
    const chat = chatOf(TEMPLATES[name]);
    const prepared = prepareChat(templateForm(chat), given, tools);
    const options = { addGenerationPrompt: true, variables: { tools: prepared.tools } };
    return applyChatTemplate({ ...createTokenizer('byte'), chat }, prepared.messages, options);
  };

  it.each(Object.keys(TEMPLATES) as (keyof typeof TEMPLATES)[])('has its tools, calls and results: %s', (name) => {
    const text = textOf(name);
    for (const part of ['get_time', 'The time', '"zone"', 'UTC', 'noon']) expect(text).toContain(part);
    // An argument that was a text is not quoted again.
    expect(text).toContain('{"zone":');
    const { writesTools, hasOtherCalls } = formOf(name);
    expect(text.includes('These functions can be called')).toBe(!writesTools || hasOtherCalls);
  });

  it('writes the Hermes form where the template has none', () => {
    expect(textOf('plain')).toMatchInlineSnapshot(`
      "system: These functions can be called. Each line between the tags describes one, with a JSON schema of its arguments:
      <tools>
      {"type":"function","function":{"name":"get_time","description":"The time","parameters":{"type":"object"}}}
      </tools>
      A call is one JSON object with the name and the arguments of the function, between two tags:
      <tool_call>
      {"name": "the name", "arguments": {"the name of an argument": "its value"}}
      </tool_call>
      Several calls follow one another. Their results come between the tags <tool_response> and </tool_response>.
      user: When?
      assistant: <tool_call>
      {"name":"get_time","arguments":{"zone":"UTC"}}
      </tool_call>
      user: <tool_response>
      noon
      </tool_response>
      assistant:"
    `);
  });

  it('puts the text of the tools into the first message of the user where there is no system message', () => {
    const source =
      "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}";
    const prepared = prepareChat(templateForm(chatOf(source)), messages, tools);
    expect(prepared.messages[0]).toMatchObject({
      role: 'user',
      content: expect.stringMatching(/^These functions.*\n\nWhen\?$/s),
    });
  });

  it('joins results of one turn, and names what is wrong with a call', () => {
    const { messages: joined } = prepareChat(formOf('plain'), [...messages, { role: 'tool', content: 'later' }], tools);
    expect(joined.at(-1)).toEqual({
      role: 'user',
      content: '<tool_response>\nnoon\n</tool_response>\n<tool_response>\nlater\n</tool_response>',
    });
    const wrong = (calls: unknown) => () =>
      prepareChat(formOf('plain'), [{ role: 'assistant', tool_calls: calls }], []);
    expect(wrong([call('a', '{')])).toThrow('messages.0.tool_calls.0.function.arguments: is not JSON');
    expect(wrong([call('a', '[1]')])).toThrow('arguments: expected a JSON object');
    expect(wrong([{ function: {} }])).toThrow('messages.0.tool_calls.0: expected a call');
    expect(wrong(7)).toThrow('messages.0.tool_calls: expected a list');
  });

  it('shortens ids for templates that write them, the same way for a call and its result', () => {
    const text = textOf('mistral');
    const [, id] = /"id": "(\w{9})"/.exec(text) ?? [];
    expect(text).toContain(`"call_id": "${id}"`);
  });
});

it('a hostile template costs at most some seconds', () => {
  const slow = '{% for a in range(1000) %}{% for b in range(1000) %}x{% endfor %}{% endfor %}{{ messages | length }}';
  const startedAt = threadMilliseconds();
  expect(templateForm(chatOf(slow))).toMatchObject({ calls: null, writesTools: false });
  expect(threadMilliseconds() - startedAt).toBeLessThan(20_000);
});
