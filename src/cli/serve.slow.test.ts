/** `trefoil serve` as a process: the model in its worker thread, the first line, signals, refusals. */
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { writeFinalModel } from '../infer/load.js';
import { tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import { type CliEnvironment, ended, startTrefoil, trefoil } from '../testing/cli.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-serve-cli-'));

beforeAll(() => {
  const config = tinyConfig();
  const model = tinyModel(config);
  writeFinalModel(folder, model, config);
  model.free();
});
afterAll(() => rmSync(folder, { recursive: true }));

/** Starts a server; resolves with its URL, which the first line on stdout names. */
const serving = (...words: string[]) => servingWith({}, ...words);

async function servingWith(env: CliEnvironment, ...words: string[]) {
  const fixed = ['serve', '--model', folder, '--port', '0', '--device', 'cpu', '--threads', '1'];
  const child = startTrefoil([...fixed, ...words], env);
  const lines: string[] = [];
  let stderr = '';
  child.stderr?.setEncoding('utf8').on('data', (text) => {
    stderr += text;
  });
  const end = ended(child);
  const loading = new Promise<number[]>((resolve, reject) => {
    const ask = (text: string) => {
      const url = /^loading .*: (http\S+)\/health answers 503/m.exec(text)?.[1];
      // The port listens before the model is loaded; on a busy machine the model may be ready first.
      if (url)
        void Promise.all(['/health', '/v1/models'].map(async (path) => (await fetch(url + path)).status)).then(
          resolve,
          reject,
        );
      return url !== undefined;
    };
    const timer = setInterval(() => {
      if (ask(stderr) || child.exitCode !== null) clearInterval(timer);
    }, 5);
  });
  const first = await new Promise<string>((resolve, reject) => {
    createInterface({ input: child.stdout! }).on('line', (line) => {
      lines.push(line);
      resolve(lines[0]);
    });
    void end.then(() => reject(new Error(`the server ended: ${stderr}`)));
  });
  expect(first).toMatch(/^listening on http:\/\/127\.0\.0\.1:\d+$/);
  for (const status of await loading) expect([503, 200]).toContain(status);
  return { child, end, lines, url: first.slice('listening on '.length), stderr: () => stderr };
}

const post = (url: string, body: object) =>
  fetch(`${url}/v1/completions`, { method: 'POST', body: JSON.stringify(body) });

describe('trefoil serve', () => {
  it('answers while the model computes, and ends a stream before it exits with 0 on SIGTERM', async () => {
    const { child, end, lines, url, stderr } = await serving('--max-context', '3000', '--name', 'tiny');
    // Nothing is left of the requests that the server has sent to itself.
    const metrics = await (await fetch(`${url}/metrics`)).text();
    const counted = metrics.match(/^trefoil:(prefix_cache_queries_total|\w+_seconds_count|prompt_tokens_total).*$/gm);
    expect(counted?.length).toBeGreaterThan(5);
    expect(counted?.filter((line) => !/ 0$/.test(line))).toEqual([]);
    expect(stderr()).not.toContain('/v1/completions');
    const models = (await (await fetch(`${url}/v1/models`)).json()) as { data: { id: string }[] };
    expect(models.data.map(({ id }) => id)).toEqual(['tiny']);
    // The headers of a stream arrive although its prompt takes long, and /health answers meanwhile.
    const body = { prompt: 'z'.repeat(2500), max_tokens: 20, ignore_eos: true, stream: true, seed: 1 };
    const stream = await post(url, body);
    expect(stream.headers.get('content-type')).toBe('text/event-stream');
    expect((await fetch(`${url}/health`)).status).toBe(200);
    child.kill('SIGTERM');
    const text = await stream.text();
    expect(text).toContain('"finish_reason":"length"');
    expect(text.endsWith('data: [DONE]\n\n')).toBe(true);
    expect(await end).toEqual({ code: 0, signal: null });
    const paths = lines.slice(1).map((line) => JSON.parse(line).path);
    expect(paths.slice(-3)).toEqual(['/v1/models', '/health', '/v1/completions']);
  });

  it('cuts off what does not end within --drain', async () => {
    const { child, end, url } = await serving('--drain', '0', '--max-context', '100000');
    const stream = await post(url, { prompt: 'a', max_tokens: 90000, ignore_eos: true, stream: true });
    const reader = stream.body!.getReader();
    await reader.read();
    expect(await (await fetch(`${url}/metrics`)).text()).toMatch(/^trefoil:num_requests_running 1$/m);
    child.kill('SIGTERM');
    expect(await end).toEqual({ code: 0, signal: null });
    await reader.cancel();
  });

  it.each([
    ['HTTP', 'loops', 'for (;;);'],
    ['HTTP', 'waits for another process', 'wait()'],
    ['model', 'loops', 'for (;;);'],
    ['model', 'waits for another process', 'wait()'],
  ])('ends within --drain seconds of SIGTERM while the %s thread %s', async (thread, _, hang) => {
    const [program, order] = [join(folder, 'hang.mjs'), join(folder, 'hang')];
    rmSync(order, { force: true });
    writeFileSync(
      program,
      `import { spawnSync } from 'node:child_process';
      import { existsSync } from 'node:fs';
      import { isMainThread } from 'node:worker_threads';
      const wait = () => spawnSync('sleep', ['30']);
      if (isMainThread === ${thread === 'HTTP'})
        setInterval(() => { if (existsSync(${JSON.stringify(order)})) { console.error('hangs'); ${hang} } }, 20).unref();`,
    );
    const { child, end, url, stderr } = await servingWith({ NODE_OPTIONS: `--import ${program}` }, '--drain', '3');
    const stream = await post(url, { prompt: 'a', max_tokens: 1500, ignore_eos: true, stream: true });
    writeFileSync(order, '');
    await expect.poll(stderr).toContain('hangs');
    const startedAt = performance.now();
    child.kill('SIGTERM');
    expect(await end).toEqual({ code: 0, signal: null });
    expect(performance.now() - startedAt).toBeLessThan(3500);
    expect(stderr()).toContain('a thread did not end within 3 s: the process ends without it');
    await stream.body?.cancel().catch(() => {}); // the connection is gone
  });

  it('finds prompts in --prefix-cache-dir of other processes, also while they use the folder', async () => {
    const cache = join(folder, 'prefixes');
    const words = ['--prefix-cache-dir', cache, '--tile', '128'];
    const body = (i: number) => ({ prompt: `${i}`.repeat(600), max_tokens: 12, ignore_eos: true, seed: i });
    type Answer = { choices: { text: string }[]; usage: { prompt_tokens_details: { cached_tokens: number } } };
    const ask = async (url: string, i: number) => {
      const { choices, usage } = (await (await post(url, body(i))).json()) as Answer;
      return { text: choices[0].text, cached: usage.prompt_tokens_details.cached_tokens };
    };
    const askAll = (url: string) => Promise.all([1, 2, 3, 4].map((i) => ask(url, i)));
    const texts = (answers: { text: string }[]) => answers.map(({ text }) => text);
    const run = async () => {
      const { child, end, url } = await serving(...words);
      const answers = await askAll(url);
      child.kill('SIGTERM');
      expect(await end).toEqual({ code: 0, signal: null });
      return answers;
    };
    const [first, second] = await Promise.all([run(), run()]);
    expect(texts(second)).toEqual(texts(first));
    const names = readdirSync(cache);
    expect(names).toHaveLength(4 * (4 + 1)); // four blocks of each prompt, and the logits after it
    expect(names.every((name) => name.endsWith('.prefix'))).toBe(true);
    const { child, end, url } = await serving(...words);
    const third = await askAll(url);
    expect(third.map(({ cached }) => cached)).toEqual([512, 512, 512, 512]);
    expect(texts(third)).toEqual(texts(first));
    const metrics = await (await fetch(`${url}/metrics`)).text();
    expect(metrics).toContain('trefoil:prefix_cache_file_hits_total 2048\n');
    expect(metrics).toContain('trefoil:prefix_cache_files_damaged_total 0\n');
    child.kill('SIGTERM');
    await end;
  });

  it.each([
    ['a folder without a model', ['--model', '/nonexistent'], 'there is no such file or folder'],
    ['an open address without a key', ['--model', 'MODEL', '--host', '0.0.0.0'], 'needs --api-key'],
    ['a key with a space', ['--model', 'MODEL', '--api-key', 'two words'], 'API key 1: a key is one or more printable'],
    ['a key file that is missing', ['--model', 'MODEL', '--api-key-file', '/nonexistent'], '/nonexistent'],
    ['a prefix cache that is a file', ['--model', 'MODEL', '--prefix-cache-dir', '/dev/null/a'], '/dev/null/a'],
    ['too little memory', ['--model', 'MODEL', '--cache-gb', '0.00001'], 'cacheBytes'],
  ])('refuses %s with one line', async (_, words, message) => {
    const given = words.map((word) => (word === 'MODEL' ? folder : word));
    const { code, stderr, stdout } = await trefoil(['serve', '--port', '0', '--device', 'cpu', ...given]);
    expect(stdout).toBe('');
    expect(stderr).toContain(message);
    expect(stderr).not.toMatch(/\n\s+at /);
    expect(code).toBe(2);
  });
});
