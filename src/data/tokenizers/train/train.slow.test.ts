/** Tokenizers that are trained here: their merges are those of the reference, their ids those of other programs. */
import { existsSync, readFileSync } from 'node:fs';
import * as library from '@huggingface/tokenizers';
import { describe, expect, it } from 'vitest';
import { UsageError } from '../../../errors.js';
import { randomNumbers } from '../../../testing/random.js';
import { openCorpus } from '../../sources/corpus.js';
import { localOptions } from '../../testing/corpora.js';
import { testFolder } from '../../testing/folder.js';
import { DIFFICULT_TEXTS, LONE_SURROGATES } from '../../testing/texts.js';
import { createTokenizer } from '../../tokenizer.js';
import { countText } from './count-text.js';
import { learnMerges } from './merges.js';
import { referenceMerges } from './reference.js';
import { trainTokenizer } from './train.js';
import { WordCounter, type WordCounts } from './word-counter.js';

// Its type declarations do not resolve under NodeNext.
const { Tokenizer: LibraryTokenizer } = library as unknown as {
  Tokenizer: new (file: object, config: object) => { encode(text: string): { ids: number[] } };
};
const folder = testFolder();

const wellFormed = (text: string) => Buffer.from(text, 'utf8').toString('utf8');

const wordsOf = ({ units, begins, counts }: WordCounts): Map<string, number> =>
  new Map(
    Array.from(counts, (count, word) => [
      String.fromCharCode(...units.subarray(begins[word], begins[word + 1])),
      count,
    ]),
  );
const count = (text: string): WordCounts => {
  const words = new WordCounter();
  countText(text, words);
  return words.result();
};

/** 20 texts: prose, other scripts, astral planes, invalid UTF-8, runs, one long word. */
const invalid = Buffer.from([0x61, 0xff, 0xfe, 0xc3, 0x28, 0xe2, 0x82, 0x62, 0x80, 0x61, 0xff, 0xfe]).toString('utf8');
const TEXTS: Record<string, string> = {
  ...DIFFICULT_TEXTS,
  surrogates: LONE_SURROGATES.text.repeat(5),
  invalid: `${invalid} ${invalid}`.repeat(7),
  astral: '𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈𐍉𐍈 🜁🜂🜁 𝔘𝔫𝔦 🀄🀅🀄🀅'.repeat(6),
  run: 'a'.repeat(1001),
  runs: 'aaa aaaa aaaaa bbb abab ababab aabaab '.repeat(9),
  longWord: Array.from({ length: 3000 }, (_, i) => 'abcdefgh'[(i * i + 3 * i) % 8]).join(''),
  digits: Array.from({ length: 300 }, (_, i) => `${i * 37}`).join(' '),
  arrows: 'if (x === null) return x ?? y;\n\treturn (x) => x + y;\n'.repeat(20),
  repeated: 'the cat sat on the mat, the dog sat on the log. '.repeat(30),
  mixed2: 'naïve café Привет мир 天地 天地玄黃 नमस्ते नमस्ते '.repeat(12),
};

describe('learned merges', () => {
  it.each(Object.entries(TEXTS))('are those of the reference: %s', (_, text) => {
    const words = count(text);
    const { left, right } = learnMerges(words, 120);
    const expected = referenceMerges(wordsOf(words), 120);
    expect([...left]).toEqual([...expected.left]);
    expect([...right]).toEqual([...expected.right]);
  });

  it('are 20 texts', () => expect(Object.keys(TEXTS).length).toBeGreaterThanOrEqual(20));

  it('of one word of a megabyte take seconds', () => {
    const started = performance.now();
    const random = randomNumbers(3);
    const word = Array.from({ length: 1 << 20 }, () => String.fromCharCode(97 + Math.floor(26 * random()))).join('');
    expect(learnMerges(count(word), 2000).left.length).toBe(2000);
    expect(performance.now() - started).toBeLessThan(60_000);
  });
});

describe('a word counter', () => {
  it('counts as a map does, also when it is joined from several', () => {
    const random = randomNumbers(5);
    const text = Array.from({ length: 200_000 }, () => `w${Math.floor(random() ** 3 * 60_000)}`).join(' ');
    const plain = new Map<string, number>();
    for (const [word] of text.matchAll(/ ?\p{L}+| ?\p{N}+/gu)) plain.set(word, (plain.get(word) ?? 0) + 1);
    expect(wordsOf(count(text))).toEqual(plain);
    const joined = new WordCounter();
    const middle = text.indexOf(' w', text.length / 2);
    for (const half of [text.slice(0, middle), text.slice(middle)]) joined.merge(count(half));
    expect(wordsOf(joined.result())).toEqual(plain);
  });
});

folder.write(
  'corpus/a.jsonl',
  Array.from({ length: 600 }, (_, i) => {
    const text = `Line ${i}: ${Object.values(TEXTS)[i % 20].slice(0, 400)} and ${'so on, '.repeat(i % 9)}`;
    return JSON.stringify({ text: wellFormed(text) });
  }).join('\n'),
);
folder.write('corpus/b.txt', readFileSync(new URL('../../../../CHANGELOG.md', import.meta.url)));

const train = async (
  name: string,
  vocabSize: number,
  {
    special = [],
    workers = 2,
    path = folder.path('corpus'),
  }: { special?: string[]; workers?: number; path?: string } = {},
) => {
  const spec = await openCorpus(localOptions('files', path));
  return trainTokenizer({ spec, vocabSize, specialTokens: special, folder: folder.path(name), workers });
};

/** Pieces of the texts and characters of all planes, in random order. */
function randomTexts(many: number): string[] {
  const random = randomNumbers(17);
  const all = Object.values(TEXTS).map(wellFormed);
  // In these two the library's pattern, JavaScript's \s, differs from Unicode's White_Space.
  const isSpecial = (point: number) => point === 0xfeff || point === 0x85 || (point >= 0xd800 && point < 0xe000);
  const piece = (): string => {
    const text = all[Math.floor(random() * all.length)];
    const start = Math.floor(random() * text.length);
    if (random() < 0.7) return wellFormed(text.slice(start, start + Math.floor(random() * 40)));
    const point = Math.floor(random() * (random() < 0.5 ? 0x300 : 0x110000));
    return isSpecial(point) ? '' : String.fromCodePoint(point);
  };
  return Array.from({ length: many }, () =>
    Array.from({ length: Math.floor(random() * 6) }, piece)
      .join(random() < 0.5 ? ' ' : '')
      .replaceAll(/[\uFEFF\u0085]/g, ''),
  );
}

describe('a trained tokenizer', () => {
  it('is files from which this program and @huggingface/tokenizers make the same ids, of 10,000 texts', async () => {
    const result = await train('own', 1200, { special: ['<|im_start|>', '<|im_end|>'] });
    expect(result).toMatchObject({ vocabSize: 1200, documents: 601 });
    const [file, config] = ['tokenizer.json', 'tokenizer_config.json'].map((name) =>
      JSON.parse(readFileSync(folder.path('own', name), 'utf8')),
    );
    expect(Object.values(file.model.vocab).sort((a, b) => Number(a) - Number(b))).toEqual(
      Array.from({ length: 1200 }, (_, id) => id),
    );
    const own = createTokenizer(folder.path('own'));
    expect([own.vocabSize, own.separator]).toEqual([1200, 0]);
    const library = new LibraryTokenizer(file, config);
    let tokens = 0;
    for (const text of randomTexts(10_000)) {
      const ids = [...own.encode(text, { parseSpecial: true })];
      expect(library.encode(text).ids, JSON.stringify(text)).toEqual(ids);
      expect(own.decode(ids)).toBe(text);
      tokens += ids.length;
    }
    expect(tokens).toBeGreaterThan(100_000);
    expect([...own.encode('<|im_start|>hi<|im_end|>', { parseSpecial: true })].filter((id) => id < 3)).toEqual([1, 2]);
  }, 120_000);

  it('does not depend on the number of threads or the order of files', async () => {
    const files: string[] = [];
    for (const workers of [1, 3]) {
      await train(`threads-${workers}`, 700, { workers });
      files.push(readFileSync(folder.path(`threads-${workers}`, 'tokenizer.json'), 'utf8'));
    }
    expect(files[1]).toBe(files[0]);
  });

  it.each([
    [256, [], '--vocab-size: 256 is less than 257 (256 bytes, <|endoftext|>); at least 257'],
    [Number.NaN, [], '--vocab-size: NaN is less than 257 (256 bytes, <|endoftext|>); at least 257'],
    [257, ['<pad>'], '--vocab-size: 257 is less than 258 (256 bytes, <|endoftext|>, 1 special token); at least 258'],
    [900, ['<a>', '<a>'], '--special-token: <a> is given twice; leave one out'],
    [900, [''], '--special-token: "" is no text; give one such as <|im_start|>'],
    [900, ['in'], '--special-token: in is also an ordinary token of the text; choose another text for it'],
  ])('is refused for %d tokens with %j, and nothing is written', async (vocabSize, special, message) => {
    await expect(train('refused', vocabSize, { special })).rejects.toThrow(new UsageError(message));
    expect(existsSync(folder.path('refused'))).toBe(false);
  });

  it('has bytes alone where the text has no more, and replaces no other', async () => {
    const path = folder.write('tiny.txt', 'abc');
    expect((await train('bytes', 257, { path })).vocabSize).toBe(257);
    expect(createTokenizer(folder.path('bytes')).vocabSize).toBe(257);
    expect((await train('small', 300, { path })).vocabSize).toBe(257);
    await expect(train('small', 300, { path })).rejects.toThrow(/tokenizer\.json exists already; choose another --out/);
  });
});
