/** Files of the prefix cache: what a restarted engine finds, and what it must never use. */
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  chmodSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  truncateSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeEach, describe, expect, it } from 'vitest';
import { createTokenizer } from '../../../data/tokenizer.js';
import { UsageError } from '../../../errors.js';
import type { LanguageModel } from '../../../model/language-model.js';
import { tinyConfig, tinyModel } from '../../testing/tiny-model.js';
import type { TextSource } from '../../text-source.js';
import { createEngine } from '../create.js';
import type { Engine, EngineOptions, EngineStats } from '../interface.js';
import type { EngineRequest } from '../request.js';
import { PrefixFiles } from './files.js';

const root = mkdtempSync(join(tmpdir(), 'trefoil-prefix-'));
const models: LanguageModel[] = [];
let folder = '';
let folders = 0;
beforeEach(() => {
  folders += 1;
  folder = join(root, String(folders));
});
afterAll(() => {
  rmSync(root, { recursive: true });
  for (const model of models) model.free();
});

function source(sections: Parameters<typeof tinyConfig>[0] = {}, seed = 5): TextSource {
  const config = tinyConfig(sections);
  const model = tinyModel(config, 256, seed);
  models.push(model);
  return { model, config, tokenizer: createTokenizer('byte') };
}
const sparse = source({ nsa: { w: 70, n_sel: 5 } });
const text = (length: number, seed: number) =>
  Array.from({ length }, (_, i) => (i * i * 7 + i * 91 * seed + seed) % 256);

/** Open engines, and the memory in use before the first was opened. */
let engines = 0;
let bytesBefore = 0;

/** Runs an engine on the folder until it is closed. */
async function restart<T>(
  body: (engine: Engine) => Promise<T>,
  options: EngineOptions = {},
  of: TextSource = sparse,
): Promise<T & { stats: EngineStats }> {
  const { pool } = of.model.device;
  engines += 1;
  if (engines === 1) bytesBefore = pool.bytesInUse;
  const limits = { cacheBytes: 2 ** 26, prefixCacheBytes: 2 ** 24, tile: 128, prefixCacheDir: folder };
  const engine = createEngine(of, { ...limits, ...options });
  const result = await body(engine);
  await engine.close();
  engines -= 1;
  if (engines === 0) expect(pool.bytesInUse).toBe(bytesBefore);
  return { ...result, stats: engine.stats() };
}

/** Tokens and log-probabilities of a request, and how much of its prompt was cached. */
async function ask(engine: Engine, request: EngineRequest) {
  const tokens: unknown[] = [];
  for await (const event of engine.submit({ maxNewTokens: 8, logprobs: 1, ignoreSeparator: true, ...request })) {
    if (event.type === 'token') tokens.push([event.token, event.logprobs]);
    if (event.type === 'end') return { tokens, cached: event.usage.cachedTokens };
  }
  throw new Error('the request has no end');
}
const asked = (request: EngineRequest, options: EngineOptions = {}, of = sparse) =>
  restart((engine) => ask(engine, request), options, of);
const allFiles = () =>
  readdirSync(folder)
    .sort()
    .map((name) => join(folder, name));
/** Logits of the 256 tokens, and a head. */
const LOGITS_BYTES = 96 + 4 * 256;
/** Files of pages, and of logits. */
const files = () => allFiles().filter((path) => statSync(path).size !== LOGITS_BYTES);
const logitsFiles = () => allFiles().filter((path) => statSync(path).size === LOGITS_BYTES);

describe('after a restart', () => {
  it.each<[string, Parameters<typeof tinyConfig>[0]]>([
    ['sparse, a window longer than a block', { nsa: { w: 300, n_sel: 5 } }],
    ['sparse, a short window, phi mlp', { nsa: { w: 6, phi: 'mlp', gate: 'sigmoid' } }],
    ['shared keys and values', { nsa: { shared_kv: true, w: 70 } }],
    ['dense', { model: { attention: 'dense' } }],
  ])('a prompt continues from files bit for bit: %s', async (_, sections) => {
    const of = source(sections);
    const request = { prompt: text(700, 1), sampling: { seed: 3 } };
    const cold = await asked(request, {}, of);
    expect(cold.cached).toBe(0);
    expect(files()).toHaveLength(5);
    const warm = await asked(request, {}, of);
    expect(warm.cached).toBe(640);
    expect(warm.tokens).toEqual(cold.tokens);
    expect(warm.stats).toMatchObject({ prefixFileHits: 640, prefixHits: 640, prefixFilesDamaged: 0 });
    expect(warm.stats).toMatchObject({ prefixFileErrors: 0, prefixFileBytes: 0 }); // nothing was written
  });

  it('a longer and a branching prompt use the common part, and add theirs', async () => {
    await asked({ prompt: text(300, 1) });
    const longer = [...text(300, 1), ...text(200, 2)];
    expect((await asked({ prompt: longer })).cached).toBe(256);
    expect((await asked({ prompt: longer })).cached).toBe(384);
    expect((await asked({ prompt: [...text(200, 1), ...text(200, 3)] })).cached).toBe(128);
    expect(files()).toHaveLength(2 + 1 + 2);
  });

  it('files of several blocks and of one continue each other', async () => {
    const request = { prompt: text(700, 1), sampling: { seed: 3 } };
    const long = { ...request, prompt: [...request.prompt, ...text(700, 2)] };
    const [small, large] = [{ idleTile: 128 }, { idleTile: 512 }];
    const cold = await asked(request, small);
    rmSync(folder, { recursive: true });
    expect(await asked(request, large)).toMatchObject({ cached: 0, tokens: cold.tokens });
    expect(files()).toHaveLength(2); // up to 512 and 640 tokens
    for (const options of [small, large])
      expect(await asked(request, options)).toMatchObject({ cached: 640, tokens: cold.tokens });
    const rest = await asked(long, large); // 640 to 1152, 1280
    expect(rest.cached).toBe(640);
    expect(files()).toHaveLength(4);
    expect(await asked(long, small)).toMatchObject({ cached: 1280, tokens: rest.tokens });
    const memory = await restart(async (engine) => ({
      first: await ask(engine, long),
      again: await ask(engine, { ...long, prompt: long.prompt.slice(0, 1200) }),
    }));
    expect([memory.first.cached, memory.again.cached]).toEqual([1280, 1152]);
    expect(memory.stats.prefixFileHits).toBe(1280);
  });

  it('a part in memory is continued from files', async () => {
    const prompt = text(700, 1);
    const cold = await asked({ prompt });
    const both = await restart(async (engine) => {
      const first = await ask(engine, { prompt: prompt.slice(0, 300) });
      return { first, second: await ask(engine, { prompt }) };
    });
    expect([both.first.cached, both.second.cached]).toEqual([256, 640]);
    expect(both.second.tokens).toEqual(cold.tokens);
    expect(both.stats.prefixFileHits).toBe(640);
  });

  it('many requests at once get the answers they get alone, also without room in memory', async () => {
    const requests = Array.from({ length: 8 }, (_, i) => ({
      prompt: [...text(300 + 128 * (i % 3), i % 3), ...text(20 + i, 9)],
      sampling: { seed: i },
    }));
    const run = (options: EngineOptions) =>
      restart(async (engine) => ({ all: await Promise.all(requests.map((request) => ask(engine, request))) }), options);
    const cold = await run({});
    for (const prefixCacheBytes of [2 ** 24, 200_000]) {
      const warm = await run({ prefixCacheBytes });
      expect(warm.all.map(({ tokens }) => tokens)).toEqual(cold.all.map(({ tokens }) => tokens));
      expect(warm.all.every(({ cached }) => cached >= 256)).toBe(true);
    }
  });

  it('the first token of a repeated prompt is drawn before its pages are there', async () => {
    const request = { prompt: text(700, 1), sampling: { seed: 3 } };
    const cold = await asked(request);
    expect(logitsFiles()).toHaveLength(1);
    const one = await asked({ ...request, maxNewTokens: 1 });
    expect(one.tokens).toEqual(cold.tokens.slice(0, 1));
    expect(one).toMatchObject({ cached: 700, stats: { prefixFileHits: 0 } });
    expect(await asked({ ...request, maxNewTokens: 0 })).toMatchObject({ tokens: [], cached: 700 });
    const schema = { ...request, responseFormat: { type: 'json_object' } as const, ignoreSeparator: false };
    const structured = await restart((engine) => ask(engine, schema), { prefixCacheDir: `${folder}-structured` });
    expect((await asked(schema)).tokens).toEqual(structured.tokens);
    for (const path of files()) rmSync(path); // the prompt is read, and the answer goes on
    expect(await asked(request)).toMatchObject({ tokens: cold.tokens, cached: 0 });
    expect(files()).toHaveLength(5);
  });

  it('requests that leave while files are read free their pages', async () => {
    await asked({ prompt: text(2000, 1) });
    await restart(async (engine) => {
      for (let i = 0; i < 5; i++) {
        const abort = new AbortController();
        const events = engine.submit({ prompt: text(2000, 1), signal: abort.signal })[Symbol.asyncIterator]();
        for (let wait = 0; wait < i; wait++) await new Promise((resolve) => setTimeout(resolve, 1));
        abort.abort();
        for (let next = await events.next(); !next.done; next = await events.next());
      }
      expect(engine.stats()).toMatchObject({ running: 0, reservedBytes: 0 });
      return {};
    });
  });
});

describe('files are not used', () => {
  const prompt = text(700, 1);

  it('for another salt', async () => {
    await asked({ prompt, cacheSalt: 'a' });
    expect((await asked({ prompt })).cached).toBe(0);
    expect((await asked({ prompt, cacheSalt: 'b' })).cached).toBe(0);
    expect((await asked({ prompt, cacheSalt: 'a' })).cached).toBe(640);
  });

  it('for other weights, another shape or another block size', async () => {
    await asked({ prompt });
    const other = source({ nsa: { w: 70, n_sel: 5 } });
    const [first] = other.model.parameters;
    const weights = first.value.read();
    first.value.write(weights.map((x, i) => (i === 7 ? x + 1e-6 : x)));
    expect((await asked({ prompt }, {}, other)).cached).toBe(0);
    expect((await asked({ prompt }, {}, source({ nsa: { w: 70, n_sel: 4 } }))).cached).toBe(0);
    expect((await asked({ prompt }, { tile: 256 })).cached).toBe(0);
    expect((await asked({ prompt })).cached).toBe(640);
  });

  it.each<[string, (path: string, other: string) => void]>([
    ['truncated', (path) => truncateSync(path, statSync(path).size - 1)],
    ['empty', (path) => truncateSync(path, 0)],
    ['longer', (path) => truncateSync(path, statSync(path).size + 1)],
    ['a bit flipped', (path) => flip(path, 5000)],
    ['a bit of the checksum flipped', (path) => flip(path, 50)],
    ['the last bit flipped', (path) => flip(path, statSync(path).size - 1)],
    ['a zero of the head changed', (path) => flip(path, 60)],
    ...Array.from({ length: 8 }, (_, i): [string, (path: string) => void] => [
      `byte ${56 + i}, of the length of the prefix before it`,
      (path) => flip(path, 56 + i),
    ]),
    ['a length of the prefix that no number holds', (path) => fill(path, 56, 64)],
    ['a bit of the hash of the head flipped', (path) => flip(path, 70)],
    ['of another format', (path) => flip(path, 0)],
    ['a pipe', (path) => replace(path, () => execFileSync('mkfifo', [path]))],
    ['a link', (path, other) => replace(path, () => symlinkSync(other, path))],
    ['the file of another prefix', (path, other) => writeFileSync(path, readFileSync(other))],
  ])('that are damaged: %s', async (_, damage) => {
    const cold = await asked({ prompt, sampling: { seed: 1 } });
    const [second, third] = byTime().slice(1);
    damage(second, third);
    const warm = await asked({ prompt, sampling: { seed: 1 } });
    expect(warm.cached).toBe(128);
    expect(warm.tokens).toEqual(cold.tokens);
    expect(warm.stats.prefixFilesDamaged).toBe(1);
    const again = await asked({ prompt, sampling: { seed: 1 } });
    expect([again.cached, again.stats.prefixFilesDamaged]).toEqual([640, 0]); // written anew
  });

  it.each([56, 62, 63])('that hold logits with damage at byte %i of the head', async (at) => {
    const cold = await asked({ prompt });
    for (const path of logitsFiles()) fill(path, at, 64);
    expect(await asked({ prompt })).toMatchObject({ tokens: cold.tokens, stats: { prefixFilesDamaged: 1 } });
  });

  it('that hold damaged logits', async () => {
    const cold = await asked({ prompt });
    flip(logitsFiles()[0], 100);
    const warm = await asked({ prompt });
    expect(warm).toMatchObject({ tokens: cold.tokens, cached: 640, stats: { prefixFilesDamaged: 1 } });
    expect((await asked({ prompt, maxNewTokens: 1 })).stats).toMatchObject({
      prefixFilesDamaged: 0,
      prefixFileHits: 0,
    });
  });

  it('if the file system refuses: the request is computed and the refusal counted', async () => {
    await asked({ prompt });
    const [first] = byTime();
    rmSync(first);
    mkdirSync(first); // neither a read nor a write succeeds
    const { cached, stats } = await asked({ prompt });
    expect(cached).toBe(0);
    expect(stats.prefixFileErrors).toBeGreaterThan(0);
  });
});

/** The files of one prompt, the first block first. */
function byTime(): string[] {
  return files().sort((a, b) => statSync(b).mtimeMs - statSync(a).mtimeMs);
}

function flip(path: string, at: number): void {
  const bytes = readFileSync(path);
  bytes[at] ^= 4;
  writeFileSync(path, bytes);
}

function fill(path: string, from: number, to: number): void {
  const bytes = readFileSync(path);
  writeFileSync(path, bytes.fill(0xff, from, to));
}

function replace(path: string, create: () => void): void {
  rmSync(path);
  create();
}

describe('the folder', () => {
  it('stays within its size; the least recently used prompt goes first, also across restarts', async () => {
    await asked({ prompt: text(300, 1) });
    const size = statSync(files()[0]).size;
    const options = { prefixCacheDirBytes: 7 * size };
    const old = (ago: number) => {
      const time = Date.now() / 1000 - ago;
      for (const path of files()) utimesSync(path, time, time);
    };
    old(3000);
    await asked({ prompt: text(300, 2) }, options);
    for (const path of byTime().slice(0, 2)) utimesSync(path, Date.now() / 1000 - 2000, Date.now() / 1000 - 2000);
    expect((await asked({ prompt: text(300, 1) }, options)).cached).toBe(256); // now the more recent one
    for (const seed of [3, 4]) await asked({ prompt: text(300, seed) }, options);
    expect(files().length).toBeLessThanOrEqual(7);
    for (const seed of [1, 3, 4]) expect((await asked({ prompt: text(300, seed) }, options)).cached).toBe(256);
    expect((await asked({ prompt: text(300, 2) }, options)).cached).toBe(0);
    expect(allFiles().reduce((sum, path) => sum + statSync(path).size, 0)).toBeLessThanOrEqual(7 * size);
  });

  it('keeps the beginning of a prompt that is larger than the folder', async () => {
    await asked({ prompt: text(200, 1) });
    const size = statSync(files()[0]).size;
    rmSync(folder, { recursive: true });
    const options = { prefixCacheDirBytes: 3.5 * size };
    await asked({ prompt: text(1000, 1) }, options);
    expect(files()).toHaveLength(3);
    expect((await asked({ prompt: text(1000, 1) }, options)).cached).toBe(3 * 128);
  });

  it('is private, and is refused where others can write or no folder can be made', () => {
    new PrefixFiles(folder, 1);
    expect(statSync(folder).mode & 0o777).toBe(0o700);
    for (const mode of [0o777, 0o770, 0o702]) {
      chmodSync(folder, mode);
      expect(() => new PrefixFiles(folder, 1)).toThrow('can be written by other users');
    }
    writeFileSync(join(root, 'file'), '');
    expect(() => new PrefixFiles(join(root, 'file'), 1)).toThrow(UsageError);
    const noMemory = { cacheBytes: 2 ** 26, prefixCacheBytes: 0, prefixCacheDir: join(root, 'unused') };
    expect(() => createEngine(sparse, noMemory)).toThrow('prefixCacheDir: needs memory');
  });

  it('is shared by engines that write the same and different prefixes at the same time', async () => {
    const run = (seeds: number[]) =>
      restart(async (engine) => ({
        all: await Promise.all(seeds.map((seed) => ask(engine, { prompt: text(500, seed) }))),
      }));
    const limited = async (seeds: number[]) => {
      // Half of the time the other engine deletes what this one reads.
      const other = new PrefixFiles(folder, 100_000);
      const key = createHash('sha256').update(String(seeds)).digest('hex');
      for (let i = 0; i < 20; i++)
        await other.write(key.replace(/../, String(10 + i)), 0, 30_000, Date.now(), async () => 0n);
      return other.stats;
    };
    const alone = await run([1, 2, 3]);
    const [first, second, stats] = await Promise.all([run([1, 2, 3]), run([3, 2, 1]), limited([1])]);
    expect(first.all.map(({ tokens }) => tokens)).toEqual(alone.all.map(({ tokens }) => tokens));
    expect(second.all.map(({ tokens }) => tokens)).toEqual(alone.all.map(({ tokens }) => tokens).reverse());
    for (const result of [first.stats, second.stats])
      expect(result).toMatchObject({ prefixFilesDamaged: 0, prefixFileErrors: 0 });
    expect(stats).toMatchObject({ damaged: 0, errors: 0 });
    expect(readdirSync(folder).filter((name) => name.startsWith('.'))).toEqual([]);
  });

  it('is measured before the first request', async () => {
    await asked({ prompt: text(300, 1) });
    const size = allFiles().reduce((sum, path) => sum + statSync(path).size, 0);
    const { stats } = await restart(async (engine) => {
      await engine.warmUp();
      return {};
    });
    expect(stats.prefixFileBytes).toBe(size);
    expect(size).toBeGreaterThan(0);
  });

  it('loses unfinished files that a killed process left', async () => {
    mkdirSync(folder);
    const left = join(folder, `.${'a'.repeat(64)}-${'b'.repeat(16)}`);
    const others = join(folder, 'notes.txt');
    for (const path of [left, others]) writeFileSync(path, 'x');
    const later = Date.now() + 2 * 3_600_000;
    const { now } = Date;
    try {
      Date.now = () => later;
      await new PrefixFiles(folder, 1000).write('c'.repeat(64), 0, 10, 5, async () => 0n);
    } finally {
      Date.now = now;
    }
    expect(readdirSync(folder).sort()).toEqual([`${'c'.repeat(64)}.prefix`, 'notes.txt']);
  });
});
