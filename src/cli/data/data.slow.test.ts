import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { DATASET, numberedDocuments } from '../../data/testing/corpora.js';
import { parquetFile } from '../../data/testing/parquet.js';
import { type HubServer, startHub } from '../../hub/testing/hub-server.js';
import { runCli } from '../testing/run.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-cli-data-'));
const documents = numberedDocuments(300, 'c');
let hub: HubServer;
let env: Record<string, string>;
beforeAll(async () => {
  const files = [0, 1].map(
    (file) => [`${file}.parquet`, parquetFile({ documents: documents.slice(150 * file, 150 * (file + 1)) })] as const,
  );
  hub = await startHub({ dataset: DATASET, files: new Map(files) });
  env = { HF_ENDPOINT: hub.endpoint, TREFOIL_CACHE: join(folder, 'cache') };
});
afterAll(async () => {
  await hub.close();
  rmSync(folder, { recursive: true, force: true });
});

const onHub = ['--hub-dataset', DATASET, '--json'];
const json = async (words: readonly string[]) => {
  const { code, stdout, stderr } = await runCli(words, { env });
  expect(code, stderr).toBe(0);
  return JSON.parse(stdout);
};

describe('data smoke', () => {
  it('takes --batch of the runbooks as --batch-size, and says so', async () => {
    const shape = ['--seq-len', '16', '--batch', '2', '--batches', '1'];
    const { code, stdout, stderr } = await runCli(['data', 'smoke', ...onHub, ...shape], { env });
    expect(code, stderr).toBe(0);
    expect(JSON.parse(stdout).tokens).toBe(2 * 16);
    expect(stderr).toContain('--batch 2: taken as --batch-size');
  });

  it('fetches batches from the hub by default and says how long it took', async () => {
    const result = await json(['data', 'smoke', ...onHub, '--seq-len', '64', '--batch-size', '2', '--batches', '3']);
    expect(result).toMatchObject({ ok: true, source: 'hub', batches: 3, tokens: 384 });
    expect(result.documents).toBeGreaterThan(0);
    expect(result.sample).toMatch(/<c\d+>|w\d+/);
  });

  it('ends with code 6 and one line when nothing answers', async () => {
    const dead = { ...env, HF_ENDPOINT: 'http://127.0.0.1:9' };
    const { code, stdout, stderr } = await runCli(['data', 'smoke', '--timeout', '1'], { env: dead });
    expect({ code, stdout }).toEqual({ code: 6, stdout: '' });
    expect(stderr.trim().split('\n')).toEqual([
      expect.stringMatching(/^trefoil: 127\.0\.0\.1:9\/.* gave nothing for 1 s/),
    ]);
  });
});

describe('data bootstrap', () => {
  const out = join(folder, 'staged');
  const staged = () =>
    readdirSync(out)
      .filter((name) => name.endsWith('.jsonl'))
      .sort()
      .flatMap((name) => readFileSync(join(out, name), 'utf8').trim().split('\n'))
      .map((line) => JSON.parse(line).text as string);

  it('downloads --bytes, then more without repetition, then everything', async () => {
    const first = await json(['data', 'bootstrap', ...onHub, '--bytes', '5KB', '--out', out]);
    expect(first).toMatchObject({ files: 1, exhausted: false });
    expect(first.bytes).toBeGreaterThanOrEqual(5000);
    expect(first.bytes).toBeLessThan(6000);
    const second = await json(['data', 'bootstrap', ...onHub, '--bytes', '9KB', '--out', out]);
    expect(second).toMatchObject({ files: 2, exhausted: false });
    const all = await json(['data', 'bootstrap', ...onHub, '--bytes', '1GB', '--out', out]);
    expect(all).toMatchObject({ documents: 300, exhausted: true });
    expect(staged().sort()).toEqual([...documents].sort());
  });

  it('gives a folder to train from', async () => {
    const result = await json(['data', 'smoke', '--local-path', out, '--seq-len', '32', '--json']);
    expect(result).toMatchObject({ ok: true, source: 'jsonl' });
  });

  it('refuses a folder with a piece of something else, and an impossible size', async () => {
    const other = ['data', 'bootstrap', ...onHub, '--out', out, '--set', 'data.seed=99'];
    expect((await runCli(other, { env })).stderr).toMatch(/holds a piece of another corpus or order/);
    expect((await runCli(['data', 'bootstrap', '--out', out, '--bytes', 'lots'], { env })).code).toBe(2);
  });
});

describe('data prepare and inspect', () => {
  const out = join(folder, 'shards');

  it('tokenises the hub to shards, which inspect counts', async () => {
    const prepared = await json([
      'data',
      'prepare',
      ...onHub,
      '--tokenizer',
      'gpt2',
      '--out',
      out,
      '--part-bytes',
      '2KB',
    ]);
    expect(prepared).toMatchObject({ documents: 300, skipped_files: 0 });
    const seen = await json([
      'data',
      'inspect',
      '--dataset',
      'tokens',
      '--local-path',
      out,
      '--tokenizer',
      'gpt2',
      '--json',
    ]);
    expect(seen).toMatchObject({ complete: true, documents: 300, tokens: prepared.tokens, bytes: null });
    expect(seen.samples[0].text).toBe(documents[0].slice(0, 160));
    const counted = seen.histogram.reduce((sum: number, row: { documents: number }) => sum + row.documents, 0);
    expect(counted).toBe(300);
  });

  it('looks at the first documents of a source', async () => {
    const seen = await json(['data', 'inspect', ...onHub, '--documents', '50', '--samples', '2']);
    expect(seen).toMatchObject({ complete: false, documents: 50, empty: 0, tokenizer: 'byte' });
    expect(seen.samples).toHaveLength(2);
    expect(seen.lengths.max).toBeGreaterThan(seen.lengths.p50);
    const { stdout } = await runCli(['data', 'inspect', '--hub-dataset', DATASET], { env });
    expect(stdout).toMatch(/^300 documents, \d+ tokens, .* bytes a token$/m);
  });

  it('says in one line what is wrong', async () => {
    const text = join(folder, 'bad.jsonl');
    writeFileSync(text, '{"text": "fine"}\nnot json\n');
    const bad = await runCli(['data', 'prepare', '--local-path', text, '--out', join(folder, 'none')], { env });
    expect(bad.code).toBe(2);
    expect(bad.stderr).toMatch(/bad\.jsonl:2: not valid JSON/);
    const column = await runCli(['data', 'inspect', ...onHub, '--set', 'data.text_field=body'], { env });
    expect(column.stderr).toMatch(/no column "body" \(columns: id, text, score, meta\)/);
    expect((await runCli(['data', 'prepare', '--dataset', 'synthetic', '--out', 'x'], { env })).stderr).toMatch(
      /has no documents/,
    );
  });
});

describe('data cache', () => {
  const own = { TREFOIL_CACHE: join(folder, 'own-cache') };
  const cache = async (...words: string[]) => {
    const { code, stdout, stderr } = await runCli(['data', 'cache', ...words, '--json'], { env: own });
    expect(code, stderr).toBe(0);
    return JSON.parse(stdout);
  };

  it('lists what training tokenised, shrinks to a limit and clears', async () => {
    expect(await cache()).toEqual({ folder: join(folder, 'own-cache', 'data'), bytes: 0, entries: [], removed: [] });
    for (const name of ['one', 'two']) {
      writeFileSync(join(folder, `${name}.txt`), `${name} `.repeat(500));
      const words = ['data', 'smoke', '--local-path', join(folder, `${name}.txt`), '--seq-len', '16'];
      expect((await runCli(words, { env: own })).code).toBe(0);
    }
    const { entries, bytes } = await cache();
    expect(entries).toHaveLength(2);
    expect(entries[0]).toMatchObject({ kind: 'shards', tokens: 2001, tokenizer: 'byte' });
    const limited = await cache('--limit', String(bytes - 1));
    expect(limited.removed.map(({ name }: { name: string }) => name)).toEqual([entries[0].name]);
    const { stdout } = await runCli(['data', 'cache'], { env: own });
    expect(stdout).toMatch(/: 1 entries, [1-9]\d*(\.\d)? k?B\n\nentry +kind +size +tokens +last used\n/);
    expect(await cache('--clear')).toMatchObject({ bytes: 0, entries: [] });
    expect((await runCli(['data', 'cache', '--clear', '--limit', '1GB'], { env: own })).code).toBe(2);
  });

  it('names on stderr the files that are taken and skipped', async () => {
    const mixed = join(folder, 'mixed');
    mkdirSync(mixed);
    writeFileSync(join(mixed, 'a.txt'), 'text '.repeat(100));
    writeFileSync(join(mixed, 'b.bin'), Buffer.from([0, 1]));
    const words = ['data', 'smoke', '--local-path', mixed, '--seq-len', '16', '--json'];
    const { stdout, stderr } = await runCli(words, { env: own });
    expect(JSON.parse(stdout)).toMatchObject({ source: 'text', ok: true });
    expect(stderr).toContain('data: 1 file taken, 0.5 kB: a.txt');
    expect(stderr).toContain('data: 1 file skipped: b.bin (binary)');
  });
});

describe('bench data', () => {
  it('measures all rows and finds prepared shards fast enough', async () => {
    const result = await json(['bench', 'data', '--quick', '--json']);
    const kinds = result.rows.map((row: { what: string; text: string }) => `${row.what} ${row.text}`);
    expect(kinds).toEqual([
      'bare web',
      'pipeline web',
      'bare markdown',
      'pipeline markdown',
      'bare worst',
      'pipeline worst',
      'prepared web',
      'wait prepared web',
      'wait pipeline web',
    ]);
    for (const row of result.rows) expect(row.tokens_per_s, row.what).toBeGreaterThan(10_000);
  });
});
