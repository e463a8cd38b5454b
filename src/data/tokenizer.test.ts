import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { trainFlags } from '../config/flags.js';
import { UsageError } from '../errors.js';
import { byteLevelTokenizerJson } from './testing/tokenizer-json.js';
import { createTokenizer } from './tokenizer.js';
import { BUILT_IN_TOKENIZERS } from './tokenizers/built-in.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-tokenizer-'));
afterAll(() => rmSync(folder, { recursive: true }));

describe('createTokenizer', () => {
  it('knows the built-in names', () => {
    expect(createTokenizer('byte')).toMatchObject({ name: 'byte', vocabSize: 256, separator: 0 });
    expect(createTokenizer('gpt2')).toMatchObject({ name: 'gpt2', vocabSize: 50257, separator: 50256 });
  });

  it('takes a tokenizer.json or its folder', () => {
    const path = join(folder, 'tokenizer.json');
    writeFileSync(path, JSON.stringify(byteLevelTokenizerJson()));
    expect(createTokenizer(folder).identity).toBe(createTokenizer(path).identity);
  });

  it('is offered by name in the help of --tokenizer', () => {
    const meaning = trainFlags.find(({ name }) => name === 'tokenizer')!.meaning;
    expect(meaning).toBe(`${BUILT_IN_TOKENIZERS.join(', ')} or the path of a tokenizer.json`);
  });

  it('refuses what is neither, by name', () => {
    expect(() => createTokenizer('llama')).toThrow(UsageError);
    expect(() => createTokenizer('llama')).toThrow(
      'data.tokenizer: "llama" is not one of byte, gpt2, stories and not an existing',
    );
    const empty = mkdtempSync(join(folder, 'empty-'));
    expect(() => createTokenizer(empty)).toThrow(`data.tokenizer: the folder ${empty} has no tokenizer.json`);
  });
});
