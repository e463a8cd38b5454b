/** The official clients, each in its default way, against a server with random weights (bench/clients.mjs). */
import { execFile } from 'node:child_process';
import { existsSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, expect, it } from 'vitest';
import { TEMPLATES } from '../src/data/testing/chat-templates.js';
import { createTokenizer } from '../src/data/tokenizer.js';
import { HttpError } from '../src/http/error.js';
import { tinyConfig, tinyModel } from '../src/infer/testing/tiny-model.js';
import { LocalHost } from '../src/serve/host.js';
import { MessagesTranslation } from '../src/serve/protocols/messages.js';
import { chatOfResponses, ResponsesTranslation } from '../src/serve/protocols/responses.js';
import type { ChatChoice, ChatUsage, Translation } from '../src/serve/protocols/translation.js';
import { startServer } from '../src/serve/server.js';

const root = join(import.meta.dirname, '..');
const config = tinyConfig();
const source = { config, model: tinyModel(config), tokenizer: createTokenizer('byte') };
const close: (() => Promise<void>)[] = [];
afterAll(async () => {
  for (const one of close) await one();
  source.model.free();
});

async function serve(chatTemplate: string): Promise<string> {
  const host = new LocalHost(source, { cacheBytes: 2 ** 27, prefixCacheBytes: 2 ** 24, maxContext: 8000 });
  const server = await startServer(host, { id: 'tiny', port: 0, chatTemplate });
  close.push(async () => {
    await server.drain(0);
    await host.close();
  });
  return server.url;
}

/** The clients take 270 MB; they are installed by the first run where npm has its registry. */
async function missing(): Promise<string | null> {
  if (existsSync(join(root, '.trefoil/clients/package.json'))) return null;
  const ping = promisify(execFile)('npm', ['ping'], { timeout: 20_000 });
  return ping.then(
    () => null,
    () => 'the npm registry is not reachable: run `node bench/clients.mjs --url URL` once where it is',
  );
}

const reason = await missing();
if (reason !== null) console.log(`skipped: clients (${reason})`);

it.skipIf(reason !== null)(
  'the official clients work in their default way',
  async () => {
    const words = [
      '--url',
      await serve(TEMPLATES.qwen25),
      '--reasoning-url',
      await serve(TEMPLATES.reasoner),
      '--json',
    ];
    const run = promisify(execFile)(process.execPath, ['bench/clients.mjs', ...words], { cwd: root });
    const { stdout } = await run.catch((error: { stdout: string }) => error);
    const rows = JSON.parse(stdout) as { client: string; feature: string; failure: string | null }[];
    expect(rows.filter(({ failure }) => failure !== null)).toEqual([]);
    expect(rows).toHaveLength(7 * 9);
  },
  600_000,
);

const { echoed } = chatOfResponses({
  ...{ input: 'a', instructions: 'b', tool_choice: 'required', reasoning: { effort: 'low' } },
  tools: [{ type: 'function', name: 'f' }],
});
const request = { id: 'x_0', model: 'm', created: 1, promptTokens: 7, echoed: JSON.stringify(echoed) };
const usage: ChatUsage = {
  ...{ prompt_tokens: 7, completion_tokens: 5, total_tokens: 12 },
  prompt_tokens_details: { cached_tokens: 3 },
};
const thoughtful: ChatUsage = { ...usage, completion_tokens_details: { reasoning_tokens: 2 } };
const CHUNKS: ChatChoice[] = [
  { delta: { reasoning_content: 'so' }, finish_reason: null },
  { delta: { content: 'a' }, finish_reason: null },
  { delta: { tool_calls: [{ index: 0, id: 'c1', function: { name: 'f', arguments: '' } }] }, finish_reason: null },
  { delta: { tool_calls: [{ index: 0, function: { arguments: '{}' } }] }, finish_reason: null },
];
const call = { id: 'c1', function: { name: 'f', arguments: '{}' } };
const message = { reasoning_content: 'so', content: 'ab', tool_calls: [call] };

/** Streams that call, are cut and fail, and whole answers. */
function recorded(start: () => Translation): { events: object[]; answers: object[] } {
  const finished = (finish: string) => (one: Translation) =>
    one.chunk({ delta: {}, finish_reason: finish }) + one.end(finish === 'length' ? usage : thoughtful);
  const failed = (one: Translation) => one.fail(new HttpError(500, 'gone'));
  const streams: [number, (one: Translation) => string][] = [
    [4, finished('tool_calls')],
    [2, finished('length')],
    [1, failed],
  ];
  const events = streams.flatMap(([count, end]) => {
    const one = start();
    const chunks = CHUNKS.slice(0, count).map((chunk) => one.chunk(chunk));
    const frames = [one.begin(), ...chunks, end(one)].join('').split('\n\n').filter(Boolean);
    return frames.map((frame) => JSON.parse(frame.slice(frame.indexOf('\ndata: ') + 7)) as object);
  });
  const ends = ['stop', 'length', 'tool_calls'];
  const answers = ends.map((finish_reason) => start().whole({ message, finish_reason }, thoughtful));
  answers.push(start().whole({ message, finish_reason: 'stop' }, usage));
  return { events, answers: answers.map((answer) => JSON.parse(answer)) };
}

it.skipIf(reason !== null)(
  'events and answers have the types of the official clients',
  async () => {
    const responses = recorded(() => new ResponsesTranslation(request));
    const messages = recorded(() => new MessagesTranslation(request));
    // The client adds `output_text`; its types lack `store`, which the API has.
    const withText = ({ store: _, ...of }: { store?: unknown }) => ({ ...of, output_text: '' });
    const responseEvents = responses.events.map((event) =>
      'response' in event ? { ...event, response: withText(event.response as object) } : event,
    );
    // An error is an event of its own, which the client throws.
    const messageEvents = messages.events.filter((event) => (event as { type: string }).type !== 'error');
    const file = join(root, '.trefoil/clients/recorded.ts');
    const list = (name: string, type: string, values: object[]) =>
      `export const ${name}: ${type}[] = ${JSON.stringify(values, null, 1)};\n`;
    writeFileSync(
      file,
      `import type { Response, ResponseStreamEvent } from 'openai/resources/responses/responses';
import type { Message, RawMessageStreamEvent } from '@anthropic-ai/sdk/resources/messages/messages';
${list('responseEvents', 'ResponseStreamEvent', responseEvents)}${list('responses', 'Response', responses.answers.map(withText))}
${list('messageEvents', 'RawMessageStreamEvent', messageEvents)}${list('messages', 'Message', messages.answers)}`,
    );
    const tsc = join(createRequire(import.meta.url).resolve('typescript/package.json'), '../bin/tsc');
    const flags = [
      '--noEmit',
      '--strict',
      '--skipLibCheck',
      '--target',
      'es2022',
      '--module',
      'nodenext',
      '--types',
      'node',
    ];
    const types = ['--typeRoots', join(root, 'node_modules/@types')];
    const run = promisify(execFile)(process.execPath, [tsc, ...flags, ...types, file]);
    const { stdout } = await run.catch((error: { stdout: string }) => error);
    expect(stdout).toBe('');
  },
  600_000,
);
