/** Tools in chats, through the official client, with random weights: every call parses and satisfies its schema. */
import OpenAI from 'openai';
import { afterAll, describe, expect, it } from 'vitest';
import { TEMPLATES } from '../data/testing/chat-templates.js';
import { createTokenizer } from '../data/tokenizer.js';
import { isValid } from '../infer/structured/testing/validate.js';
import { tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import type { TextSource } from '../infer/text-source.js';
import { LocalHost } from './host.js';
import { type RunningServer, startServer } from './server.js';

const config = tinyConfig();
const source: TextSource = { config, model: tinyModel(config), tokenizer: createTokenizer('byte') };
const open: { server: RunningServer; host: LocalHost }[] = [];
const log: string[] = [];

async function start(template: keyof typeof TEMPLATES) {
  const host = new LocalHost(source, { cacheBytes: 2 ** 27, prefixCacheBytes: 2 ** 24, maxContext: 4000, tile: 64 });
  const options = { id: 'tiny', port: 0, chatTemplate: TEMPLATES[template], log: (line: string) => log.push(line) };
  const server = await startServer(host, options);
  open.push({ server, host });
  return new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'any', maxRetries: 0 });
}

afterAll(async () => {
  for (const { server, host } of open) {
    await server.drain(0);
    await host.close();
    expect(host.stats().pageBytes).toBe(0);
  }
  source.model.free();
});

const weather = {
  type: 'object',
  properties: { city: { type: 'string', maxLength: 12 }, unit: { enum: ['c', 'f'] } },
  required: ['city'],
};
const sum = { type: 'object', properties: { a: { type: 'integer' }, b: { type: 'integer' } }, required: ['a', 'b'] };
const schemas: Readonly<Record<string, object>> = { get_weather: weather, add: sum };
const tools = Object.entries(schemas).map(([name, parameters]) => ({
  type: 'function' as const,
  function: { name, description: `Calls ${name}`, parameters: parameters as Record<string, unknown> },
}));
const BASE = {
  model: 'tiny',
  messages: [{ role: 'user' as const, content: 'Weather?' }],
  tools,
  max_tokens: 200,
};

type Calls = { name: string; arguments: string }[];

function expectCalls(calls: Calls): void {
  for (const { name, arguments: text } of calls) {
    expect(Object.keys(schemas)).toContain(name);
    expect(isValid(JSON.parse(text), schemas[name]), text).toBe(true);
  }
}

/** A stream put together as clients do. */
async function streamed(client: OpenAI, body: object) {
  const calls: { id: string; name: string; arguments: string }[] = [];
  let [content, reasoning] = ['', ''];
  let finish: string | null = null;
  const stream = await client.chat.completions.create({ ...BASE, ...body, stream: true });
  for await (const { choices } of stream) {
    const [{ delta, finish_reason: reason }] = choices;
    finish = reason ?? finish;
    content += delta.content ?? '';
    reasoning += (delta as { reasoning_content?: string }).reasoning_content ?? '';
    for (const { index, id, type, function: of } of delta.tool_calls ?? []) {
      if (id !== undefined) {
        expect([index, type, of?.arguments]).toEqual([calls.length, 'function', '']);
        calls.push({ id, name: of?.name ?? '', arguments: '' });
      } else calls[index].arguments += of?.arguments ?? '';
    }
  }
  expect(new Set(calls.map(({ id }) => id)).size).toBe(calls.length);
  return { content, reasoning, finish, calls: calls.map(({ name, arguments: text }) => ({ name, arguments: text })) };
}

async function whole(client: OpenAI, body: object) {
  const { choices } = await client.chat.completions.create({ ...BASE, ...body });
  const { message, finish_reason: finish } = choices[0];
  const calls = (message.tool_calls ?? []).flatMap((call) => (call.type === 'function' ? [call.function] : []));
  if (calls.length > 0 && message.content !== null) expect(message.content.trim()).not.toBe('');
  const reasoning = (message as { reasoning_content?: string }).reasoning_content ?? '';
  return { content: message.content ?? '', reasoning, finish, calls };
}

describe.each(['qwen25', 'llama31', 'mistral', 'mistral11', 'smollm3', 'pythonic', 'reasoner'] as const)(
  'tools with the template %s',
  (template) => {
    it('required: one call or more, each a document of its schema, streamed or not, cut or not', async () => {
      const client = await start(template);
      const finished = new Set<string | null>();
      for (let seed = 0; seed < 6; seed++) {
        const body = { tool_choice: 'required', seed, temperature: 1.5, max_tokens: seed < 2 ? 120 : 400 };
        const answer = await whole(client, body);
        expect(answer.calls.length).toBeGreaterThan(0);
        expectCalls(answer.calls);
        expect(answer.content).toBe('');
        finished.add(answer.finish);
        expect(await streamed(client, body)).toEqual(answer);
      }
      expect([...finished].every((reason) => reason === 'tool_calls' || reason === 'length')).toBe(true);
    });
  },
);

describe('tool_choice', () => {
  it('names a function; without parallel calls there is one', async () => {
    const client = await start('qwen25');
    for (let seed = 0; seed < 5; seed++) {
      const choice = { type: 'function', function: { name: 'add' } };
      const body = { tool_choice: choice, parallel_tool_calls: false, seed, max_tokens: 150 };
      const { calls, finish } = await whole(client, body);
      expect(calls.map(({ name }) => name)).toEqual(['add']);
      expectCalls(calls);
      expect(['tool_calls', 'length']).toContain(finish);
    }
  });

  it('auto: free text as without tools; none: tools are not in the prompt', async () => {
    const client = await start('qwen25');
    const body = { seed: 3, max_tokens: 40, stop: ['zz'] };
    const { choices, usage } = await client.chat.completions.create({ ...BASE, ...body });
    expect(choices[0].message.tool_calls).toBeUndefined();
    expect(choices[0].message.content).not.toBe('');
    const none = await client.chat.completions.create({ ...BASE, ...body, tool_choice: 'none' });
    const without = await client.chat.completions.create({ ...BASE, ...body, tools: [] });
    expect(none.usage?.prompt_tokens).toBe(without.usage?.prompt_tokens);
    expect(usage?.prompt_tokens).toBeGreaterThan(300 + (without.usage?.prompt_tokens ?? 0));
    expect(await streamed(client, body)).toMatchObject({ content: choices[0].message.content, calls: [] });
  });

  it('auto with a response_format: a document or calls', async () => {
    const client = await start('qwen25');
    const schema = { type: 'object', properties: { done: { type: 'boolean' } }, required: ['done'] };
    const body = { response_format: { type: 'json_schema', json_schema: { name: 'end', schema } }, max_tokens: 150 };
    for (let seed = 0; seed < 6; seed++) {
      const { content, calls } = await whole(client, { ...body, seed, temperature: 2 });
      expectCalls(calls);
      if (calls.length === 0) expect(isValid(JSON.parse(content), schema)).toBe(true);
    }
  });
});

it('a conversation goes on after a call', async () => {
  const client = await start('mistral');
  const call = { id: 'call_1', type: 'function' as const, function: { name: 'add', arguments: '{"a": 1, "b": 2}' } };
  const answer = await client.chat.completions.create({
    ...BASE,
    messages: [
      ...BASE.messages,
      { role: 'assistant', tool_calls: [call] },
      { role: 'tool', tool_call_id: 'call_1', content: '3' },
    ],
    max_tokens: 5,
  });
  expect(answer.choices).toHaveLength(1);
});

it('reasoning is apart from the content, streamed or not, and comes before required calls', async () => {
  const client = await start('reasoner');
  const body = { tools: undefined, max_tokens: 60, seed: 5 };
  const cut = await whole(client, body);
  expect(cut).toMatchObject({ content: '', finish: 'length' });
  expect(cut.reasoning).not.toBe('');
  expect(await streamed(client, body)).toEqual(cut);
  const schema = { type: 'object', properties: { a: { type: 'boolean' } }, required: ['a'] };
  const format = { type: 'json_schema', json_schema: { name: 'a', schema } };
  const formed = await whole(client, { ...body, response_format: format });
  expect(formed.reasoning).not.toBe('');
  expect(JSON.parse(formed.content)).toHaveProperty('a');
  const { reasoning, calls } = await whole(client, { tool_choice: 'required', max_tokens: 150, seed: 1 });
  expect(reasoning).not.toBe('');
  expectCalls(calls);
});

it('counts the tokens of the reasoning, in every protocol', async () => {
  const client = await start('reasoner');
  const { usage } = await client.chat.completions.create({
    ...BASE,
    tools: undefined,
    max_tokens: 30,
    seed: 5,
  } as never);
  expect(usage).toMatchObject({ completion_tokens: 30, completion_tokens_details: { reasoning_tokens: 30 } });
  const { usage: called } = await client.chat.completions.create({ ...BASE, tool_choice: 'required', seed: 1 });
  const { reasoning_tokens: thought = 0 } = called?.completion_tokens_details ?? {};
  expect(thought).toBeGreaterThan(0);
  expect(thought).toBeLessThan(called?.completion_tokens ?? 0);
  const { usage: other } = await client.responses.create({ model: 'tiny', input: 'Weather?', max_output_tokens: 9 });
  expect(other).toMatchObject({ output_tokens: 9, output_tokens_details: { reasoning_tokens: 9 } });
  const url = `${open.at(-1)?.server.url}/v1/messages`;
  const body = { model: 'tiny', max_tokens: 9, messages: BASE.messages };
  const answer = await fetch(url, { method: 'POST', body: JSON.stringify(body) });
  expect(await answer.json()).toMatchObject({ usage: { output_tokens_details: { thinking_tokens: 9 } } });
  const plain = await (await start('qwen25')).chat.completions.create({ ...BASE, max_tokens: 3 });
  expect(plain.usage).not.toHaveProperty('completion_tokens_details');
});

const LONG_MESSAGE = { messages: BASE.messages, max_tokens: 3000 };
// The answer takes some milliseconds: it may be whole before the server stops, and then the test is made again.
it.each([
  [
    '/v1/responses',
    { input: 'Weather?', stream: true, max_output_tokens: 3000 },
    /event: response\.failed\ndata: .*the server stops[^\n]*\n\n$/,
  ],
  ['/v1/messages', { ...LONG_MESSAGE, stream: true }, /event: error\ndata: .*"overloaded_error"[^\n]*\n\n$/],
  ['/v1/messages', LONG_MESSAGE, /"overloaded_error"/],
])(
  'tells a client of %s that the server stopped, instead of an answer that looks whole',
  { retry: 9 },
  async (path, body, end) => {
    await start('qwen25');
    const { server, host } = open.at(-1)!;
    const [answer] = await Promise.all([
      fetch(server.url + path, { method: 'POST', body: JSON.stringify({ model: 'tiny', ...body }) }),
      expect
        .poll(() => host.stats().running, { timeout: 3_000, interval: 1 })
        .toBe(1)
        .then(() => server.drain(0)),
    ]);
    expect(await answer.text()).toMatch(end);
    expect(answer.status).toBe('stream' in body ? 200 : 503);
  },
);

it("answers Open WebUI's request: tools in every chat, schemas with titles and defaults, a stream with its usage", async () => {
  const client = await start('smollm3');
  const parameters = {
    type: 'object',
    properties: {
      query: { type: 'string', description: 'The search query to look up' },
      count: { anyOf: [{ type: 'integer' }, { type: 'null' }], default: 5, description: 'Number of results' },
      filters: { type: 'object', additionalProperties: true, default: {}, title: 'Filters' },
      tags: { type: 'array', items: { type: 'string' }, default: [] },
    },
    required: ['query'],
  };
  const body = {
    ...{ model: 'tiny', stream: true as const, stream_options: { include_usage: true }, max_tokens: 60 },
    messages: [
      { role: 'system' as const, content: 'User Context:\n\n' },
      { role: 'user' as const, content: [{ type: 'text' as const, text: 'What is new?' }] },
    ],
    tools: [
      { type: 'function' as const, function: { name: 'search_web', description: 'Search the web.', parameters } },
      {
        type: 'function' as const,
        function: {
          name: 'get_current_timestamp',
          description: 'Now.',
          parameters: { type: 'object', properties: {}, required: [] },
        },
      },
    ],
    ...{ temperature: 0.8, seed: 4, stop: ['<end>'], frequency_penalty: 0.1, logit_bias: {} },
  };
  let [text, tokens, finish] = ['', 0, ''];
  for await (const { choices, usage } of await client.chat.completions.create(body)) {
    text += choices[0]?.delta.content ?? '';
    finish = choices[0]?.finish_reason ?? finish;
    tokens = usage?.completion_tokens ?? tokens;
  }
  expect(text).not.toBe('');
  expect(tokens).toBeGreaterThan(0);
  expect(['stop', 'length', 'tool_calls']).toContain(finish);
});

it('says once in the log that calls of the template are not JSON', async () => {
  const client = await start('pythonic');
  log.length = 0;
  for (let i = 0; i < 3; i++) await whole(client, { max_tokens: 2 });
  expect(log.filter((line) => line.includes('in a form that is not JSON'))).toHaveLength(1);
});

it.each<[object, RegExp]>([
  [
    {
      tools: [
        { type: 'function', function: { name: 'f', parameters: { type: 'object', properties: { a: { not: {} } } } } },
      ],
    },
    /tools\.0 \(f\): schema \/properties\/a: the keyword "not" is not supported/,
  ],
  [
    {
      tools: [tools[0], { type: 'function', function: { name: 'f', parameters: { properties: { a: { not: {} } } } } }],
      tool_choice: { type: 'function', function: { name: 'f' } },
    },
    /tools\.1 \(f\): schema \/properties\/a: the keyword "not" is not supported/, // its place in the request
  ],
  [{ tools: [tools[0], tools[0]] }, /tools\.1\.function\.name: another tool has this name/],
  [
    { tools: [{ type: 'function', function: { name: 'f', parameters: { type: 'string' } } }] },
    /arguments are an object/,
  ],
  [{ tools: [{ type: 'function', function: { name: 'a b' } }] }, /tools\.0\.function\.name: expected up to 128/],
  [
    { tool_choice: { type: 'function', function: { name: 'other' } } },
    /tool_choice: tools has no function of this name/,
  ],
  [{ tool_choice: 'required', tools: [] }, /tool_choice: needs at least one tool/],
  [{ tool_choice: 'required', max_tokens: 5 }, /tools: the shortest document has \d+ tokens, and at most 5/],
  [{ ignore_eos: true }, /ignore_eos is not supported together with tools/],
  [{ chat_template_kwargs: { messages: [] } }, /chat_template_kwargs: expected none of/],
  [{ messages: [{ role: 'assistant', tool_calls: [{ function: { name: 'f', arguments: '{' } }] }] }, /is not JSON/],
])('refuses %j', async (body, message) => {
  const client =
    open.length > 0
      ? new OpenAI({ baseURL: `${open[0].server.url}/v1`, apiKey: 'x', maxRetries: 0 })
      : await start('qwen25');
  await expect(client.chat.completions.create({ ...BASE, ...body } as typeof BASE)).rejects.toThrow(message);
});
