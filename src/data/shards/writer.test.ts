import { createHash } from 'node:crypto';
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { testFolder } from '../testing/folder.js';
import { numberTokenizer, writeShards } from '../testing/shards.js';
import { createByteTokenizer } from '../tokenizers/bytes.js';
import { readIndex } from './format.js';
import { ShardWriter } from './writer.js';

const folder = testFolder();
const read = (path: string, name: string): Buffer => readFileSync(join(path, name));

describe('ShardWriter', () => {
  it('writes the documented bytes', () => {
    const path = folder.fresh();
    writeShards(path, [[0x0102, 0xfffe], [7]], numberTokenizer(65536));
    expect([...read(path, 'tokens-00000.bin')]).toEqual([2, 1, 0xfe, 0xff, 0, 0, 7, 0, 0, 0]);
    const starts = read(path, 'docs-00000.bin');
    expect([starts.length, starts.readDoubleLE(0), starts.readDoubleLE(8)]).toEqual([16, 0, 3]);
  });

  it('writes sizes and hashes that match the files, and no other file', () => {
    const path = folder.fresh();
    writeShards(
      path,
      [
        [1, 2, 3, 4, 5, 6, 7],
        [8, 9],
      ],
      createByteTokenizer(),
      4,
    );
    const index = readIndex(path);
    const files = index.shards.flatMap((shard) => [shard.tokens, shard.documents]);
    for (const { file, bytes, sha256 } of files) {
      expect(read(path, file).length).toBe(bytes);
      expect(createHash('sha256').update(read(path, file)).digest('hex')).toBe(sha256);
    }
    expect(readdirSync(path).sort()).toEqual([...files.map((file) => file.file), 'index.json'].sort());
  });

  it('cuts shards at the exact size and lists a document where it begins', () => {
    const path = folder.fresh();
    // Stream: 1 1 1 0 | 2 0 3 3 | 3 0 4 0: documents begin at 0, 4, 6 and 10.
    writeShards(path, [[1, 1, 1], [2], [3, 3, 3], [4]], createByteTokenizer(), 4);
    expect(readIndex(path).shards.map((shard) => shard.tokens.bytes)).toEqual([4, 4, 4]);
    const starts = [0, 1, 2].map((shard) => {
      const bytes = read(path, `docs-0000${shard}.bin`);
      return Array.from({ length: bytes.length / 8 }, (_, index) => bytes.readDoubleLE(8 * index));
    });
    expect(starts).toEqual([[0], [4, 6], [10]]);
  });

  it('writes the same shards from tokens that are joined in pieces of any size', () => {
    const documents = [[1, 1, 1], [2], [3, 3, 3, 3, 3], [4]];
    const direct = folder.fresh();
    writeShards(direct, documents, createByteTokenizer(), 4);
    const stream = documents.flatMap((ids) => [...ids, 0]);
    const starts = [0, 4, 6, 12];
    for (const size of [1, 3, 5, 14]) {
      const path = folder.fresh();
      const writer = new ShardWriter(path, createByteTokenizer(), 4);
      for (let from = 0; from < stream.length; from += size) {
        const inside = starts.filter((start) => start >= from && start < from + size).map((start) => start - from);
        writer.appendTokens(Int32Array.from(stream.slice(from, from + size)), inside);
      }
      expect(writer.finish()).toEqual(readIndex(direct));
    }
  });

  it('joins what is appended to one document, and leaves out empty ones', () => {
    const path = folder.fresh();
    const writer = new ShardWriter(path, createByteTokenizer());
    writer.append([]);
    writer.endDocument();
    writer.append([1, 2]);
    writer.append([3]);
    writer.endDocument();
    writer.endDocument();
    writer.append([4]);
    expect(writer.finish(5)).toMatchObject({ documents: 2, tokens: 6, skippedFiles: 5 });
    expect([...read(path, 'tokens-00000.bin')]).toEqual([1, 2, 3, 0, 4, 0]);
  });

  it('keeps more documents than its buffer holds', () => {
    const path = folder.fresh();
    writeShards(
      path,
      Array.from({ length: 20_000 }, (_, index) => [index % 256]),
      createByteTokenizer(),
      30_001,
    );
    const index = readIndex(path);
    expect(index.documents).toBe(20_000);
    expect(index.shards.map((shard) => shard.documents.bytes / 8)).toEqual([15_001, 4_999]);
  });

  it.each([-1, 256, Number.NaN])('refuses token %s by name', (id) => {
    const writer = new ShardWriter(folder.fresh(), createByteTokenizer());
    expect(() => writer.append([1, id])).toThrow(`tokenizer byte gave token ${id}, outside its vocabulary of 256`);
    writer.abandon();
  });

  it('never writes over a file, and can be abandoned twice', () => {
    const path = folder.fresh();
    writeShards(path, [[1]]);
    const writer = new ShardWriter(path, createByteTokenizer());
    writer.append([1]);
    expect(() => writer.finish()).toThrow('EEXIST');
    writer.abandon();
    writer.abandon();
  });
});
