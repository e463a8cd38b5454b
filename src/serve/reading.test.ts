/** Live traces and static pages of the server, over HTTP. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { traceText } from '../evaluate/trace.js';
import type { TraceReaders, TraceText, TraceToken } from '../evaluate/trace-view.js';
import { tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import type { TextSource } from '../infer/text-source.js';
import { LocalHost } from './host.js';
import { type RunningServer, startServer } from './server.js';

const config = tinyConfig();
const source: TextSource = { config, model: tinyModel(config), tokenizer: createTokenizer('byte') };
const TEMPLATE = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}';
const TEXT = 'the quick brown fox jumps over the lazy dog, again and again';
const MAX_CONTEXT = 300;
let host: LocalHost;
let server: RunningServer;

beforeAll(async () => {
  host = new LocalHost(source, { cacheBytes: 2 ** 24, maxContext: MAX_CONTEXT });
  const page = { headers: { 'Content-Type': 'text/html' }, content: Buffer.from('<p>a page</p>') };
  server = await startServer(host, {
    id: 'tiny',
    port: 0,
    keys: ['secret'],
    chatTemplate: TEMPLATE,
    pages: new Map([['/', page]]),
  });
});
afterAll(async () => {
  await server.drain(0);
  await host.close();
  source.model.free();
});

const headers = { Authorization: 'Bearer secret' };
const read = (body: object) => fetch(`${server.url}/reader`, { method: 'POST', headers, body: JSON.stringify(body) });
const get = (path: string) => fetch(`${server.url}${path}`, { headers });

/** The values of the events of a reading. */
async function eventsOf(body: object): Promise<Record<string, unknown>[]> {
  const response = await read(body);
  expect(response.headers.get('content-type')).toBe('text/event-stream');
  return [...(await response.text()).matchAll(/^data: (.*)$/gm)].map(([, text]) => JSON.parse(text));
}

describe('POST /reader', () => {
  it('reports the layers, and answers by token and block what a trace of the text holds', async () => {
    const events = await eventsOf({ prompt: TEXT });
    expect(events.slice(0, -1)).toEqual([
      { progress: { done: 0, layers: null } },
      { progress: { done: 1, layers: 2 } },
      { progress: { done: 2, layers: 2 } },
    ]);
    expect(events.at(-1)).toMatchObject({ tokens: TEXT.length });
    const id = events.at(-1)!['trace'] as string;
    const text = (await (await get(`/reader/${id}`)).json()) as TraceText;
    expect(text).toMatchObject({ model: 'tiny', layers: 2, groups: 2, slots: 3, blockSize: 8 });
    expect(text.pieces.join('')).toBe(TEXT);
    const expected = traceText(source.model, [...Buffer.from(TEXT)]);
    const [at, tokens] = [57, TEXT.length];
    const token = (await (await get(`/reader/${id}/token/${at}`)).json()) as TraceToken;
    const blocks = (layer: number, group: number) => {
      const first = ((layer * tokens + at) * 2 + group) * 3;
      return [...expected.selected.subarray(first, first + 3)].filter((block) => block >= 0);
    };
    expect(token.selected).toEqual([0, 1].map((layer) => [0, 1].map((group) => blocks(layer, group))));
    const { readers } = (await (await get(`/reader/${id}/block/0`)).json()) as TraceReaders;
    expect(readers).toHaveLength(tokens); // every token reads block 0
    expect((await get(`/reader/${id}/token/9999`)).status).toBe(400);
    expect((await get(`/reader/${id}/nothing`)).status).toBe(404);
  });

  it('reads a chat through its template', async () => {
    const events = await eventsOf({ messages: [{ role: 'user', content: 'hello' }] });
    const text = (await (await get(`/reader/${events.at(-1)!['trace']}`)).json()) as TraceText;
    expect(text.pieces.join('')).toBe('user: hello\n');
  });

  it('keeps the last four traces', async () => {
    const ids: unknown[] = [];
    for (let i = 0; i < 5; i++) ids.push((await eventsOf({ prompt: `text ${i}` })).at(-1)!['trace']);
    const statuses = await Promise.all(ids.map(async (id) => (await get(`/reader/${id}`)).status));
    expect(statuses).toEqual([404, 200, 200, 200, 200]);
  });

  it('refuses texts that do not fit, bodies that ask for nothing, and requests without the key', async () => {
    for (const body of [{ prompt: 'x'.repeat(MAX_CONTEXT + 1) }, { prompt: 'x' }, {}, { prompt: TEXT, messages: [] }])
      expect((await read(body)).status).toBe(400);
    expect((await get('/reader')).status).toBe(405);
    expect((await fetch(`${server.url}/reader/1`)).status).toBe(401);
  });

  it('is refused with 429 while the model answers', async () => {
    const answer = await fetch(`${server.url}/v1/completions`, {
      method: 'POST',
      headers,
      body: JSON.stringify({ prompt: 'a', max_tokens: 250, ignore_eos: true, stream: true }),
    });
    const refused = await read({ prompt: TEXT });
    expect(refused.status).toBe(429);
    expect(await refused.json()).toMatchObject({ error: { code: 'reader_busy' } });
    await answer.body!.cancel();
  });
});

describe('pages', () => {
  it('need no key', async () => {
    const response = await fetch(server.url);
    expect(await response.text()).toBe('<p>a page</p>');
    expect((await fetch(`${server.url}/v1/models`)).status).toBe(401);
    expect((await fetch(server.url, { method: 'POST' })).status).toBe(405);
  });
});
