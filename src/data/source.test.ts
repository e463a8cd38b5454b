import { describe, expect, it } from 'vitest';
import { UsageError } from '../errors.js';
import { openSource, type SourceOptions } from './source.js';
import { testFolder } from './testing/folder.js';
import { writeShards } from './testing/shards.js';

const folder = testFolder();
const shards = folder.path('shards');
writeShards(shards, [Array.from({ length: 99 }, (_, index) => index)]);

const options = (change: Partial<SourceOptions>): SourceOptions => ({
  source: 'tokens',
  path: shards,
  tokenizer: 'byte',
  val_fraction: 0,
  seed: 1,
  seq_len: 10,
  batch_size: 2,
  ...change,
});
const open = (change: Partial<SourceOptions>) => openSource(options(change), { cacheFolder: folder.path('cache') });

describe('openSource', () => {
  it('opens each kind', async () => {
    const text = folder.write('text/a.txt', 'x'.repeat(200));
    const jsonl = folder.write('a.jsonl', `{"body":"${'y'.repeat(150)}"}\n`);
    const opened = [
      await open({}),
      await open({ source: 'text', path: [text] }),
      await open({ source: 'jsonl', path: jsonl, text_field: 'body' }),
      await open({ source: 'synthetic', path: undefined, vocab_size: 77 }),
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

  it('takes a vocabulary larger than the tokenizer for padding, and warns of skipped files', async () => {
    folder.write('mixed/a.txt', 'x'.repeat(50));
    folder.write('mixed/b.bin', '\0');
    const warnings: string[] = [];
    for (const _ of [1, 2]) {
      const source = await openSource(options({ source: 'text', path: folder.path('mixed'), vocab_size: 320 }), {
        cacheFolder: folder.path('cache'),
        onWarning: (message) => warnings.push(message),
      });
      expect(source.vocabSize).toBe(320);
      source.close();
    }
    expect(warnings).toEqual(new Array(2).fill('1 files were skipped: not UTF-8 text'));
  });

  it.each<[Partial<SourceOptions>, string]>([
    [{ source: 'text', path: undefined }, 'data.path: needed by data.source text'],
    [{ source: 'jsonl', path: [] }, 'data.path: needed by data.source jsonl'],
    [{ path: [shards] }, 'data.path: data.source tokens takes one folder'],
    [{ path: folder.path('nothing') }, `cannot read ${folder.path('nothing', 'index.json')}`],
    [{ source: 'text', path: folder.path('nothing') }, `data.path: no such file or folder: ${folder.path('nothing')}`],
    [{ source: 'synthetic' }, 'set vocab_size'],
    [
      { tokenizer: 'gpt2' },
      `${shards} was prepared with tokenizer byte, but data.tokenizer is gpt2; set data.tokenizer`,
    ],
    [
      { vocab_size: 200 },
      'data.tokenizer: byte has 256 tokens, more than the vocabulary of 200; raise it to at least 256',
    ],
    [{ seq_len: 100 }, `${shards} has 100 tokens, fewer than one sample of 101; add text or lower train.seq_len`],
    [{ seq_len: 60, val_fraction: 0.1 }, 'or set data.val_fraction to 0'],
  ])('refuses %j with a remedy', async (change, message) => {
    await expect(open(change)).rejects.toThrow(UsageError);
    await expect(open(change)).rejects.toThrow(message);
  });
});
