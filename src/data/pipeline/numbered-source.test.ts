import { describe, expect, it } from 'vitest';
import { parseConfig } from '../../config/parse.js';
import type { ConfigInput } from '../../config/schema.js';
import { UsageError } from '../../errors.js';
import type { OpenOptions } from '../loader.js';
import { testFolder } from '../testing/folder.js';
import { writeShards } from '../testing/shards.js';
import { openNumberedSource } from './numbered-source.js';

const folder = testFolder();
const shards = folder.path('shards');
writeShards(shards, [Array.from({ length: 99 }, (_, index) => index)]);

interface Change extends NonNullable<ConfigInput['data']> {
  readonly seq_len?: number;
}

const open = ({ seq_len = 10, ...data }: Change, options: OpenOptions = {}) =>
  openNumberedSource(
    parseConfig({
      data: { source: 'tokens', path: shards, val_fraction: 0, seed: 1, ...data },
      train: { seq_len, batch_size: 2 },
    }),
    { cacheFolder: folder.path('cache'), ...options },
  );

describe('openNumberedSource', () => {
  it('opens each kind', async () => {
    const text = folder.write('text/a.txt', 'x'.repeat(200));
    const jsonl = folder.write('a.jsonl', `{"body":"${'y'.repeat(150)}"}\n`);
    const opened = [
      await open({}),
      await open({ source: 'text', path: text }),
      await open({ source: 'jsonl', path: jsonl, text_field: 'body' }),
      await open({ source: 'synthetic', path: null, vocab_size: 77 }),
    ];
    expect(opened.map((source) => source.tokensPerEpoch)).toEqual([100, 201, 151, Number.POSITIVE_INFINITY]);
    expect(opened.map((source) => source.train.perEpoch)).toEqual([10, 20, 15, Number.POSITIVE_INFINITY]);
    expect(opened.map((source) => source.vocabSize)).toEqual([256, 256, 256, 77]);
    expect(new Set(opened.map((source) => source.identity)).size).toBe(4);
    for (const source of opened) source.close();
  });

  it('counts whole validation samples only', async () => {
    const source = await open({ val_fraction: 0.3 });
    // 100 - 30 = 70 tokens: six training samples end with token 60, so validation has 39 tokens, three samples.
    expect([source.tokensPerEpoch, source.validationSamples]).toEqual([61, 3]);
    source.close();
  });

  it('takes validation documents from a path of their own', async () => {
    const other = folder.path('validation');
    writeShards(other, [Array.from({ length: 45 }, () => 7)]);
    const source = await open({ val_fraction: 0.3, val_path: other });
    expect([source.tokensPerEpoch, source.validationSamples]).toEqual([100, 4]);
    const window = new Int32Array(11);
    source.validation!.read(source.validation!.locate(3), window);
    expect([...window]).toEqual(Array(11).fill(7));
    source.close();
    await expect(open({ val_path: other, seq_len: 50 })).rejects.toThrow(
      new UsageError(
        `data.val_path: ${other} has 46 tokens, too few for a sample of 51; add text or lower train.seq_len (--seq-len)`,
      ),
    );
    await expect(open({ source: 'text', path: other, val_path: folder.path('nothing') })).rejects.toThrow(
      `data.val_path: no such file or folder: ${folder.path('nothing')}`,
    );
    expect(() => open({ source: 'synthetic', path: null, val_path: other })).toThrow(
      'data.val_path: not read by data.source synthetic; one of text, jsonl, tokens reads it',
    );
  });

  it('takes a vocabulary larger than the tokenizer for padding', async () => {
    const source = await open({ vocab_size: 320 });
    expect(source.vocabSize).toBe(320);
    source.close();
  });

  it('names the files that it takes and skips, and counts replaced bytes, at every use', async () => {
    folder.write('mixed/a.txt', 'x'.repeat(50));
    folder.write('mixed/b.bin', '\0');
    folder.write('mixed/c.txt', '');
    folder.write('mixed/d.txt', Buffer.from([0x61, 0xff, 0xfe, 0x62]));
    for (const _ of [1, 2]) {
      const notices: string[] = [];
      const source = await open(
        { source: 'text', path: folder.path('mixed') },
        { onNotice: (line) => notices.push(line) },
      );
      source.close();
      expect(notices).toEqual([
        'data: 2 files taken, 0.1 kB: a.txt, d.txt',
        'data: 2 files skipped: c.txt (empty), b.bin (binary)',
        'data: 2 invalid UTF-8 sequences became U+FFFD in d.txt',
      ]);
    }
  });

  it.each<[Change, string]>([
    [{ source: 'text', path: null }, 'data.path: missing; data.source text needs a path'],
    [{ path: folder.path('nothing') }, `${folder.path('nothing', 'index.json')}: cannot read: there is no such file`],
    [{ source: 'text', path: folder.path('nothing') }, `data.path: no such file or folder: ${folder.path('nothing')}`],
    [
      { tokenizer: 'gpt2' },
      `${shards} was prepared with tokenizer byte, but data.tokenizer is gpt2; set data.tokenizer`,
    ],
    [
      { vocab_size: 200 },
      'data.tokenizer: byte has 256 tokens, more than the vocabulary of 200; raise it to at least 256',
    ],
    [
      { seq_len: 100 },
      `${shards} has 100 tokens, fewer than one sample of 101; add text or lower train.seq_len (--seq-len)`,
    ],
    [{ seq_len: 60, val_fraction: 0.1 }, 'or set data.val_fraction to 0'],
  ])('refuses %j with a remedy', async (change, message) => {
    const opening = async () => open(change);
    await expect(opening()).rejects.toThrow(UsageError);
    await expect(opening()).rejects.toThrow(message);
  });
});
