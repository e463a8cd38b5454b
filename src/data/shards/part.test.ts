import { readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { testFolder } from '../testing/folder.js';
import { numberTokenizer, streamOf } from '../testing/shards.js';
import { createByteTokenizer } from '../tokenizers/bytes.js';
import { isWhole, PartWriter, partFile, readPart } from './part.js';
import { type TokenArray, tokenTypeFor } from './token-type.js';

const folder = testFolder();

function write(path: string, documents: readonly number[][], vocabSize: number, skipped = 0): void {
  const writer = new PartWriter(path, numberTokenizer(vocabSize));
  for (const ids of documents) {
    writer.append(ids);
    writer.endDocument();
  }
  expect(writer.documents).toBe(documents.filter((ids) => ids.length > 0).length);
  writer.finish(skipped);
}

function read(path: string, vocabSize: number, verify = true) {
  const tokens: number[] = [];
  const starts: number[] = [];
  const take = (ids: TokenArray, begins: Uint32Array): void => {
    for (const begin of begins) starts.push(tokens.length + begin);
    for (const id of ids) tokens.push(id);
  };
  const skipped = readPart(path, { type: tokenTypeFor(vocabSize), verify, take });
  return { tokens, starts, skipped };
}

function startsOf(documents: readonly number[][]): number[] {
  let position = 0;
  return documents
    .filter((ids) => ids.length > 0)
    .map((ids) => {
      const start = position;
      position += ids.length + 1;
      return start;
    });
}

describe('the file of a part', () => {
  // A block has 2^18 tokens, and 2^13 documents begin in it.
  const long = Array.from({ length: 3 }, (_, document) =>
    Array.from({ length: 200_000 }, (_, n) => (7 * n + document) % 250),
  );
  const many = Array.from({ length: 20_000 }, (_, document) => [document % 251]);
  const exact = [Array.from({ length: 2 ** 18 - 1 }, () => 1), [2]];

  it.each([
    ['several blocks of long documents', long],
    ['many documents', many],
    ['a document that ends with a block', exact],
    ['empty documents', [[], [3], [], [4, 5]]],
    ['nothing', []],
  ])('gives back %s', (_, documents) => {
    for (const vocabSize of [256, 65536, 65537]) {
      const path = partFile(folder.fresh(), 12);
      write(path, documents, vocabSize, 1);
      expect(isWhole(path)).toBe(true);
      const found = read(path, vocabSize);
      expect(found.starts.join()).toBe(startsOf(documents).join());
      expect(found.skipped).toBe(1);
      expect(found.tokens.join() === streamOf(documents).join()).toBe(true);
      expect(readdirSync(dirname(path))).toEqual(['part-000012']);
    }
  });

  it('is refused by name with any byte changed or cut off; one that was cut off is not whole', () => {
    const path = partFile(folder.fresh(), 0);
    write(path, [[1, 2], [3]], 65536);
    const bytes = readFileSync(path);
    const message = `${path}: damaged (its SHA-256 does not match); remove it and start again`;
    expect(isWhole(`${path}0`)).toBe(false);
    for (let index = 0; index < bytes.length; index++) {
      const changed = Buffer.from(bytes);
      changed[index] ^= 1;
      writeFileSync(path, changed);
      expect(() => read(path, 65536)).toThrow(message);
      writeFileSync(path, bytes.subarray(0, index));
      expect(isWhole(path)).toBe(false);
      expect(() => read(path, 65536)).toThrow(message);
    }
  });

  it('has no name before it is complete, and is gone when it is abandoned', () => {
    const at = folder.fresh();
    const writer = new PartWriter(join(at, 'part'), createByteTokenizer());
    writer.append([1]);
    expect(readdirSync(at)).toEqual([expect.stringMatching(/^part\.partial-/)]);
    writer.abandon();
    writer.abandon();
    expect(readdirSync(at)).toEqual([]);
  });

  it('refuses a token outside the vocabulary', () => {
    const writer = new PartWriter(join(folder.fresh(), 'part'), createByteTokenizer());
    expect(() => writer.append([1, 256])).toThrow('tokenizer byte gave token 256, outside its vocabulary of 256');
    writer.abandon();
  });
});
