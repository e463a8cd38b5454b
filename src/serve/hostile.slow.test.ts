/**
 * Requests of strangers to a server process: none may end it, keep others waiting, or fill its memory. Beside each runs a load
 * of streams, and `/health` every 50 ms.
 */
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { get, type IncomingMessage } from 'node:http';
import { connect, type Socket } from 'node:net';
import { availableParallelism, loadavg, tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { writeFinalModel } from '../infer/load.js';
import { tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import { ended, runNode, startTrefoil } from '../testing/cli.js';
import { type LoadReport, residentMiB, underLoad } from './testing/load.js';

const MIB = 2 ** 20;
/** Longest answer of `/health` [ms]. On an idle machine it is under 100; here other tests may run, several for each core. */
const MAX_HEALTH_MS =
  Number(process.env['TREFOIL_HEALTH_MS']) || 1000 * Math.min(5, Math.max(1, loadavg()[0] / availableParallelism()));
/** Longest time that the HTTP thread may compute during a check, however busy the machine is [ms]. */
const MAX_OWN_MS = 100;
/** Answer times of each test, for a person who measures. */
const healthMs: Record<string, object> = {};
const isLong = process.env['TREFOIL_LONG'] === '1';

const root = mkdtempSync(join(tmpdir(), 'trefoil-hostile-'));
const TEMPLATE = '{% for m in messages %}{{ m.content }}{% endfor %}';

/** A server of a tiny model with this tokenizer. */
async function serve(tokenizer: 'byte' | 'gpt2' | 'stories', vocabulary: number, words: readonly string[] = []) {
  const folder = join(root, tokenizer);
  const config = tinyConfig({ data: { tokenizer } });
  const model = tinyModel(config, vocabulary);
  writeFinalModel(folder, model, config);
  model.free();
  const template = join(root, 'chat.jinja');
  writeFileSync(template, TEMPLATE);
  const fixed = ['--port', '0', '--device', 'cpu', '--threads', '1', '--chat-template', template, '--cache-gb', '1'];
  const child = startTrefoil(['serve', '--model', folder, ...fixed, ...words]);
  let errors = '';
  child.stderr?.setEncoding('utf8').on('data', (text) => {
    errors += text;
  });
  const lines = createInterface({ input: child.stdout! });
  const [first] = (await once(lines, 'line')) as [string];
  return { child, end: ended(child), url: first.slice('listening on '.length), name: tokenizer, errors: () => errors };
}

type Server = Awaited<ReturnType<typeof serve>>;
const servers: Server[] = [];
let bytes: Server;
let words: Server;
let stories: Server;

beforeAll(async () => {
  bytes = await serve('byte', 256);
  words = await serve('gpt2', 50_257);
  stories = await serve('stories', 2000);
  servers.push(bytes, words, stories);
}, 120_000);

afterAll(async () => {
  for (const { child, end } of servers) {
    child.kill('SIGTERM');
    expect(await end).toEqual({ code: 0, signal: null });
  }
  rmSync(root, { recursive: true });
  if (process.env['TREFOIL_HEALTH_MS']) console.table(healthMs);
});

const post = async ({ url }: Server, path: string, body: string | object) => {
  const init = { method: 'POST', body: typeof body === 'string' ? body : JSON.stringify(body) };
  const response = await fetch(url + path, init);
  return { status: response.status, text: await response.text() };
};

function expectSteady(server: Server, { checks, worst, worstOwn, failures }: LoadReport): void {
  expect(server.child.exitCode).toBeNull();
  expect(failures).toEqual([]);
  expect(checks).toBeGreaterThan(0);
  healthMs[expect.getState().currentTestName ?? ''] = { worst: Math.round(worst), computed: Math.round(worstOwn) };
  expect(worstOwn).toBeLessThan(MAX_OWN_MS);
  expect(worst).toBeLessThan(MAX_HEALTH_MS);
  expect(server.errors()).not.toMatch(/\n\s+at /); // no defect
}

const ids = (count: number) => Array.from({ length: count }, (_, i) => (i * i + 7 * i) % 256);
const LARGE = 15.9 * MIB;
const repeated = (item: string) => `[${item}${`,${item}`.repeat(Math.floor(LARGE / (item.length + 1)) - 1)}]`;
const schema = (of: object) => ({
  messages: [{ role: 'user', content: 'a' }],
  max_tokens: 50,
  response_format: { type: 'json_schema', json_schema: { schema: of } },
});
const text = (pattern: string) => schema({ type: 'string', pattern });
const pairs = (levels: number) => {
  let inner: object = { type: 'null' };
  const $defs: Record<string, object> = {};
  for (let i = 0; i < levels; i++) {
    $defs[i] = { type: 'object', properties: { a: inner, b: inner } };
    inner = { $ref: `#/$defs/${i}` };
  }
  return schema({ $defs, ...inner });
};
const optional = (count: number) =>
  schema({ type: 'object', properties: Object.fromEntries(Array.from({ length: count }, (_, i) => [`p${i}`, {}])) });
const nested = (depth: number) => '['.repeat(depth) + ']'.repeat(depth);

interface Attack {
  readonly server?: () => Server;
  readonly path?: string;
  readonly body: () => string | object;
  /** Default: 400. */
  readonly statuses?: readonly number[];
}

const chat = '/v1/chat/completions';
const [responses, messages, count] = ['/v1/responses', '/v1/messages', '/v1/messages/count_tokens'];
const functions = (parameters: object, count: number) =>
  Array.from({ length: count }, (_, i) => ({ type: 'function', name: `tool_${i}`, parameters }));
const text15 = 'a'.repeat(LARGE);
/** With a server of the byte tokenizer and `/v1/completions` unless they say otherwise. */
const attacks: Readonly<Record<string, Attack>> = {
  'an answer longer than a text may be': {
    body: () => ({ prompt: ids(7300), n: 128, max_tokens: 1, echo: true, logprobs: 20 }),
  },
  'pattern ^(a?){20000}$': { path: chat, body: () => text('^(a?){20000}$') },
  'pattern ^(a?){600}$': { path: chat, body: () => text('^(a?){600}$'), statuses: [200] },
  '40 levels of two optional properties': { path: chat, body: () => pairs(40), statuses: [200] },
  '4,000 optional properties': { path: chat, body: () => optional(4000), statuses: [200, 400] },
  'deep parentheses': { path: chat, body: () => text('('.repeat(1e6) + ')'.repeat(1e6)) },
  '16 MiB of /detokenize [-1,-1,…]': { path: '/detokenize', body: () => `{"tokens":${repeated('-1')}}` },
  '16 MiB of messages [1,1,…]': { path: chat, body: () => `{"messages":${repeated('1')}}` },
  '16 MiB of messages [{},{},…]': { path: chat, body: () => `{"messages":${repeated('{}')}}` },
  '16 MiB of lists in a list': { body: () => `{"prompt":${nested(7.9 * MIB)}}` },
  '16 MiB of tokens': { body: () => `{"prompt":${repeated('1')}}` },
  '16 MiB of texts': { body: () => `{"prompt":${repeated('"ab"')}}` },
  '16 MiB of stop strings': { body: () => `{"prompt":"a","stop":${repeated('"a"')}}` },
  '16 MiB of aaaa': { body: () => ({ prompt: 'a'.repeat(LARGE), stream: true }) },
  '16 MiB of aaaa in a chat': {
    path: chat,
    body: () => ({ messages: [{ role: 'user', content: 'a'.repeat(LARGE) }] }),
  },
  '16 MiB of aaaa to /tokenize': {
    path: '/tokenize',
    body: () => ({ prompt: 'a'.repeat(LARGE) }),
    statuses: [200, 400],
  },
  '1 MB without a space': { server: () => stories, body: () => ({ prompt: 'q'.repeat(1e6), max_tokens: 1 }) },
  '1 MB without a space to /tokenize': {
    ...{ server: () => stories, path: '/tokenize', statuses: [200] },
    body: () => ({ prompt: 'q'.repeat(1e6) }),
  },
  'logit_bias of 5,000 lists in each other': { body: () => `{"prompt":"a","logit_bias":${nested(5000)}}` },
  'tools of 500 lists in each other': { body: () => `{"prompt":"a","tools":${nested(500)}}` },
  '16 MiB of aaaa to /v1/responses': { path: responses, body: () => ({ input: text15 }) },
  '16 MiB of items': { path: responses, body: () => `{"input":${repeated('{"role":"user","content":"a"}')}}` },
  '16 MiB of items that are none': { path: responses, body: () => `{"input":${repeated('1')}}` },
  '16 MiB of calls': {
    path: responses,
    body: () => `{"input":${repeated('{"type":"function_call","call_id":"a","name":"a","arguments":"{}"}')}}`,
  },
  '16 MiB of tools that are not used': {
    path: responses,
    body: () =>
      `{"input":"a","tool_choice":"none","tools":[{"type":"function","name":"a","parameters":{"enum":${repeated('1e20')}}}]}`,
  },
  '3 MiB of tools that are not used, repeated in a stream': {
    path: responses,
    body: () => ({
      ...{ input: 'a', tool_choice: 'none', stream: true, max_output_tokens: 8 },
      tools: functions({ type: 'object', description: 'a'.repeat(3000) }, 1000),
    }),
    statuses: [200],
  },
  '10,000 tools': {
    path: responses,
    body: () => ({ input: 'a', tools: functions({ type: 'object' }, 10_000) }),
  },
  '16 MiB of aaaa to /v1/messages': {
    path: messages,
    body: () => ({ max_tokens: 9, messages: [{ role: 'user', content: text15 }] }),
  },
  '16 MiB of blocks': {
    path: messages,
    body: () => `{"max_tokens":9,"messages":[{"role":"user","content":${repeated('{"type":"text","text":"a"}')}}]}`,
  },
  '16 MiB of messages to /v1/messages': {
    path: messages,
    body: () => `{"max_tokens":9,"messages":${repeated('{"role":"user","content":"a"}')}}`,
  },
  '16 MiB of system': {
    path: messages,
    body: () => ({ max_tokens: 9, system: text15, messages: [{ role: 'user', content: 'a' }] }),
  },
  '16 MiB to be counted': {
    path: count,
    body: () => ({ messages: [{ role: 'user', content: text15 }] }),
  },
  '16 MiB of blocks to be counted': {
    path: count,
    body: () => `{"messages":[{"role":"user","content":${repeated('{"type":"text","text":"a"}')}}]}`,
  },
  '16 MiB to /reader': { path: '/reader', body: () => ({ prompt: text15 }) },
  'repetition_penalty 1e-300': { body: () => ({ prompt: 'a', repetition_penalty: 1e-300 }) },
};

describe('a request', () => {
  it.each(Object.keys(attacks))(
    '%s',
    async (name) => {
      const { server: serverOf, path = '/v1/completions', body, statuses = [400] } = attacks[name];
      const server = serverOf?.() ?? ([chat, responses, messages, count].includes(path) ? words : bytes);
      const given = body();
      const sent = typeof given === 'string' ? given : JSON.stringify(given);
      const { result, load } = await underLoad(server, () => post(server, path, sent));
      expect(statuses, result.text.slice(0, 300)).toContain(result.status);
      if (result.status === 400) {
        expect(JSON.parse(result.text)).toHaveProperty('error.message');
        expect(result.text.length).toBeLessThan(1000);
      }
      expectSteady(server, load);
    },
    120_000,
  );

  it('with an echo of 30,000 positions is streamed to a client that reads', async () => {
    const prompt = ids(30_000);
    const body = { prompt, max_tokens: 2, ignore_eos: true, echo: true, logprobs: 20, stream: true };
    const { result, load } = await underLoad(bytes, () => post(bytes, '/v1/completions', body));
    expect(result.text.endsWith('data: [DONE]\n\n')).toBe(true);
    const frames = result.text.split('\n\n').flatMap((frame) => /^data: (\{.*)$/.exec(frame)?.[1] ?? []);
    const positions = frames.flatMap((frame) => JSON.parse(frame).choices[0].logprobs.token_logprobs);
    expect(positions).toHaveLength(30_002);
    expectSteady(bytes, load);
  }, 180_000);
});

async function openSocket({ url }: Server): Promise<Socket> {
  const socket = connect(Number(new URL(url).port), '127.0.0.1');
  socket.on('error', () => {}); // the server may close it
  await once(socket, 'connect');
  return socket;
}

/** Over a connection of its own: an idle one may be closed at any time. */
async function statusOf(path: string): Promise<number | undefined> {
  const [response] = (await once(get(bytes.url + path, { agent: false }), 'response')) as [IncomingMessage];
  response.resume();
  return response.statusCode;
}

describe('connections', () => {
  it('with bodies that never end take a bounded memory', async () => {
    const before = residentMiB(bytes.child.pid!);
    const body = Buffer.alloc(15 * MIB, ' ');
    const head = `POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: ${16 * MIB}\r\n\r\n`;
    let most = 0;
    const { load } = await underLoad(bytes, async () => {
      const sockets: Socket[] = [];
      for (let i = 0; i < (isLong ? 150 : 40); i++) {
        const socket = await openSocket(bytes);
        sockets.push(socket);
        socket.write(head);
        await new Promise((resolve) => socket.write(body, resolve));
        most = Math.max(most, residentMiB(bytes.child.pid!));
      }
      await setTimeout(500);
      for (const socket of sockets) socket.destroy();
    });
    expectSteady(bytes, load);
    expect(most - before).toBeLessThan(600); // 256 for bodies, the rest until garbage is collected
    expect((await post(bytes, '/v1/completions', { prompt: 'a', max_tokens: 1 })).status).toBe(200);
  }, 180_000);

  it.each([
    ['idle', ''],
    ['with half a request line', 'POST /v1/comp'],
    ['with half a body', 'POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{'],
  ])(
    'of one client do not shut out others: 1,200 %s',
    async (_, text) => {
      const { load } = await underLoad(bytes, async () => {
        const sockets: Socket[] = [];
        for (let i = 0; i < 1200; i++) {
          const socket = await openSocket(bytes);
          if (text !== '') socket.write(text);
          sockets.push(socket);
        }
        for (let i = 0; i < 3; i++) {
          expect(await statusOf('/health')).toBe(200);
          expect(await statusOf('/v1/models')).toBe(200);
        }
        for (const socket of sockets) socket.destroy();
      });
      expectSteady(bytes, load);
    },
    60_000,
  );

  it('that are half closed after the request get their stream', async () => {
    const socket = await openSocket(bytes);
    const body = JSON.stringify({ prompt: 'a', max_tokens: 200, ignore_eos: true, stream: true });
    const head = `POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: ${body.length}\r\n\r\n`;
    socket.end(head + body);
    let answer = '';
    for await (const piece of socket.setEncoding('utf8')) answer += piece;
    expect(answer).toContain('data: [DONE]');
    expect(answer).toContain('"finish_reason":"length"');
  });

  it('that are gone free their pages, streaming or not', async () => {
    for (const stream of [true, false]) {
      const socket = await openSocket(bytes);
      const body = JSON.stringify({ prompt: ids(20_000).reverse(), max_tokens: 9000, ignore_eos: true, stream });
      const head = `POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: ${body.length}\r\n\r\n`;
      socket.write(head + body);
      const running = async () =>
        /^trefoil:num_requests_running (\d+)/m.exec(await (await fetch(`${bytes.url}/metrics`)).text())?.[1];
      await expect.poll(running, { timeout: 10_000 }).toBe('1');
      socket.destroy();
      await expect.poll(running, { timeout: 5000 }).toBe('0');
    }
  }, 60_000);
});

describe('random bodies to all routes', () => {
  it('are answered: no status 500, no end, memory comes back', async () => {
    const program = fileURLToPath(new URL('../../bench/fuzz-server.mjs', import.meta.url));
    const count = isLong ? '20000' : '400';
    const words = ['--url', bytes.url, '--pid', String(bytes.child.pid), '--bodies', count, '--max-health-ms'];
    const { code, stdout, stderr } = await runNode([program, ...words, String(MAX_HEALTH_MS)]);
    expect(stderr).toBe('');
    expect(JSON.parse(stdout)).toMatchObject({ bodies: Number(count), failures: [] });
    expect(code).toBe(0);
  }, 1_800_000);
});
