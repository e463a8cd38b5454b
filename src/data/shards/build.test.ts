import { readdirSync, writeFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { describe, expect, it } from 'vitest';
import { TrefoilError, UsageError } from '../../errors.js';
import type { BuildProgress } from '../loader.js';
import { openCorpus } from '../sources/corpus.js';
import { localOptions } from '../testing/corpora.js';
import { testFolder } from '../testing/folder.js';
import type { Tokenizer } from '../tokenizer.js';
import { createByteTokenizer } from '../tokenizers/bytes.js';
import { createGpt2Tokenizer } from '../tokenizers/gpt2.js';
import { buildShards } from './build.js';
import { buildAside } from './folders.js';
import { ShardReader } from './reader.js';

const folder = testFolder();
const byte = createByteTokenizer();

async function build(
  source: 'text' | 'jsonl',
  path: string,
  { tokenizer = byte, onProgress }: { tokenizer?: Tokenizer; onProgress?: (progress: BuildProgress) => void } = {},
) {
  const target = folder.fresh();
  const spec = await openCorpus(localOptions(source, path));
  const built = await buildShards({ spec, tokenizer, tokenizerName: 'byte', workers: 1, onProgress }, target);
  return { ...built, target };
}

function tokensOf(path: string): { tokens: number[]; starts: number[] } {
  const reader = ShardReader.open(path);
  const tokens = [...reader.readTokens(0, reader.index.tokens)];
  const starts = [...reader.documentStarts];
  reader.close();
  return { tokens, starts };
}

describe('buildShards', () => {
  it('stores every document in order with its separator', async () => {
    const source = folder.write('a.jsonl', '{"text":"one"}\n{"text":""}\n{"text":"zwei"}\n');
    const { index, target } = await build('jsonl', source);
    expect(index).toMatchObject({ documents: 2, tokens: 9 });
    const { tokens, starts } = tokensOf(target);
    expect(byte.decode(tokens)).toBe('one\0zwei\0');
    expect(starts).toEqual([0, 4]);
  });

  it('does not break a large file into documents, nor its tokens', async () => {
    const tokenizer = createGpt2Tokenizer();
    const text = Array.from({ length: 150_000 }, (_, line) => `line ${line} of it`).join('\n');
    folder.write('large/a.txt', text);
    folder.write('large/b.txt', 'short');
    const { target } = await build('text', folder.path('large'), { tokenizer });
    const { tokens, starts } = tokensOf(target);
    const expected = [...tokenizer.encode(text), 50256, ...tokenizer.encode('short'), 50256];
    expect(starts.length).toBe(2);
    expect(Buffer.from(Int32Array.from(tokens).buffer).equals(Buffer.from(Int32Array.from(expected).buffer))).toBe(
      true,
    );
  });

  it('reports progress up to the end, and counts what it skips', async () => {
    folder.write('mixed/a.txt', 'text');
    folder.write('mixed/b.bin', Buffer.from([0, 1]));
    const seen: BuildProgress[] = [];
    const { index, report } = await build('text', folder.path('mixed'), {
      onProgress: (progress) => seen.push(progress),
    });
    expect(seen.at(-1)).toEqual({ documents: 1, tokens: 5, bytes: 4, parts: 2, totalParts: 2 });
    expect(index.skippedFiles).toBe(1);
    expect(report.skipped).toEqual(['b.bin']);
  });

  it('names a corpus without text, and what was skipped', async () => {
    const path = folder.write('only.bin', '\0');
    await expect(build('text', path)).rejects.toThrow(UsageError);
    await expect(build('text', path)).rejects.toThrow(`data.path: no text in ${path} (1 skipped: binary); name files`);
  });

  it('refuses files that change while they are read', async () => {
    const path = folder.write('changing.txt', 'first');
    const changing: Tokenizer = {
      ...byte,
      encode(text) {
        writeFileSync(path, `${text} and more`);
        return byte.encode(text);
      },
    };
    await expect(build('text', path, { tokenizer: changing })).rejects.toThrow(
      `${path} changed while it was being read`,
    );
  });
});

describe('buildAside', () => {
  it('leaves nothing behind when it fails', async () => {
    const target = folder.path('failed/out');
    await expect(buildAside(target, () => Promise.reject(new UsageError('no')))).rejects.toThrow('no');
    expect(readdirSync(dirname(target))).toEqual([]);
  });

  it('names the place that cannot be written', async () => {
    const blocked = folder.write('blocked', 'a file, not a folder');
    const building = () => buildAside(`${blocked}/out`, async () => {});
    await expect(building()).rejects.toThrow(TrefoilError);
    await expect(building()).rejects.toThrow(/cannot write .*blocked.*; free space, or choose another place/);
  });
});
