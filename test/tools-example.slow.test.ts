/**
 * The programs of examples/tools/: data, a training, a server, and an agent loop. The short form trains on the chats of one
 * question and one call, and must answer such questions; with TREFOIL_LONG=1 it trains as the README does, and the agent must
 * be right.
 */
import type { ChildProcess } from 'node:child_process';
import { cpSync, existsSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { encodeChatLine } from '../src/data/sources/chats/encode.js';
import { testFolder } from '../src/data/testing/folder.js';
import { createTokenizer, type Tokenizer } from '../src/data/tokenizer.js';
import { ended, root, runNode, startTrefoil, trefoil } from '../src/testing/cli.js';

const isLong = process.env['TREFOIL_LONG'] === '1';
const folder = testFolder();
const at = (...names: string[]) => folder.path('artifacts', ...names);
const example = (name: string) => join(root, 'examples', 'tools', name);
const tools = JSON.parse(readFileSync(example('tools.json'), 'utf8'));
const chats = () =>
  readFileSync(at('chats.jsonl'), 'utf8')
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line));
const text = JSON.stringify;
const SHORT = ['--steps', '300', '--seq-len', '512', '--set', 'train.warmup_steps=20', '--threads', '1'];
let tokenizer: Tokenizer;
let server: ChildProcess | undefined;
let url: string;

beforeAll(async () => {
  const made = await runNode([example('data.mjs'), '--out', at()]);
  expect(made.code, made.stderr).toBe(0);
  const easy = chats().filter(({ messages }) => messages.length === 4);
  if (!isLong) writeFileSync(at('chats.jsonl'), easy.map((chat) => `${text(chat)}\n`).join(''));
  tokenizer = createTokenizer(at('tokenizer'));
  const { code, stderr } = await trefoil([
    ...['train', '--config', example('cpu.yaml'), '--local-path', at('chats.jsonl'), '--out-dir', at('model')],
    ...['--set', `data.tokenizer=${at('tokenizer')}`, ...(isLong ? [] : SHORT)],
  ]);
  expect(code, stderr).toBe(0);
  server = startTrefoil(['serve', '--model', at('model'), '--device', 'cpu', '--port', '0']);
  url = await new Promise<string>((resolve, reject) => {
    server!.stdout!.on('data', (chunk) => {
      const found = /listening on (\S+)/.exec(String(chunk));
      if (found) resolve(found[1]);
    });
    server!.once('close', (status) => reject(new Error(`the server ended with ${status}`)));
  });
}, 3_600_000);
afterAll(async () => {
  if (server === undefined) return;
  server.kill('SIGTERM');
  await ended(server);
});

interface Message {
  readonly content: string | null;
  readonly tool_calls?: readonly { id: string; function: { name: string; arguments: string } }[];
}

async function ask(messages: readonly object[], choice: string): Promise<{ message: Message; finish_reason: string }> {
  const body = { model: 'model', messages, tools, tool_choice: choice, temperature: 0, max_tokens: 200 };
  const headers = { 'content-type': 'application/json' };
  const answer = await fetch(`${url}/v1/chat/completions`, { method: 'POST', headers, body: text(body) });
  const json = await answer.json();
  expect(answer.status, text(json)).toBe(200);
  return (json as { choices: [{ message: Message; finish_reason: string }] }).choices[0];
}

describe('examples/tools', () => {
  it('has data whose targets are the calls and answers, in whole words', () => {
    const unknown = new Set<string>();
    for (const chat of chats().slice(0, 200)) {
      const [{ tokens, counted }] = encodeChatLine(text(chat), tokenizer);
      const written = tokenizer.decode(tokens.filter((_, i) => counted[i] === 1));
      for (const { role, content, tool_calls: calls = [] } of chat.messages) {
        if (role === 'tool') expect(written).not.toContain(content);
        if (role === 'assistant' && content) expect(written).toContain(content);
        for (const { function: call } of calls) expect(written).toContain(`{"name": "${call.name}", "arguments": {`);
      }
      for (const token of tokens) {
        const word = tokenizer.decode([token]);
        if (/^[a-z]$/i.test(word)) unknown.add(word);
      }
    }
    expect([...unknown].filter((word) => !['I', 'a'].includes(word))).toEqual([]);
  });

  it('never trains on what the agent asks for', async () => {
    const { isHeldOut } = await import(example('grammar.mjs'));
    const items = chats().flatMap(({ messages }) =>
      messages.flatMap(
        ({ tool_calls: calls = [] }: { tool_calls?: { function: { arguments: { item?: string } } }[] }) =>
          calls.flatMap(({ function: { arguments: values } }) => values.item ?? []),
      ),
    );
    expect(new Set(items).size).toBeGreaterThan(30);
    expect(items.filter(isHeldOut)).toEqual([]);
    expect(isHeldOut('red lamp')).toBe(true);
  });

  it('is served with calls that satisfy their schemas, over three answers', async () => {
    const messages: object[] = [{ role: 'user', content: 'Tell Emma what the red boat costs.' }];
    for (let turn = 0; turn < 2; turn++) {
      const { message, finish_reason: reason } = await ask(messages, 'required');
      expect(reason).toBe('tool_calls');
      const calls = message.tool_calls ?? [];
      expect(calls.length).toBeGreaterThan(0);
      for (const { function: call } of calls) {
        const { parameters } = tools.find(
          (tool: typeof call & { function: typeof call }) => tool.function.name === call.name,
        ).function;
        const values = JSON.parse(call.arguments);
        expect(Object.keys(values).sort()).toEqual([...parameters.required].sort());
        for (const value of Object.values(values)) expect(typeof value).toBe('string');
      }
      messages.push({ role: 'assistant', ...message });
      for (const { id } of calls) messages.push({ role: 'tool', tool_call_id: id, content: '{"price":23}' });
    }
    expect(typeof (await ask(messages, 'none')).message.content).toBe('string');
  });

  it('reads results that it never saw, about things that it never saw', async () => {
    const { randomChat, randomNumbers } = await import(example('grammar.mjs'));
    const random = randomNumbers(77);
    const answers: [said: unknown, expected: unknown][] = [];
    while (answers.length < 12) {
      const { wishes } = randomChat(random, tools, { heldOut: true, wishes: 1, offersAll: true });
      const [{ text: question, calls, answer }] = wishes;
      if (calls.length !== 1) continue;
      const messages: object[] = [{ role: 'user', content: question }];
      const { message } = await ask(messages, 'auto');
      const made = (message.tool_calls ?? []).map(({ function: of }) => ({
        ...of,
        arguments: JSON.parse(of.arguments),
      }));
      messages.push({ role: 'assistant', ...message });
      for (const { id } of message.tool_calls ?? [])
        messages.push({ role: 'tool', tool_call_id: id, content: text(calls[0].result) });
      const last = made.length === 1 ? (await ask(messages, 'auto')).message.content : null;
      const wanted = { name: calls[0].name, arguments: calls[0].arguments };
      answers.push([
        { made, said: last },
        { made: [wanted], said: answer },
      ]);
    }
    const wrong = answers.filter(([said, expected]) => text(said) !== text(expected));
    expect(wrong.length, text(wrong)).toBeLessThanOrEqual(1);
  });

  it('runs the agent of the AI SDK to its end', async ({ skip }) => {
    const home = folder.path('agent');
    cpSync(join(root, 'examples', 'tools'), home, { recursive: true });
    const packages = join(root, '.trefoil', 'clients', 'node_modules');
    if (!existsSync(join(packages, 'ai')))
      return skip('the AI SDK is not installed: run `node bench/clients.mjs --url URL` once, with the npm registry');
    symlinkSync(packages, join(home, 'node_modules'));
    const { code, stdout, stderr } = await runNode([
      join(home, 'agent.mjs'),
      '--url',
      `${url}/v1`,
      '--rounds',
      isLong ? '4' : '1',
    ]);
    expect(stdout, stderr).toMatch(/\d+ of \d+ answers are right, after \d+ answers of the model\n$/);
    if (isLong) expect(code, stdout).toBe(0);
  });
});
