/** The HTTP interface, driven by the official client of OpenAI and by raw sockets, on a real engine. */
import { once } from 'node:events';
import { connect } from 'node:net';
import OpenAI, { APIError, APIUserAbortError, AuthenticationError, NotFoundError, RateLimitError } from 'openai';
import { LengthFinishReasonError } from 'openai/core/error';
import { zodResponseFormat } from 'openai/helpers/zod';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { z } from 'zod';
import { createTokenizer } from '../data/tokenizer.js';
import { TrefoilError } from '../errors.js';
import type { EngineOptions } from '../infer/engine/interface.js';
import { tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import type { TextSource } from '../infer/text-source.js';
import type { LanguageModel } from '../model/language-model.js';
import { Tensor } from '../tensor/tensor.js';
import { LocalHost } from './host.js';
import { type RunningServer, type ServerOptions, startServer } from './server.js';

const config = tinyConfig();
const source: TextSource = { config, model: tinyModel(config), tokenizer: createTokenizer('byte') };
const log: string[] = [];
const open: { server: RunningServer; host: LocalHost }[] = [];
const TEMPLATE =
  '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}';
let client: OpenAI;
let url: string;

async function start(options: Partial<ServerOptions> = {}, engine: EngineOptions = {}) {
  const limits = { cacheBytes: 2 ** 27, prefixCacheBytes: 2 ** 24, maxContext: 2000, tile: 64 };
  const host = new LocalHost(source, { ...limits, ...engine });
  const server = await startServer(host, { id: 'tiny', port: 0, log: (line) => log.push(line), ...options });
  open.push({ server, host });
  const openai = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'secret', maxRetries: 0 });
  return { server, host, openai };
}

beforeAll(async () => {
  const started = await start({ chatTemplate: TEMPLATE });
  client = started.openai;
  url = started.server.url;
});

afterAll(async () => {
  for (const { server, host } of open) {
    await server.drain(0);
    await host.close();
    expect(host.stats().pageBytes).toBe(0);
  }
  source.model.free();
});

/** Parameters that the API of OpenAI does not have. */
const extra = <T extends object>(body: T) => body as T & Record<never, never>;
const BASE = { model: 'tiny', prompt: 'Once upon', max_tokens: 12, seed: 7 };

describe('POST /v1/completions', () => {
  it('answers a prompt; the same seed gives the same text, streamed or not', async () => {
    const whole = await client.completions.create(BASE);
    expect(whole).toMatchObject({ object: 'text_completion', model: 'tiny', usage: { prompt_tokens: 9 } });
    expect(whole.usage).toMatchObject({ total_tokens: 9 + (whole.usage?.completion_tokens ?? 0) });
    let text = '';
    const finish: (string | null)[] = [];
    let usage: OpenAI.CompletionUsage | null | undefined = null;
    const stream = await client.completions.create({ ...BASE, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) {
      if (chunk.choices.length === 0) usage = chunk.usage;
      for (const choice of chunk.choices) {
        text += choice.text;
        finish.push(choice.finish_reason);
      }
    }
    expect(text).toBe(whole.choices[0].text);
    expect(finish.at(-1)).toBe(whole.choices[0].finish_reason);
    expect(finish.slice(0, -1).every((reason) => reason === null)).toBe(true);
    expect(usage).toEqual(whole.usage);
    expect((await client.completions.create({ ...BASE, seed: 8 })).choices[0].text).not.toBe(text);
  });

  it('numbers choices by prompt and n, each as it would be alone', async () => {
    const prompt = ['first', 'a second prompt'];
    const { choices, usage } = await client.completions.create({ ...BASE, prompt, n: 3 });
    expect(choices.map(({ index }) => index)).toEqual([0, 1, 2, 3, 4, 5]);
    expect(usage?.prompt_tokens).toBe(5 + 15);
    for (const index of [0, 4]) {
      const alone = { ...BASE, prompt: prompt[Math.floor(index / 3)], seed: BASE.seed + (index % 3) };
      expect((await client.completions.create(alone)).choices[0].text).toBe(choices[index].text);
    }
  });

  it('takes tokens, stop strings, and parameters of its own', async () => {
    const tokens = [...Buffer.from('Once upon')];
    const texts = [BASE.prompt, tokens, [tokens]].map(async (prompt) => {
      const body = extra({ ...BASE, prompt, top_k: 5, min_p: 0.01, repetition_penalty: 1.1, ignore_eos: true });
      return (await client.completions.create({ ...body, min_tokens: 3, return_token_ids: true } as typeof body))
        .choices[0];
    });
    const [first, ...others] = await Promise.all(texts);
    for (const other of others) expect(other).toEqual(first);
    expect(first).toMatchObject({ prompt_token_ids: tokens, finish_reason: 'length' });
    expect((first as unknown as { token_ids: number[] }).token_ids).toHaveLength(12);
    const stop = [first.text.slice(4, 6)];
    const cut = await client.completions.create(
      extra({ ...BASE, top_k: 5, min_p: 0.01, repetition_penalty: 1.1, ignore_eos: true, min_tokens: 3, stop }),
    );
    expect(cut.choices[0]).toMatchObject({
      text: first.text.slice(0, first.text.indexOf(stop[0])),
      finish_reason: 'stop',
    });
  });

  it('echoes token arrays with the log-probabilities that the loss of the model is made of', async () => {
    const prompts = [80, 33, 150].map((length, seed) =>
      Array.from({ length }, (_, i) => (i * i * 7 + i * 91 + seed) % 256),
    );
    const body = { model: 'tiny', prompt: prompts, max_tokens: 1, logprobs: 1, echo: true, temperature: 0 };
    const { choices } = await client.completions.create(body);
    for (const [i, prompt] of prompts.entries()) {
      const { token_logprobs: values, tokens, top_logprobs: top, text_offset: offsets } = choices[i].logprobs!;
      expect(tokens).toHaveLength(prompt.length + 1);
      expect(offsets).toHaveLength(prompt.length + 1);
      expect(values?.[0]).toBeNull();
      const sum = values!.slice(1, prompt.length).reduce((total, value) => total + value, 0);
      expect(-sum).toBeCloseTo(lossSum(prompt), 3);
      // The generated token is the most probable one: a client finds its name with the best value.
      const best = Object.entries(top!.at(-1)!).sort(([, a], [, b]) => b - a)[0];
      expect(best).toEqual([tokens!.at(-1), values!.at(-1)]);
    }
  });

  it('reports progress of a long prompt, and cached tokens of its repetition', async () => {
    const body = extra({
      ...BASE,
      prompt: 'x'.repeat(700),
      max_tokens: 1,
      stream: true as const,
      return_progress: true,
    });
    const progress: unknown[] = [];
    const { data: stream, response } = await client.completions.create(body).withResponse();
    expect(response.headers.get('x-accel-buffering')).toBe('no');
    for await (const chunk of stream) if ('prompt_progress' in chunk) progress.push(chunk.prompt_progress);
    expect(progress.length).toBeGreaterThan(4);
    expect(progress.at(-1)).toMatchObject({ total: 700, cached: 0, processed: 700, seconds_left: 0 });
    const again = await client.completions.create({ ...BASE, prompt: 'x'.repeat(700), max_tokens: 1 });
    expect(again.usage?.prompt_tokens_details?.cached_tokens).toBe(699);
    const salted = await client.completions.create(extra({ ...BASE, prompt: 'x'.repeat(700), cache_salt: 'mine' }));
    expect(salted.usage?.prompt_tokens_details?.cached_tokens).toBe(0);
  });
});

/** Sum of the losses of all tokens but the first, by the code of `eval loss`. */
function lossSum(tokens: readonly number[]): number {
  const { model } = source;
  const count = tokens.length - 1;
  const ids = Tensor.from(model.device, tokens.slice(0, -1), [count], 'i32');
  const targets = Tensor.from(model.device, tokens.slice(1), [count], 'i32');
  const losses = model.losses(ids, targets, { lengths: [count] });
  const sum = Array.from(losses.read()).reduce((total, loss) => total + loss, 0);
  for (const tensor of [ids, targets, losses]) tensor.free();
  return sum;
}

describe('POST /v1/chat/completions', () => {
  const messages = [
    { role: 'system' as const, content: 'Be brief.' },
    { role: 'user' as const, content: [{ type: 'text' as const, text: 'Hello' }] },
  ];

  it('renders the template; a stream begins with the role and ends with an empty delta', async () => {
    const whole = await client.chat.completions.create({ model: 'tiny', messages, max_tokens: 10, seed: 3 });
    const prompt = 'system: Be brief.\nuser: Hello\nassistant:';
    const same = await client.completions.create({ ...BASE, prompt, max_tokens: 10, seed: 3 });
    expect(whole.choices[0].message).toMatchObject({ role: 'assistant', content: same.choices[0].text });
    const deltas: object[] = [];
    const finish: (string | null)[] = [];
    const stream = await client.chat.completions.create({
      model: 'tiny',
      messages,
      max_tokens: 10,
      seed: 3,
      stream: true,
    });
    for await (const { choices } of stream) {
      deltas.push(choices[0].delta);
      finish.push(choices[0].finish_reason);
    }
    expect(deltas[0]).toEqual({ role: 'assistant', content: '' });
    expect(deltas.at(-1)).toEqual({});
    expect(finish.at(-1)).toBe(whole.choices[0].finish_reason);
    expect(deltas.map((delta) => ('content' in delta ? delta.content : '')).join('')).toBe(same.choices[0].text);
  });

  it('lists log-probabilities', async () => {
    const body = { model: 'tiny', messages, max_completion_tokens: 4, logprobs: true, top_logprobs: 3, temperature: 0 };
    const { choices } = await client.chat.completions.create(body);
    for (const { token, logprob, top_logprobs } of choices[0].logprobs!.content!) {
      expect(top_logprobs).toHaveLength(3);
      expect(top_logprobs[0]).toMatchObject({ token, logprob });
    }
  });

  it('needs a template, and names what is wrong with it', async () => {
    const { openai } = await start();
    await expect(openai.chat.completions.create({ model: 'tiny', messages })).rejects.toThrow('no chat template');
    const strict = await start({ chatTemplate: "{{ raise_exception('no system message') }}" });
    await expect(strict.openai.chat.completions.create({ model: 'tiny', messages })).rejects.toThrow(
      'no system message',
    );
  });
});

describe('response_format', () => {
  const messages = [{ role: 'user' as const, content: 'Who?' }];
  const Person = z.object({
    name: z.string().max(20),
    age: z.int().min(0).max(150),
    mood: z.enum(['glad', 'sad']).nullable(),
    friends: z.array(z.object({ name: z.string(), since: z.number() })).max(3),
  });
  const format = zodResponseFormat(Person, 'person');
  const base = { model: 'tiny', messages, response_format: format };

  it('a schema holds for every seed, whole or streamed, and when max_tokens cuts', async () => {
    const finish = new Set<string>();
    for (let seed = 0; seed < 12; seed++) {
      const body = { ...base, seed, max_tokens: seed < 6 ? 80 : 1500, temperature: 1.5 };
      const whole = await client.chat.completions.create(body);
      const { message, finish_reason: reason } = whole.choices[0];
      expect(() => Person.parse(JSON.parse(message.content!))).not.toThrow();
      finish.add(reason);
      let text = '';
      for await (const { choices } of await client.chat.completions.create({ ...body, stream: true }))
        text += choices[0].delta.content ?? '';
      expect(text).toBe(message.content);
    }
    expect([...finish].sort()).toEqual(['length', 'stop']);
  });

  it('the client parses the answer', async () => {
    // The client refuses answers that were cut, so the seeds are tried until one is not.
    for (let seed = 0; ; seed++) {
      const answer = client.chat.completions.parse({ ...base, seed, max_tokens: 1500 });
      const parsed = await answer.catch((error: unknown) => {
        if (!(error instanceof LengthFinishReasonError) || seed > 30) throw error;
        return null;
      });
      if (!parsed) continue;
      expect(Person.parse(parsed.choices[0].message.parsed)).toEqual(parsed.choices[0].message.parsed);
      return;
    }
  });

  it('json_object gives an object, in completions as well, and for every choice', async () => {
    const body = { ...BASE, max_tokens: 40, n: 4, response_format: { type: 'json_object' } };
    for (const { text } of (await client.completions.create(extra(body))).choices)
      expect(JSON.parse(text)).toEqual(expect.objectContaining({}));
  });

  it('names the keyword that is not supported', async () => {
    const schema = { type: 'object', properties: { a: { type: 'number', multipleOf: 3 } } };
    const body = { ...base, response_format: { type: 'json_schema' as const, json_schema: { name: 'x', schema } } };
    await expect(client.chat.completions.create(body)).rejects.toThrow(
      'schema /properties/a: the keyword "multipleOf" is not supported',
    );
  });
});

describe('other routes', () => {
  it('lists the model', async () => {
    const [model] = (await client.models.list()).data;
    expect(model).toMatchObject({ id: 'tiny', object: 'model', owned_by: 'trefoil' });
    expect(await client.models.retrieve('tiny')).toEqual(model);
    await expect(client.models.retrieve('other')).rejects.toBeInstanceOf(NotFoundError);
  });

  it('tokenizes and detokenizes', async () => {
    const post = async (path: string, body: object) =>
      (await fetch(url + path, { method: 'POST', body: JSON.stringify(body) })).json();
    const { tokens, count } = (await post('/tokenize', { prompt: 'é!' })) as { tokens: number[]; count: number };
    expect([tokens, count]).toEqual([[0xc3, 0xa9, 33], 3]);
    expect(await post('/detokenize', { tokens })).toEqual({ prompt: 'é!' });
    expect(await post('/detokenize', { tokens: [256] })).toMatchObject({ error: { param: 'tokens' } });
  });

  it('reports health and metrics', async () => {
    expect((await fetch(`${url}/health`)).status).toBe(200);
    const text = await (await fetch(`${url}/metrics`)).text();
    const value = (name: string) => Number(new RegExp(`^trefoil:${name} (\\S+)$`, 'm').exec(text)?.[1]);
    expect(value('generation_tokens_total')).toBeGreaterThan(50);
    expect(value('prefix_cache_hits_total')).toBeGreaterThanOrEqual(640);
    expect(value('num_requests_running')).toBe(0);
    expect(value('time_to_first_token_seconds_count')).toBeGreaterThan(5);
    for (const name of [
      'inter_token_latency',
      'e2e_request_latency',
      'request_queue_time',
      'request_prefill_time',
      'request_decode_time',
    ])
      expect(text).toMatch(new RegExp(`^trefoil:${name}_seconds_bucket\\{le="\\+Inf"\\} [1-9]`, 'm'));
    expect(text).toMatch(/^trefoil:request_success_total\{finished_reason="length"\} [1-9]/m);
  });

  it('logs one line of JSON per request', () => {
    const lines = log.map((line) => JSON.parse(line));
    expect(lines.length).toBeGreaterThan(10);
    const completion = lines.find(({ path, status }) => path === '/v1/completions' && status === 200);
    expect(completion).toMatchObject({ method: 'POST', finish: [expect.any(String)] });
    expect(completion.first_token_ms).toBeGreaterThan(0);
    expect(completion).not.toHaveProperty('error');
    for (const value of [completion.ms, completion.first_token_ms]) expect(String(value)).toMatch(/^\d+(\.\d)?$/);
  });
});

describe('errors', () => {
  const failed = async (body: object) => {
    const error = await client.completions.create({ ...BASE, ...body }).then(
      () => null,
      (reason: unknown) => reason,
    );
    if (!(error instanceof APIError)) throw new Error(`not refused: ${JSON.stringify(body)}`);
    return [error.status, error.param, error.code];
  };

  it.each<[object, unknown[]]>([
    [{ logit_bias: { 256: 1 } }, [400, 'logit_bias', null]],
    [{ logit_bias: { 5: 101 } }, [400, 'logit_bias', null]],
    [{ logit_bias: { x: 1 } }, [400, 'logit_bias', null]],
    [{ frequency_penalty: 2.1 }, [400, 'frequency_penalty', null]],
    [{ best_of: 2 }, [400, 'best_of', 'unsupported_parameter']],
    [{ response_format: { type: 'grammar' } }, [400, 'response_format.type', null]],
    [{ response_format: { type: 'json_object' }, stop: 'x' }, [400, 'stop', 'unsupported_parameter']],
    [{ response_format: { type: 'json_object' }, max_tokens: 1 }, [400, 'response_format', null]],
    [
      { response_format: { type: 'json_schema', json_schema: { schema: { not: {} } } } },
      [400, 'response_format', null],
    ],
    [{ max_tokens: -1 }, [400, 'max_tokens', null]],
    [{ temperature: 'hot' }, [400, 'temperature', null]],
    [{ stop: new Array(257).fill('a') }, [400, 'stop', null]],
    [{ stop: ['a'.repeat(9000), 'b'.repeat(9000)] }, [400, 'stop', null]],
    [{ stop: ['a', ''] }, [400, 'stop', null]],
    [{ prompt: [1, 999] }, [400, 'prompt', null]],
    [{ prompt: [] }, [400, 'prompt', null]],
    [{ prompt: 'x'.repeat(2000) }, [400, 'prompt', 'context_length_exceeded']],
    [{ n: 500 }, [400, 'n', null]],
    [{ model: 'gpt-4' }, [404, 'model', 'model_not_found']],
  ])('%j', async (body, expected) => expect(await failed(body)).toEqual(expected));

  it('are in the log and in /metrics by code, or by type', async () => {
    const errorOf = async (body: object) => {
      await failed(body);
      await expect.poll(() => log.at(-1)).toContain('"error"');
      const { error, param } = JSON.parse(log.pop() ?? '');
      return [error, param];
    };
    expect(await errorOf({ prompt: 'x'.repeat(2000) })).toEqual(['context_length_exceeded', 'prompt']);
    expect(await errorOf({ max_tokens: -1 })).toEqual(['invalid_request_error', 'max_tokens']);
    const text = await (await fetch(`${url}/metrics`)).text();
    expect(text).toMatch(/^trefoil:request_errors_total\{code="context_length_exceeded"\} [1-9]/m);
  });

  it('say what is expected instead', async () => {
    const message = async (path: string, body: object) => {
      const response = await fetch(`${url}/v1/${path}`, { method: 'POST', body: JSON.stringify(body) });
      return ((await response.json()) as { error: { message: string } }).error.message;
    };
    expect(await message('completions', { ...BASE, stop: [''] })).toContain('up to 256');
    const image = { type: 'image_url', image_url: { url: 'https://example.org/a.png' } };
    expect(await message('chat/completions', { messages: [{ role: 'user', content: [image] }] })).toBe(
      'messages.0.content: expected a text, or a list of parts of the type text',
    );
  });

  it('neutral values of unsupported parameters and null are accepted; unknown fields are named in a header', async () => {
    const body = { ...BASE, presence_penalty: 0, best_of: 1, logit_bias: null, suffix: null };
    const { response } = await client.completions.create(body).withResponse();
    expect(response.headers.get('x-trefoil-warning')).toBeNull();
    const fields = { temprature: 0, 'x y': 1, stream_options: { include_obfuscation: false } };
    const odd = await client.completions.create(extra({ ...BASE, ...fields })).withResponse();
    expect(odd.response.headers.get('x-trefoil-warning')).toBe(
      'unknown fields were ignored: temprature, x?y, stream_options.include_obfuscation',
    );
  });

  it('unknown routes and methods', async () => {
    const nothing = await fetch(`${url}/v1/nothing`);
    expect(nothing.status).toBe(404);
    const { error } = (await nothing.json()) as { error: { message: string; code: string } };
    expect(error.code).toBe('unknown_url');
    for (const route of ['POST /v1/responses', 'POST /v1/messages', 'POST /v1/chat/completions', 'GET /v1/models'])
      expect(error.message).toContain(route);
    const messages = await fetch(`${url}/v1/messages`, { method: 'POST', body: '{}' });
    expect([messages.status, await messages.json()]).toEqual([
      400,
      { type: 'error', error: { type: 'invalid_request_error', message: 'messages: expected a list of messages' } },
    ]);
    expect((await fetch(`${url}/v1/messages`)).status).toBe(405);
    expect((await fetch(`${url}/v1/completions`)).status).toBe(405);
    expect((await fetch(`${url}/metrics`, { method: 'POST' })).status).toBe(405);
    expect((await fetch(url, { method: 'OPTIONS' })).headers.get('access-control-allow-origin')).toBeNull();
  });

  it('fuzzed bodies get 400, and the server lives', async () => {
    const bodies = [
      '',
      '{',
      '[]',
      'null',
      '"a"',
      '{"prompt":1e999}',
      '{"prompt":{}}',
      '{"prompt":"a","n":1e9}',
      '{"prompt":[[]]}',
    ];
    const keys = ['prompt', 'max_tokens', 'stop', 'seed', 'stream_options', 'logprobs', 'top_p', 'n', 'stream'];
    const values = [{}, [[[]]], 'x', -1, 1.5, 1e300, true, '\u0000', ['', ''], { a: null }];
    for (const key of keys)
      for (const value of values) bodies.push(JSON.stringify({ prompt: 'a', max_tokens: 1, [key]: value }));
    for (const body of bodies) {
      const response = await fetch(`${url}/v1/completions`, { method: 'POST', body });
      const text = await response.text();
      if (response.status === 200) continue; // some of these are right
      expect(response.status, body).toBe(400);
      expect(JSON.parse(text)).toHaveProperty('error.message');
      expect(text).not.toMatch(/\.ts|\.js|node_modules|at /);
    }
    expect(
      (await fetch(`${url}/v1/completions`, { method: 'POST', body: Buffer.from([0x22, 0xff, 0x22]) })).status,
    ).toBe(400);
    expect((await fetch(`${url}/health`)).status).toBe(200);
  });

  const raw = (text: string) =>
    new Promise<string>((resolve, reject) => {
      const { port } = new URL(url);
      const socket = connect(Number(port), '127.0.0.1', () => socket.write(text));
      let answer = '';
      socket.on('data', (data) => {
        answer += data;
      });
      socket.on('error', reject);
      socket.on('close', () => resolve(answer.split('\r\n')[0]));
    });

  it('large bodies get 413, floods of headers 431, nonsense 400, foreign hosts 403', async () => {
    expect(await raw('POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n{')).toContain(
      ' 413 ',
    );
    expect(await raw(`GET /health HTTP/1.1\r\nhost: x\r\na: ${'b'.repeat(40_000)}\r\n\r\n`)).toContain(' 431 ');
    expect(await raw('GET /v1/models HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n')).toContain(' 403 ');
    const from = (origin: string) =>
      raw(`GET /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: ${origin}\r\nconnection: close\r\n\r\n`);
    expect(await from('https://evil.example')).toContain(' 403 ');
    expect(await from('http://localhost:5173')).toContain(' 200 ');
    expect(await raw('NONSENSE\r\n\r\n')).toContain(' 400 ');
    expect((await fetch(`${url}/health`)).status).toBe(200);
  });
});

describe('a server that cannot answer', () => {
  const status = async (base: string, path: string, body?: object) => {
    const init = body ? { method: 'POST', body: JSON.stringify(body) } : {};
    const response = await fetch(base + path, init);
    return [response.status, response.headers.get('retry-after'), await response.json()];
  };
  const refused = (message: string) => [503, '5', { error: expect.objectContaining({ message }) }];

  it('answers 503 until its model is attached', async () => {
    const host = new LocalHost(source, { cacheBytes: 2 ** 24, prefixCacheBytes: 0 });
    const server = await startServer(null, { id: 'tiny', port: 0 });
    open.push({ server, host });
    const loading = refused('the model is being loaded');
    for (const path of ['/health', '/v1/models', '/metrics']) expect(await status(server.url, path)).toEqual(loading);
    expect(await status(server.url, '/v1/completions', BASE)).toEqual(loading);
    server.attach(host);
    expect((await status(server.url, '/health'))[0]).toBe(200);
    expect((await status(server.url, '/v1/completions', BASE))[0]).toBe(200);
  });

  it('answers 503 after its engine failed', async () => {
    const broken: LanguageModel = Object.create(source.model, {
      parameterCount: { value: source.model.parameterCount },
      shape: { value: source.model.shape },
      logits: {
        value: () => {
          throw new TrefoilError('the device is gone');
        },
      },
    });
    const host = new LocalHost({ ...source, model: broken }, { cacheBytes: 2 ** 24, prefixCacheBytes: 0 });
    const server = await startServer(host, { id: 'tiny', port: 0 });
    open.push({ server, host });
    expect((await status(server.url, '/health'))[0]).toBe(200);
    expect((await status(server.url, '/v1/completions', BASE))[0]).toBe(500);
    const gone = refused('the device is gone');
    expect(await status(server.url, '/health')).toEqual(gone);
    expect(await status(server.url, '/v1/completions', BASE)).toEqual(gone);
  });
});

describe('keys', () => {
  it('cover every route but /health', async () => {
    const { server, openai } = await start({ keys: ['secret', 'other'] });
    const wrong = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'guess', maxRetries: 0 });
    await expect(wrong.completions.create(BASE)).rejects.toBeInstanceOf(AuthenticationError);
    await expect(wrong.models.list()).rejects.toBeInstanceOf(AuthenticationError);
    expect((await openai.completions.create(BASE)).choices).toHaveLength(1);
    const other = await fetch(`${server.url}/v1/models`, { headers: { 'x-api-key': 'other' } });
    expect(other.status).toBe(200);
    const statuses = ['/health', '/metrics', '/tokenize', '/nothing', '/'].map(
      async (path) => (await fetch(server.url + path)).status,
    );
    expect(await Promise.all(statuses)).toEqual([200, 401, 401, 401, 401]);
  });

  it.each(['', 'two words', 'tab\t', 'é'])('that no client could send are refused: %j', async (key) => {
    await expect(startServer(null, { id: 'tiny', port: 0, keys: ['fine', key] })).rejects.toThrow(
      'API key 2: a key is one or more printable ASCII characters without spaces',
    );
  });

  it('are needed on any address but loopback', async () => {
    const host = new LocalHost(source, { cacheBytes: 2 ** 24, prefixCacheBytes: 0 });
    await expect(startServer(host, { id: 'tiny', host: '0.0.0.0', port: 0 })).rejects.toThrow('needs --api-key');
    await host.close();
  });
});

describe('an address that cannot be used', () => {
  it('is refused with its remedy', async () => {
    const refused = (options: object) => startServer(null, { id: 'tiny', port: 0, ...options });
    const taken = Number(new URL(url).port);
    await expect(refused({ port: taken })).rejects.toThrow(`--port ${taken}: the port is in use; choose another`);
    await expect(refused({ port: 99_999 })).rejects.toThrow('--port 99999: the last port is 65535');
    // An address for documentation, which no machine has.
    await expect(refused({ host: '192.0.2.1', keys: ['k'] })).rejects.toThrow('not an address of this machine');
  });
});

describe('load', () => {
  it('a full queue answers 429 with Retry-After, and the client tries again', async () => {
    const { openai, server } = await start({ maxQueued: 1 }, { maxBatch: 1 });
    const patient = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'x', maxRetries: 20 });
    const long = { ...BASE, max_tokens: 1400, ignore_eos: true };
    const under = [openai.completions.create(long), openai.completions.create(long)];
    await expect
      .poll(async () => /waiting [12]/.test(await (await fetch(`${server.url}/metrics`)).text()))
      .toBeTruthy();
    const refused = await openai.completions.create(long).then(
      () => null,
      (reason: unknown) => reason,
    );
    expect(refused).toBeInstanceOf(RateLimitError);
    expect((refused as RateLimitError).code).toBe('queue_full');
    expect((refused as RateLimitError).message).toContain('its queue is full (maxQueued (--max-queued) is 1)');
    expect(Number((refused as RateLimitError).headers.get('retry-after'))).toBeGreaterThan(0);
    expect((await patient.completions.create({ ...BASE, max_tokens: 2 })).choices).toHaveLength(1);
    await Promise.all(under);
  });

  it('a queue that is full by its tokens says so', async () => {
    const { openai, host } = await start({ maxQueuedTokens: 10 }, { maxBatch: 1 });
    // More tokens than a fast machine makes between two polls.
    const under = openai.completions.create(extra({ ...BASE, max_tokens: 1400, ignore_eos: true }));
    await expect.poll(() => host.stats().running).toBe(1);
    await expect(openai.completions.create({ ...BASE, prompt: 'x'.repeat(20) })).rejects.toMatchObject({
      code: 'queued_tokens_full',
      message: expect.stringContaining('their prompts may have 10 tokens together (maxQueuedTokens'),
    });
    await under;
  });

  it('a model whose memory holds less than its context says what fits', async () => {
    const { server, host } = await start({}, { cacheBytes: 200_000 });
    expect(host.info.maxTokens).toBeLessThan(host.info.maxContext);
    expect(await (await fetch(`${server.url}/v1/models/tiny`)).json()).toMatchObject({
      max_model_len: host.info.maxTokens,
    });
  });

  it('a client that disconnects frees its pages, streaming or not', async () => {
    const { openai, host } = await start({}, { prefixCacheBytes: 0 });
    const long = extra({ ...BASE, prompt: 'y'.repeat(500), max_tokens: 1400, ignore_eos: true });
    for (const afterTokens of [0, 1, 5]) {
      const abort = new AbortController();
      const stream = await openai.completions.create({ ...long, stream: true }, { signal: abort.signal });
      let seen = 0;
      for await (const _ of stream) if (seen++ >= afterTokens) break;
      abort.abort();
      await expect.poll(() => host.stats()).toMatchObject({ running: 0, waiting: 0, pageBytes: 0 });
    }
    const abort = new AbortController();
    const whole = openai.completions.create(long, { signal: abort.signal });
    await expect.poll(() => host.stats().running).toBe(1);
    abort.abort();
    await expect(whole).rejects.toBeInstanceOf(APIUserAbortError);
    await expect.poll(() => host.stats()).toMatchObject({ running: 0, pageBytes: 0 });
  });

  it('a client that leaves while its body is read takes no place', async () => {
    const { openai, server } = await start({ maxQueued: 0, chatTemplate: TEMPLATE }, { maxBatch: 1 });
    const messages = [{ role: 'user' as const, content: 'Hello' }];
    const body = JSON.stringify({ messages, max_tokens: 2 });
    for (let i = 0; i < 3; i++) {
      const socket = connect(Number(new URL(server.url).port), '127.0.0.1');
      await once(socket, 'connect');
      const head = `POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: ${body.length}\r\n\r\n`;
      await new Promise((resolve) => socket.write(head + body, resolve));
      await new Promise((resolve) => setTimeout(resolve, 20)); // the thread that reads it is being started
      socket.resetAndDestroy();
    }
    const patient = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'x', maxRetries: 3 });
    expect((await patient.chat.completions.create({ model: 'tiny', messages, max_tokens: 2 })).choices).toHaveLength(1);
    expect((await openai.chat.completions.create({ model: 'tiny', messages, max_tokens: 2 })).choices).toHaveLength(1);
  });

  it('draining finishes what runs and accepts nothing new', async () => {
    const { openai, server, host } = await start();
    // More tokens than a fast machine makes between two polls.
    const under = openai.completions.create(extra({ ...BASE, max_tokens: 1400, ignore_eos: true }));
    await expect.poll(() => host.stats().running).toBe(1);
    const drained = server.drain(60);
    await expect(openai.completions.create(BASE)).rejects.toThrow();
    expect((await under).choices[0].finish_reason).toBe('length');
    await drained;
  });
});
