import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { identityOf } from '../../process-identity.js';
import { openCorpus } from '../sources/corpus.js';
import { hubOptions, numberedDocuments } from '../testing/corpora.js';
import { testFolder } from '../testing/folder.js';
import { parquetFile } from '../testing/parquet.js';
import { byteLevelTokenizerJson } from '../testing/tokenizer-json.js';
import { createTokenizer } from '../tokenizer.js';
import { createByteTokenizer } from '../tokenizers/bytes.js';
import { buildShards } from './build.js';
import { prepareCorpus } from './prepare.js';
import { ShardReader } from './reader.js';

const folder = testFolder();
const plain = { ...hubOptions(''), environment: {}, source: 'files' as const, shuffle: false };
const jsonl = (documents: readonly string[]) => documents.map((text) => `${JSON.stringify({ text })}\n`).join('');

/** All tokens as one text; opening compares all hashes. */
function textOf(path: string): string {
  const reader = ShardReader.open(path);
  const text = createByteTokenizer().decode(reader.readTokens(0, reader.index.tokens));
  reader.close();
  return text;
}

describe('preparing a corpus', () => {
  const documents = numberedDocuments(400, 'k');
  const corpus = folder.write('corpus/a.jsonl', jsonl(documents.slice(0, 250)));
  folder.write('corpus/b.parquet', parquetFile({ documents: documents.slice(250) }));
  const expected = documents.map((document) => `${document}\0`).join('');
  const open = () => openCorpus({ ...plain, path: folder.path('corpus'), partBytes: 3000 });

  it('gives the same shards with any number of threads, with all documents in order', async () => {
    const checksums = [];
    for (const workers of [1, 3]) {
      const path = folder.path(`shards-${workers}`);
      const progress: number[] = [];
      const { index } = await prepareCorpus({
        spec: await open(),
        tokenizerName: 'byte',
        folder: path,
        workers,
        onProgress: ({ parts, totalParts }) => progress.push(parts / totalParts),
      });
      expect(index.documents).toBe(400);
      expect(textOf(path)).toBe(expected);
      expect(progress.at(-1)).toBe(1);
      expect(existsSync(`${path}.preparing`)).toBe(false);
      checksums.push(index.checksum);
    }
    expect(checksums[0]).toBe(checksums[1]);
  });

  it('gives the shards that the cache of training has, whatever the size of the parts', async () => {
    const local = (partBytes: number) => openCorpus({ ...plain, source: 'jsonl', path: corpus, partBytes });
    const options = { tokenizerName: 'byte', workers: 1 };
    const cached = await buildShards(
      { ...options, spec: await local(1e6), tokenizer: createByteTokenizer() },
      folder.fresh(),
    );
    for (const partBytes of [900, 7000]) {
      const path = folder.path(`by-prepare-${partBytes}`);
      const { index } = await prepareCorpus({ ...options, spec: await local(partBytes), folder: path });
      expect(index.checksum).toBe(cached.index.checksum);
    }
  });

  it('goes on after an interruption without doing parts again, and refuses to mix corpora', async () => {
    const path = folder.path('interrupted');
    const spec = await open();
    // A part that fails leaves the others done: the file is damaged for the first attempt only.
    const damaged = readFileSync(folder.path('corpus/b.parquet'));
    writeFileSync(folder.path('corpus/b.parquet'), Buffer.alloc(damaged.length));
    await expect(prepareCorpus({ spec, tokenizerName: 'byte', folder: path, workers: 1 })).rejects.toThrow(
      /b\.parquet/,
    );
    writeFileSync(folder.path('corpus/b.parquet'), damaged);
    const done = readdirSync(`${path}.preparing`).filter((name) => /^part-\d+$/.test(name)).length;
    expect(done).toBeGreaterThan(1);
    await expect(prepareCorpus({ spec, tokenizerName: 'gpt2', folder: path, workers: 1 })).rejects.toThrow(
      /another corpus, tokenizer or --shard-bytes/,
    );
    const notes: string[] = [];
    await prepareCorpus({
      spec: await open(),
      tokenizerName: 'byte',
      folder: path,
      workers: 2,
      onNote: (line) => notes.push(line),
    });
    expect(notes).toEqual([expect.stringMatching(new RegExp(`^${done} of \\d+ units are done already$`))]);
    expect(textOf(path)).toBe(expected);
  });

  it('names a part that was damaged after an interruption, and makes one again that was cut short', async () => {
    const path = folder.path('damaged-part');
    const spec = await open();
    const whole = readFileSync(folder.path('corpus/b.parquet'));
    writeFileSync(folder.path('corpus/b.parquet'), Buffer.alloc(whole.length));
    const prepare = (of = spec) => prepareCorpus({ spec: of, tokenizerName: 'byte', folder: path, workers: 1 });
    await expect(prepare()).rejects.toThrow(/b\.parquet/);
    writeFileSync(folder.path('corpus/b.parquet'), whole);
    const part = join(`${path}.preparing`, 'part-000000');
    const bytes = readFileSync(part);
    const damaged = Buffer.from(bytes);
    damaged[30] ^= 1;
    writeFileSync(part, damaged);
    await expect(prepare()).rejects.toThrow(/part-000000: damaged .*remove it and start again/);
    expect(existsSync(path)).toBe(false);
    // A power failure may leave a part that is too short: parts are not forced to disk.
    writeFileSync(part, bytes.subarray(0, 50));
    await prepare(await open());
    expect(textOf(path)).toBe(expected);
  });

  it('takes a tokenizer from a file', async () => {
    const tokenizer = folder.write('tokenizer.json', JSON.stringify(byteLevelTokenizerJson()));
    const spec = await open();
    const options = { spec, tokenizerName: tokenizer, folder: folder.path('from-file'), workers: 2 };
    const { index } = await prepareCorpus(options);
    const direct = await buildShards({ ...options, tokenizer: createTokenizer(tokenizer), workers: 1 }, folder.fresh());
    expect(index).toEqual(direct.index);
  });

  it('is known by its hashes: one flipped byte is named', async () => {
    const path = folder.path('flipped');
    await prepareCorpus({ spec: await open(), tokenizerName: 'byte', folder: path, workers: 1 });
    const file = join(path, 'tokens-00000.bin');
    const bytes = readFileSync(file);
    bytes[5] ^= 1;
    writeFileSync(file, bytes);
    expect(() => ShardReader.open(path)).toThrow(/tokens-00000\.bin: damaged \(its SHA-256/);
  });

  it('writes over nothing, and leaves a folder that is in use alone', async () => {
    const path = folder.path('full');
    mkdirSync(path);
    writeFileSync(join(path, 'mine'), 'x');
    const spec = await open();
    await expect(prepareCorpus({ spec, tokenizerName: 'byte', folder: path, workers: 1 })).rejects.toThrow(
      /is not empty/,
    );
    mkdirSync(folder.path('busy.preparing'));
    writeFileSync(folder.path('busy.preparing', 'owner'), JSON.stringify(identityOf(1)));
    await expect(
      prepareCorpus({ spec, tokenizerName: 'byte', folder: folder.path('busy'), workers: 1 }),
    ).rejects.toThrow(/in use by process 1/);
  });
});
