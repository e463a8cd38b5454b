import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { UsageError } from '../errors.js';
import { byteLevelTokenizerJson } from './testing/tokenizer-json.js';
import { createTokenizer } from './tokenizer.js';

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

  it('refuses what is neither, by name', () => {
    expect(() => createTokenizer('llama')).toThrow(UsageError);
    expect(() => createTokenizer('llama')).toThrow(
      'data.tokenizer: "llama" is not one of byte, gpt2, stories and not an existing',
    );
  });
});
