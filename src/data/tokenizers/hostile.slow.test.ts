/** tokenizer.json files of strangers: what they describe is run under limits, and ordinary tokenizers are not slowed. */
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { cpuMs } from '../../testing/cpu-time.js';
import { threadMilliseconds } from '../../time-limit.js';
import { byteLevelTokenizerJson } from '../testing/tokenizer-json.js';
import { doubtfulPattern } from './huggingface/step.js';
import { createHuggingFaceTokenizer } from './huggingface.js';

const root = mkdtempSync(join(tmpdir(), 'trefoil-hostile-'));
afterAll(() => rmSync(root, { recursive: true }));

function write(changes: object): string {
  const folder = mkdtempSync(join(root, 'case-'));
  const path = join(folder, 'tokenizer.json');
  writeFileSync(path, JSON.stringify({ ...byteLevelTokenizerJson(), ...changes }));
  return path;
}
const split = (source: string) => ({
  type: 'Split',
  pattern: { Regex: source },
  behavior: 'Isolated',
  invert: false,
});
const replace = (content: string) => ({ type: 'Replace', pattern: { String: 'a' }, content });
const added = (count: number, content: (i: number) => string) => [
  { id: 262, content: '<|endoftext|>', special: true },
  ...Array.from({ length: count }, (_, i) => ({ id: 263 + i, content: content(i) })),
];

describe('the tokenizer of a stranger', () => {
  it.each([
    ['an expression that backtracks', { pre_tokenizer: split('(a+)+$') }, 'the expression "(a+)+$" takes more than'],
    ['a polynomial expression', { pre_tokenizer: split('a*a*a*a*a*a*a*b') }, 'takes more than'],
    ['a replacement', { normalizer: { ...replace('x'), pattern: { Regex: '(a|a)+$' } } }, 'takes more than'],
    ['a replacement bomb', { normalizer: replace('b'.repeat(100_000)) }, 'makes a text 32 times as long'],
    [
      'a chain of replacements',
      { normalizer: { type: 'Sequence', normalizers: Array(60).fill(replace('aa')) } },
      'makes a text 32 times as long',
    ],
  ])('ends in one line: %s', (_, changes, message) => {
    const tokenizer = createHuggingFaceTokenizer(write(changes));
    const started = threadMilliseconds();
    const encode = () => tokenizer.encode(`${'a'.repeat(200)}c`);
    expect(encode).toThrow(UsageError);
    expect(threadMilliseconds() - started).toBeLessThan(4000);
    expect(encode).toThrow(message);
  });

  it('may have 300,000 added tokens, of which the longest is found', () => {
    const path = write({ added_tokens: added(300_000, (i) => `<tok_${i}>`) });
    const ms = cpuMs(() => {
      const tokenizer = createHuggingFaceTokenizer(path);
      expect([...tokenizer.encode('a<tok_299999><tok_1><tok_')]).toEqual([
        ...[97, 300_262, 264],
        ...Buffer.from('<tok_'),
      ]);
    });
    expect(ms).toBeLessThan(10_000); // 26 s as one expression
  });

  it('finds the same of many added tokens as of few', () => {
    const names = ['<a>', '<a><', '<ab>', 'é', '😀x', '😀', ' b '];
    const make = (more: number) =>
      createHuggingFaceTokenizer(write({ added_tokens: added(names.length + more, (i) => names[i] ?? `\u2028${i}`) }));
    const [few, many] = [make(0), make(5000)];
    for (const text of ['<a><a><ab>é', '😀😀x b <a', 'x b  b ', '<a><<a>', '\ud83dx'])
      expect([...many.encode(text)]).toEqual([...few.encode(text)]);
  });

  it('does not read files outside of its folder', () => {
    const path = write({});
    const secret = join(root, 'secret');
    writeFileSync(secret, 'secret');
    symlinkSync(secret, join(path, '..', 'chat_template.jinja'));
    expect(() => createHuggingFaceTokenizer(path)).toThrow(/chat_template\.jinja: is a link that leaves its folder/);
  });

  it('may be a snapshot of the hub, whose files are links to blobs', () => {
    const snapshot = join(root, 'models--x', 'snapshots', 'abc');
    const blobs = join(root, 'models--x', 'blobs');
    for (const folder of [snapshot, blobs]) mkdirSync(folder, { recursive: true });
    writeFileSync(join(blobs, '1'), JSON.stringify(byteLevelTokenizerJson()));
    symlinkSync(join('..', '..', 'blobs', '1'), join(snapshot, 'tokenizer.json'));
    expect(createHuggingFaceTokenizer(join(snapshot, 'tokenizer.json')).vocabSize).toBe(263);
    symlinkSync(join(root, 'secret'), join(blobs, '2'));
    symlinkSync(join('..', '..', 'blobs', '2'), join(snapshot, 'chat_template.jinja'));
    expect(() => createHuggingFaceTokenizer(join(snapshot, 'tokenizer.json'))).toThrow('leaves its folder');
  });
});

it('the expressions of common models are known', () => {
  const words = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|";
  const rest = '| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+';
  for (const number of ['\\p{N}', '\\p{N}{1,3}']) expect(doubtfulPattern(split(words + number + rest))).toBe(undefined);
  expect(doubtfulPattern(null, { type: 'Sequence', pretokenizers: [split('\\s+$')] })).toBe('\\s+$');
});
