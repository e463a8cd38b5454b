import { execFileSync } from 'node:child_process';
import { readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { testFolder } from '../testing/folder.js';
import { writeShards } from '../testing/shards.js';
import { DamagedShards, encodeIndex, readIndex } from './format.js';
import { tokenTypeFor } from './token-type.js';

const folder = testFolder();

function written(): string {
  const path = folder.fresh();
  writeShards(path, [[1, 2, 3], [4]]);
  return path;
}

describe('tokenTypeFor', () => {
  it('takes the smallest type that holds the vocabulary', () => {
    expect([256, 257, 65536, 65537, 2 ** 31].map(tokenTypeFor)).toEqual(['u8', 'u16', 'u16', 'u32', 'u32']);
    expect(() => tokenTypeFor(2 ** 31 + 1)).toThrow('too large');
  });
});

describe('readIndex', () => {
  it('returns what was written', () => {
    expect(readIndex(written())).toMatchObject({
      version: 1,
      tokenizer: { name: 'byte', identity: 'byte' },
      vocabSize: 256,
      dtype: 'u8',
      separator: 0,
      tokens: 6,
      documents: 2,
    });
  });

  it('gives equal content an equal checksum, in any folder', () => {
    expect(readIndex(written()).checksum).toBe(readIndex(written()).checksum);
    const other = folder.fresh();
    writeShards(other, [[1, 2, 3], [5]]);
    expect(readIndex(other).checksum).not.toBe(readIndex(written()).checksum);
  });

  it('notices any changed character', () => {
    const path = join(written(), 'index.json');
    const original = readFileSync(path, 'latin1');
    for (let at = 0; at < original.length; at++) {
      const character = original[at];
      if (/\s/.test(character)) continue;
      const changed = character === '7' ? '8' : '7';
      writeFileSync(path, original.slice(0, at) + changed + original.slice(at + 1), 'latin1');
      expect(() => readIndex(join(path, '..')), `changed "${character}" at ${at}`).toThrow(DamagedShards);
    }
  });

  it.each([
    ['', 'not valid JSON'],
    ['null', 'not an index of prepared tokens'],
    ['{"format":"other"}', 'not an index of prepared tokens'],
    ['{"format":"trefoil-tokens","version":2,"checksum":""}', 'format version 2, but this program reads 1'],
    ['{"format":"trefoil-tokens","version":1,"checksum":""}', 'tokenizer: '],
  ])('refuses %j by name', (content, message) => {
    const path = folder.fresh();
    writeFileSync(join(path, 'index.json'), content);
    expect(() => readIndex(path)).toThrow(UsageError);
    expect(() => readIndex(path)).toThrow(
      `${join(path, 'index.json')}: ${message.startsWith('not valid') ? 'damaged (' : ''}${message}`,
    );
  });

  it('refuses a file name that leads out of the folder', () => {
    const path = written();
    const text = readFileSync(join(path, 'index.json'), 'utf8').replace('tokens-00000.bin', '../tokens-00000.bin');
    writeFileSync(join(path, 'index.json'), text);
    expect(() => readIndex(path)).toThrow('shards.0.tokens.file');
  });

  it('names a missing index', () => {
    expect(() => readIndex(folder.path('none'))).toThrow(
      `${folder.path('none', 'index.json')}: cannot read: there is no such file or folder; prepare the shards again`,
    );
  });

  it.each<[string, (path: string) => void, string]>([
    ['a pipe', (path) => execFileSync('mkfifo', [path]), 'is not a regular file'],
    ['a device', (path) => symlinkSync('/dev/zero', path), 'is not a regular file'],
    ['of 65 MiB', (path) => writeFileSync(path, Buffer.alloc(65 << 20, 32)), 'is too large'],
  ])('refuses an index that is %s', (_, make, message) => {
    const path = folder.fresh();
    make(join(path, 'index.json'));
    expect(() => readIndex(path)).toThrow(DamagedShards);
    expect(() => readIndex(path)).toThrow(`${join(path, 'index.json')}: ${message}`);
  });

  it('refuses an index that lists a file twice', () => {
    const { checksum, format, version, ...content } = readIndex(written());
    expect(() => encodeIndex({ ...content, shards: [content.shards[0], content.shards[0]] })).toThrow(
      'a file is listed twice',
    );
    expect([checksum.length, format, version]).toEqual([64, 'trefoil-tokens', 1]);
  });
});
