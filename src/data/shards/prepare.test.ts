import { chmodSync, existsSync, readdirSync, writeFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { describe, expect, it } from 'vitest';
import { TrefoilError, UsageError } from '../../errors.js';
import { testFolder } from '../testing/folder.js';
import type { Tokenizer } from '../tokenizer.js';
import { createByteTokenizer } from '../tokenizers/byte.js';
import { createGpt2Tokenizer } from '../tokenizers/gpt2.js';
import { listTextSource, type PrepareProgress, prepareShards } from './prepare.js';
import { ShardReader } from './reader.js';

const folder = testFolder();
const byte = createByteTokenizer();

function tokensOf(path: string): { tokens: number[]; starts: number[] } {
  const reader = ShardReader.open(path);
  const tokens = [...reader.readTokens(0, reader.index.tokens)];
  const starts = [...reader.documentStarts];
  reader.close();
  return { tokens, starts };
}

describe('prepareShards', () => {
  it('stores every document in order with its separator', async () => {
    const source = folder.write('a.jsonl', '{"text":"one"}\n{"text":""}\n{"text":"zwei"}\n');
    const target = folder.path('out-a');
    const index = await prepareShards(await listTextSource('jsonl', source), byte, target);
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
    const target = folder.path('out-large');
    await prepareShards(await listTextSource('text', folder.path('large')), tokenizer, target);
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
    const seen: PrepareProgress[] = [];
    const source = await listTextSource('text', folder.path('mixed'));
    const index = await prepareShards(source, byte, folder.path('out-mixed'), (progress) => seen.push(progress));
    expect(seen.at(-1)).toEqual({ documents: 1, tokens: 5, bytes: 6, totalBytes: 6 });
    expect(index.skippedFiles).toBe(1);
  });

  it('refuses a folder that is not empty', async () => {
    const source = await listTextSource('text', folder.write('one.txt', 'x'));
    await expect(prepareShards(source, byte, folder.root)).rejects.toThrow(`${folder.root} is not empty`);
    await prepareShards(source, byte, folder.fresh());
  });

  it('names an empty corpus, and what was skipped', async () => {
    const empty = await listTextSource('text', folder.write('empty.txt', ''));
    await expect(prepareShards(empty, byte, folder.path('out-empty'))).rejects.toThrow(UsageError);
    await expect(prepareShards(empty, byte, folder.path('out-empty'))).rejects.toThrow(
      `data.path: no text in ${folder.path('empty.txt')}; name files with text`,
    );
    const binary = await listTextSource('text', folder.write('only.bin', '\0'));
    await expect(prepareShards(binary, byte, folder.path('out-empty'))).rejects.toThrow('(1 skipped: not UTF-8 text)');
  });

  it('leaves nothing behind when it fails', async () => {
    const source = await listTextSource('jsonl', folder.write('bad/bad.jsonl', '{"text":"ok"}\nbroken\n'));
    const target = folder.path('failed/out');
    await expect(prepareShards(source, byte, target)).rejects.toThrow('bad.jsonl:2: not valid JSON');
    expect(readdirSync(dirname(target))).toEqual([]);
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
    const run = prepareShards(await listTextSource('text', path), changing, folder.path('out-changing'));
    await expect(run).rejects.toThrow(`${path} changed while it was being read`);
    expect(existsSync(folder.path('out-changing'))).toBe(false);
  });

  it('says where it cannot write', async () => {
    const blocked = folder.write('blocked', 'a file, not a folder');
    const source = await listTextSource('text', folder.write('one.txt', 'x'));
    const run = prepareShards(source, byte, `${blocked}/out`);
    await expect(run).rejects.toThrow(TrefoilError);
    await expect(run).rejects.toThrow(/cannot write .*blocked.*; free space, or choose another place/);
    chmodSync(blocked, 0o600);
  });
});
