import { execFileSync } from 'node:child_process';
import { appendFileSync, readFileSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import fc from '../../testing/properties.js';
import { testFolder } from '../testing/folder.js';
import { numberTokenizer, streamOf, writeShards } from '../testing/shards.js';
import { createByteTokenizer } from '../tokenizers/bytes.js';
import { DamagedShards, encodeIndex, readIndex } from './format.js';
import { ShardReader } from './reader.js';

const folder = testFolder();
const documents = Array.from({ length: 40 }, (_, document) =>
  Array.from({ length: (document * 7) % 23 }, (_, index) => (document * 31 + index * 17) % 250),
);
const stream = streamOf(documents);

function written(tokensPerShard?: number): string {
  const path = folder.fresh();
  writeShards(path, documents, createByteTokenizer(), tokensPerShard);
  return path;
}

describe('ShardReader', () => {
  it('returns any stretch of the stream, in any order, over any shards', () => {
    const readers = [1, 7, 100, undefined].map((size) => ShardReader.open(written(size)));
    const request = fc
      .tuple(fc.nat(stream.length), fc.nat(stream.length))
      .map(([from, to]) => [Math.min(from, to), Math.max(from, to)]);
    fc.assert(
      fc.property(
        fc.array(request, { minLength: 1, maxLength: 20 }),
        fc.constantFrom(...readers),
        (requests, reader) => {
          for (const [from, to] of requests) {
            expect([...reader.readTokens(from, to - from)]).toEqual(stream.slice(from, to));
          }
        },
      ),
    );
    for (const reader of readers) reader.close();
  });

  it.each([
    [256, 'u8'],
    [60_000, 'u16'],
    [2 ** 31, 'u32'],
  ])('returns the largest ids of a vocabulary of %i', (vocabSize, dtype) => {
    const path = folder.fresh();
    const ids = [0, 1, Math.floor(vocabSize / 2), vocabSize - 1];
    writeShards(path, [ids], numberTokenizer(vocabSize));
    const reader = ShardReader.open(path);
    expect(reader.index.dtype).toBe(dtype);
    expect([...reader.readTokens(0, 4)]).toEqual(ids);
    reader.close();
  });

  it('reads in order and at random beyond its buffer', () => {
    const path = folder.fresh();
    const ids = Array.from({ length: 300_000 }, (_, index) => index % 60_000);
    writeShards(path, [ids], numberTokenizer(60_000), 131_000);
    const reader = ShardReader.open(path);
    const check = (from: number, count: number): void => {
      const tokens = reader.readTokens(from, count);
      expect(tokens.findIndex((token, index) => token !== (from + index) % 60_000)).toBe(-1);
    };
    for (let from = 0; from + 1001 <= 300_000; from += 1000) check(from, 1001);
    for (let step = 0; step < 300; step++) check((step * 99_991) % 299_000, 1000);
    check(0, 300_000);
    reader.close();
  });

  it('knows where documents begin', () => {
    const reader = ShardReader.open(written(10));
    let position = 0;
    const starts = documents.flatMap((ids) => {
      if (ids.length === 0) return [];
      position += ids.length + 1;
      return [position - ids.length - 1];
    });
    expect([...reader.documentStarts]).toEqual(starts);
    reader.close();
  });

  it('writes to a place in a larger array, and refuses what is outside', () => {
    const reader = ShardReader.open(written());
    const target = new Int32Array(8).fill(-1);
    reader.readInto(5, 3, target, 2);
    expect([...target]).toEqual([-1, -1, ...stream.slice(5, 8), -1, -1, -1]);
    expect(() => reader.readTokens(stream.length - 1, 2)).toThrow('are outside its');
    expect(() => reader.readTokens(-1, 2)).toThrow('are outside its');
    reader.close();
  });
});

describe('damage', () => {
  it('detects any flipped bit and names the file', () => {
    const path = written(200);
    for (const name of ['tokens-00000.bin', 'tokens-00001.bin', 'docs-00000.bin']) {
      const file = join(path, name);
      const original = readFileSync(file);
      for (const at of [0, Math.floor(original.length / 2), original.length - 1]) {
        const flipped = Buffer.from(original);
        flipped[at] ^= 1;
        writeFileSync(file, flipped);
        expect(() => ShardReader.open(path)).toThrow(DamagedShards);
        expect(() => ShardReader.open(path)).toThrow(`${file}: damaged (its SHA-256 does not match`);
      }
      writeFileSync(file, original);
    }
    ShardReader.open(path).close();
  });

  it('opens without reading all of it when told to', () => {
    const path = written();
    const file = join(path, 'tokens-00000.bin');
    const bytes = readFileSync(file);
    bytes[3] ^= 1;
    writeFileSync(file, bytes);
    const reader = ShardReader.open(path, { verify: false });
    expect(reader.readTokens(3, 1)[0]).toBe(stream[3] ^ 1);
    reader.close();
  });

  it.each([true, false])('refuses a file that is too short, too long or missing, by name (verify: %s)', (verify) => {
    for (const name of ['tokens-00000.bin', 'docs-00000.bin']) {
      const path = written();
      const file = join(path, name);
      const size = readFileSync(file).length;
      truncateSync(file, size - 1);
      expect(() => ShardReader.open(path, { verify })).toThrow(`${file}: damaged (${size - 1} bytes, not ${size})`);
      appendFileSync(file, 'xx');
      expect(() => ShardReader.open(path, { verify })).toThrow(`${file}: damaged (${size + 1} bytes, not ${size})`);
      rmSync(file);
      expect(() => ShardReader.open(path, { verify })).toThrow(
        `${file}: cannot read: there is no such file or folder; prepare the shards again`,
      );
      execFileSync('mkfifo', [file]);
      expect(() => ShardReader.open(path, { verify })).toThrow(`${file}: is not a regular file`);
    }
  });

  it('refuses documents that no memory holds, before any is taken', () => {
    const path = written();
    const { checksum, format, version, ...content } = readIndex(path);
    const [shard] = content.shards;
    const bytes = 2 ** 43;
    truncateSync(join(path, shard.documents.file), bytes); // a file with holes
    const shards = [{ ...shard, documents: { ...shard.documents, bytes } }, ...content.shards.slice(1)];
    const documents = content.documents + (bytes - shard.documents.bytes) / 8;
    writeFileSync(join(path, 'index.json'), encodeIndex({ ...content, shards, documents }).text);
    expect(() => ShardReader.open(path)).toThrow(`${documents} documents take more memory than this machine has`);
    expect([checksum.length, format, version]).toEqual([64, 'trefoil-tokens', 1]);
  });

  it('names a file that is cut while in use', () => {
    const path = written();
    const reader = ShardReader.open(path);
    truncateSync(join(path, 'tokens-00000.bin'), 10);
    expect(() => reader.readTokens(5, 20)).toThrow(`${join(path, 'tokens-00000.bin')}: ends early`);
    reader.close();
  });

  it('refuses an index with sound hashes that contradicts its files', () => {
    const path = written();
    const { checksum, format, version, ...content } = readIndex(path);
    const rewrite = (change: Partial<typeof content>): void =>
      writeFileSync(join(path, 'index.json'), encodeIndex({ ...content, ...change }).text);
    rewrite({ tokens: content.tokens + 1 });
    expect(() => ShardReader.open(path)).toThrow(`the index says ${content.tokens + 1}`);
    rewrite({ documents: content.documents + 1 });
    expect(() => ShardReader.open(path)).toThrow('its document files have');
    rewrite({ tokens: 3 });
    expect(() => ShardReader.open(path)).toThrow('begins at an impossible place');
    rewrite({});
    expect(readIndex(path).checksum).toBe(checksum);
    expect([format, version]).toEqual(['trefoil-tokens', 1]);
  });

  it('refuses an id outside the vocabulary, though the hashes are right', () => {
    const path = folder.fresh();
    writeShards(path, [[1, 40_000, 2]], numberTokenizer(60_000));
    const { checksum, format, version, ...content } = readIndex(path);
    writeFileSync(join(path, 'index.json'), encodeIndex({ ...content, vocabSize: 40_000 }).text);
    expect([checksum.length, format, version]).toEqual([64, 'trefoil-tokens', 1]);
    const reader = ShardReader.open(path);
    expect([...reader.readTokens(2, 2)]).toEqual([2, 0]);
    expect(() => reader.readTokens(0, 3)).toThrow(
      `${path}: damaged (token 1 is 40000, outside the vocabulary of 40000)`,
    );
    reader.close();
  });

  it('is a usage error: one line, no stack', () => {
    expect(() => ShardReader.open(folder.path('none'))).toThrow(UsageError);
  });
});
