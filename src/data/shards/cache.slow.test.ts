import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, readdirSync, readFileSync, rmSync, utimesSync, writeFileSync } from 'node:fs';
import { hostname } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { describe, expect, it } from 'vitest';
import { openCorpus } from '../sources/corpus.js';
import { defaultCacheFolder } from '../sources/range-cache.js';
import { localOptions } from '../testing/corpora.js';
import { testFolder } from '../testing/folder.js';
import type { Tokenizer } from '../tokenizer.js';
import { createTokenizer } from '../tokenizer.js';
import { createByteTokenizer } from '../tokenizers/bytes.js';
import { buildShards } from './build.js';
import { clearCache, listCache, openCached, shrinkCache } from './cache.js';

const folder = testFolder();
const byte = createByteTokenizer();

/** Opens through the cache, and counts the texts that are encoded for it. */
async function open(path: string, cache: string, tokenizer: Tokenizer = byte, kind: 'text' | 'jsonl' = 'text') {
  let encoded = 0;
  const counting: Tokenizer = {
    ...tokenizer,
    encode(text) {
      encoded++;
      return tokenizer.encode(text);
    },
  };
  const { reader } = await openCached(await openCorpus(localOptions(kind, path)), counting, 'byte', { folder: cache });
  const text = byte.decode(reader.readTokens(0, reader.index.tokens));
  reader.close();
  return { text, encoded, checksum: reader.index.checksum };
}

describe('openCached', () => {
  it('tokenises once', async () => {
    const cache = folder.fresh();
    const path = folder.write('once.txt', 'hello');
    expect(await open(path, cache)).toMatchObject({ text: 'hello\0', encoded: 1 });
    expect(await open(path, cache)).toMatchObject({ text: 'hello\0', encoded: 0 });
    expect(readdirSync(cache).length).toBe(1);
  });

  it('makes another entry for other content, another tokenizer or another field, and knows equal data again', async () => {
    const cache = folder.fresh();
    const path = folder.write('changed.jsonl', '{"text":"a","other":"b"}\n');
    const first = await open(path, cache, byte, 'jsonl');
    expect((await open(path, cache, { ...byte, identity: 'byte-2' }, 'jsonl')).encoded).toBe(1);
    const spec = await openCorpus(localOptions('jsonl', path, { textField: 'other' }));
    const { reader: other } = await openCached(spec, byte, 'byte', { folder: cache });
    expect(byte.decode(other.readTokens(0, 2))).toBe('b\0');
    other.close();
    utimesSync(path, 5, 5);
    const touched = await open(path, cache, byte, 'jsonl');
    expect([touched.encoded, touched.checksum]).toEqual([1, first.checksum]);
    writeFileSync(path, '{"text":"changed"}\n');
    expect((await open(path, cache, byte, 'jsonl')).text).toBe('changed\0');
    expect(readdirSync(cache).length).toBe(5);
  });

  it.each(['tokens-00000.bin', 'docs-00000.bin', 'index.json'])(
    'builds again when %s is damaged or gone',
    async (name) => {
      const cache = folder.fresh();
      const path = folder.write('damaged.txt', 'hello damage');
      await open(path, cache);
      const file = join(cache, readdirSync(cache)[0], name);
      const bytes = readFileSync(file);
      bytes[3] ^= 1;
      writeFileSync(file, bytes);
      expect(await open(path, cache)).toMatchObject({ text: 'hello damage\0', encoded: 1 });
      rmSync(file);
      expect(await open(path, cache)).toMatchObject({ text: 'hello damage\0', encoded: 1 });
      expect(await open(path, cache)).toMatchObject({ encoded: 0 });
      expect(readdirSync(cache).length).toBe(1);
    },
  );

  it('keeps the entry of a process that was faster', async () => {
    const cache = folder.fresh();
    const path = folder.write('race.txt', 'race');
    const results = await Promise.all([open(path, cache), open(path, cache), open(path, cache)]);
    expect(results.map((result) => result.text)).toEqual(['race\0', 'race\0', 'race\0']);
    expect(readdirSync(cache).length).toBe(1);
  });

  it('replaces a file that stands where the entry should be', async () => {
    const cache = folder.fresh();
    const path = folder.write('odd.txt', 'odd');
    await open(path, cache);
    const entry = join(cache, readdirSync(cache)[0]);
    rmSync(entry, { recursive: true });
    writeFileSync(entry, 'not a folder');
    expect(await open(path, cache)).toMatchObject({ text: 'odd\0', encoded: 1 });
  });
});

describe('the shards of a text source', () => {
  folder.write('golden/text/a.txt', Array.from({ length: 150_000 }, (_, line) => `line ${line} of it 界`).join('\n'));
  folder.write('golden/text/b.md', '\uFEFFé😀 short\r\n');
  folder.write('golden/text/c.bin', Buffer.from([1, 0, 2]));
  const documents = Array.from({ length: 3000 }, (_, i) =>
    i % 7 === 0 ? '' : `${i} ${'wörd '.repeat((i * 37) % 600)}`,
  );
  folder.write('golden/lines.jsonl', documents.map((text) => `${JSON.stringify({ text })}\n`).join(''));

  // A checkpoint identifies its data by these: a change would make runs of earlier versions refuse to resume.
  it.each([
    ['byte', 'text', 'text', '8b1adbb5020760a2c075065e1d7a4b8bd69b9b9a716a539ed3a4cf1f084a2975'],
    ['byte', 'jsonl', 'lines.jsonl', '33ff326f273236f3423de8a56515f8921c9bd9368ead91637426d2329edd4178'],
    ['gpt2', 'text', 'text', 'c17e2a194e825471b0c63a26a33c15e981ef0febec3647efe4bb457a43531314'],
    ['gpt2', 'jsonl', 'lines.jsonl', '2929f1b6b80a95cc2f6ee8341856db8bddd0021ebf639f67006519bbbacb7c70'],
  ] as const)('keep their identity with any number of threads: %s %s', async (name, source, path, checksum) => {
    const spec = await openCorpus(localOptions(source, folder.path('golden', path)));
    for (const workers of [1, 3]) {
      const options = { spec, tokenizer: createTokenizer(name), tokenizerName: name, workers };
      const { index } = await buildShards(options, folder.fresh());
      expect(index.checksum).toBe(checksum);
    }
  });
});

describe('the limit of the cache', () => {
  it('removes the entries that were not used for the longest time, never the one in use', async () => {
    const cache = folder.fresh();
    const entries: string[] = [];
    for (const name of ['first', 'second', 'third']) {
      await open(folder.write(`limit/${name}.txt`, name.repeat(1000)), cache);
      const added = readdirSync(cache).find((entry) => !entries.includes(entry))!;
      entries.push(added);
      utimesSync(join(cache, added), entries.length, entries.length);
    }
    const total = listCache(cache).reduce((sum, { bytes }) => sum + bytes, 0);
    expect(listCache(cache).map(({ name }) => name)).toEqual(entries);
    await open(folder.path('limit/first.txt'), cache); // a use, so "second" is the oldest now
    expect(shrinkCache(cache, total - 1).map(({ name }) => name)).toEqual([entries[1]]);
    const spec = await openCorpus(localOptions('text', folder.write('limit/fourth.txt', 'fourth')));
    const { reader } = await openCached(spec, byte, 'byte', { folder: cache, limitBytes: 1 });
    expect(listCache(cache)).toHaveLength(1);
    expect(byte.decode(reader.readTokens(0, 6))).toBe('fourth');
    reader.close();
  });

  it('lists what is there, and clears all but running builds', async () => {
    const cache = folder.fresh();
    await open(folder.write('listed.txt', 'hello'), cache);
    mkdirSync(join(cache, 'hub'));
    writeFileSync(join(cache, 'hub', 'range'), 'x'.repeat(100));
    const running = `k.partial-${hostname()}-${process.pid}-00000000`;
    mkdirSync(join(cache, running));
    const found = new Map(listCache(cache).map((entry) => [entry.kind, entry]));
    expect(found.get('fetched')).toMatchObject({ name: 'hub', bytes: 100, tokens: null });
    expect(found.get('shards')).toMatchObject({ tokens: 6, tokenizer: 'byte' });
    expect(found.get('partial')?.name).toBe(running);
    expect(clearCache(cache)).toHaveLength(2);
    expect(readdirSync(cache)).toEqual([running]);
    expect(listCache(join(cache, 'none'))).toEqual([]);
  });
});

describe('a killed build', () => {
  const script = fileURLToPath(new URL('../testing/build-cache.ts', import.meta.url));
  const runner = fileURLToPath(new URL('../../../node_modules/vite-node/vite-node.mjs', import.meta.url));
  /** Milliseconds per document; at `last` it blocks. */
  const build = (path: string, cache: string, delay: number, last = -1): ChildProcess =>
    spawn(process.execPath, [runner, script, path, cache, String(delay), String(last)], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
  const lines = Array.from({ length: 60 }, (_, line) => `{"text":"${`document ${line} `.repeat(1000)}"}`).join('\n');

  const lengths = lines.split('\n').map((line) => JSON.parse(line).text.length);

  it.each([0, 25, 59])('after document %i leaves nothing that could be taken for data', async (last) => {
    const cache = folder.fresh();
    const path = folder.write('killed.jsonl', lines);
    const child = build(path, cache, 20, last < 50 ? last : -1);
    const closed = once(child, 'close');
    for await (const line of createInterface({ input: child.stdout! })) {
      if (line === `document ${last}`) child.kill('SIGKILL');
    }
    await closed;
    const remains = readdirSync(cache);
    // The signal may come too late for the last document: then there is a whole entry, and never half of one.
    const finished = remains.some((name) => !name.includes('.partial-'));
    if (last < 50) expect(finished).toBe(false);
    const { text, encoded } = await open(path, cache, byte, 'jsonl');
    expect(encoded).toBe(finished ? 0 : 60);
    expect(text.split('\0').map((document) => document.length)).toEqual([...lengths, 0]);
    // The remains stay while they might belong to a living process elsewhere, and go when they are old.
    for (const name of remains) {
      for (const file of readdirSync(join(cache, name))) utimesSync(join(cache, name, file), 1, 1);
      utimesSync(join(cache, name), 1, 1);
    }
    await open(folder.write('other.txt', 'x'), cache);
    expect(readdirSync(cache).filter((name) => name.includes('partial'))).toEqual([]);
  });

  it('does not disturb one that builds the same at the same time', async () => {
    const cache = folder.fresh();
    const path = folder.write('both.jsonl', lines);
    const children = [build(path, cache, 5), build(path, cache, 5)];
    const outputs = children.map(async (child) => {
      const output: string[] = [];
      for await (const line of createInterface({ input: child.stdout! })) output.push(line);
      return output.at(-1);
    });
    const [first, second] = await Promise.all(outputs);
    expect(first).toMatch(/^done [0-9a-f]{64}$/);
    expect(second).toBe(first);
    expect(readdirSync(cache).length).toBe(1);
  });

  it('is only cleared away when old, of this machine, and its process is gone', async () => {
    const cache = folder.fresh();
    const dead = 4_000_000; // above the largest process id
    const names = {
      oldDead: `k.partial-${hostname()}-${dead}-00000000`,
      youngDead: `k.partial-${hostname()}-${dead}-11111111`,
      oldAlive: `k.partial-${hostname()}-${process.pid}-22222222`,
      oldElsewhere: `k.partial-another-machine-${dead}-33333333`,
    };
    for (const [key, name] of Object.entries(names)) {
      mkdirSync(join(cache, name));
      if (key !== 'youngDead') utimesSync(join(cache, name), 1, 1);
    }
    await open(folder.write('fresh.txt', 'x'), cache);
    const left = readdirSync(cache).filter((name) => name.includes('partial'));
    expect(left.sort()).toEqual([names.youngDead, names.oldAlive, names.oldElsewhere].sort());
  });
});

describe('defaultCacheFolder', () => {
  it('follows TREFOIL_CACHE, then XDG_CACHE_HOME, then the home folder', () => {
    expect(defaultCacheFolder({ TREFOIL_CACHE: '/a', XDG_CACHE_HOME: '/b' })).toBe('/a/data');
    expect(defaultCacheFolder({ XDG_CACHE_HOME: '/b' })).toBe('/b/trefoil/data');
    expect(defaultCacheFolder({})).toMatch(/\.cache\/trefoil\/data$/);
  });
});
