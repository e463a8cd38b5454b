import { createHash } from 'node:crypto';
import { mkdtempSync, readdirSync, readFileSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { UsageError } from '../errors.js';
import fc from '../testing/properties.js';
import { openSafetensors, readSafetensors, writeSafetensors } from './safetensors.js';
import { toFloat64 } from './safetensors-format.js';
import type { TensorToWrite } from './tensor-source.js';

let folder: string;
let path: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-safetensors-'));
  path = join(folder, 'file.safetensors');
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const WEIGHTS: TensorToWrite[] = [
  { name: 'mask', dtype: 'BOOL', shape: [3], data: new Uint8Array([1, 0, 1]) },
  { name: 'w', dtype: 'F32', shape: [2, 1], data: () => new Uint8Array(new Float32Array([1.5, -2]).buffer) },
  { name: 'empty', dtype: 'F32', shape: [0], data: new Uint8Array(0) },
];

test('what was written is read, with the hash of the file', () => {
  const { bytes, sha256 } = writeSafetensors(path, WEIGHTS, { step: '7' }, { fsync: true });
  const content = readFileSync(path);
  expect(bytes).toBe(content.length);
  expect(sha256).toBe(createHash('sha256').update(content).digest('hex'));
  const { metadata, tensors } = readSafetensors(path);
  expect(metadata).toEqual({ step: '7' });
  expect(tensors.get('w')?.shape).toEqual([2, 1]);
  expect([...toFloat64(tensors.get('w')!)]).toEqual([1.5, -2]);
  expect([...tensors.get('mask')!.data]).toEqual([1, 0, 1]);
  expect(tensors.get('empty')?.data.length).toBe(0);
  expect(readdirSync(folder)).toEqual(['file.safetensors']);
});

test('a large file has its hash too, and a failing write of one ends', () => {
  const piece = new Uint8Array(5 << 20).map((_, i) => i >> 8);
  const shape = [14, piece.length];
  const pieces = function* (count: number) {
    for (let i = 0; i < count; i++) yield piece.fill(i, 0, 100);
  };
  const write = (count: number) =>
    writeSafetensors(path, [{ name: 'a', dtype: 'U8', shape, data: () => pieces(count) }]);
  const { sha256 } = write(14);
  expect(sha256).toBe(createHash('sha256').update(readFileSync(path)).digest('hex'));
  expect(() => write(13)).toThrow('its shape needs 73400320');
  expect(readdirSync(folder)).toEqual(['file.safetensors']);
});

test('pieces of a tensor come in the same memory, those of two tensors read in turns do not', () => {
  const large = new Uint8Array(9 << 20).map((_, i) => i >> 12);
  writeSafetensors(path, [
    { name: 'a', dtype: 'U8', shape: [large.length], data: large },
    { name: 'b', dtype: 'U8', shape: [large.length], data: large.toReversed() },
  ]);
  const file = openSafetensors(path);
  const read = (name: string) => Array.from(file.pieces(name, 0, large.length), (piece) => piece.buffer);
  const memory = read('a');
  expect(memory).toEqual([memory[0], memory[0]]);
  expect(read('b')[0] === memory[0]).toBe(true);
  const [a, b] = ['a', 'b'].map((name) => file.pieces(name, 0, large.length)[Symbol.iterator]());
  for (const at of [0, 8 << 20]) {
    const [one, other] = [a.next().value!, b.next().value!];
    expect(Buffer.compare(one, large.subarray(at, at + one.length))).toBe(0);
    expect(other[0]).toBe(large[large.length - 1 - at]);
  }
  file.close();
});

test('the bytes are those of the format: length, header, data', () => {
  writeSafetensors(path, [{ name: 'a', dtype: 'U8', shape: [2], data: new Uint8Array([5, 6]) }]);
  const content = readFileSync(path);
  const json = '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'.padEnd(56, ' ');
  expect(content.readBigUInt64LE(0)).toBe(56n);
  expect(content.toString('latin1', 8, 64)).toBe(json);
  expect([...content.subarray(64)]).toEqual([5, 6]);
});

test('one tensor is read into memory that the caller owns', () => {
  writeSafetensors(path, WEIGHTS);
  const file = openSafetensors(path);
  const target = new Uint8Array(3);
  file.readInto('mask', target);
  expect([...target]).toEqual([1, 0, 1]);
  expect(() => file.readInto('mask', new Uint8Array(4))).toThrow('has 3 bytes, expected 4');
  expect(() => file.read('missing')).toThrow(`${path}: there is no tensor "missing"`);
  truncateSync(path, 70);
  expect(() => file.readInto('mask', target)).toThrow('became shorter');
  file.close();
});

test('a refused or failing write leaves the old file', () => {
  writeSafetensors(path, WEIGHTS);
  const before = readFileSync(path);
  const short: TensorToWrite = { name: 'w', dtype: 'F32', shape: [2], data: new Uint8Array(4) };
  expect(() => writeSafetensors(path, [short])).toThrow('has 4 bytes, its shape needs 8');
  const failure = new Error('device lost');
  const lost: TensorToWrite = {
    ...short,
    data: () => {
      throw failure;
    },
  };
  expect(() => writeSafetensors(path, [lost])).toThrow(failure);
  expect(() => writeSafetensors(path, [{ ...short, dtype: 'F4' as 'F32' }])).toThrow('no dtype among');
  expect(readFileSync(path)).toEqual(before);
  expect(readdirSync(folder)).toEqual(['file.safetensors']);
  expect(() => writeSafetensors(join(folder, 'no', 'x.safetensors'), WEIGHTS)).toThrow(UsageError);
});

test('anything round-trips', () => {
  const tensor = fc.tuple(fc.constantFrom('U8', 'I8', 'BOOL'), fc.uint8Array({ maxLength: 40 }));
  const file = fc.dictionary(fc.string({ unit: 'binary' }), tensor, { maxKeys: 6 });
  const metadata = fc.dictionary(fc.string(), fc.string(), { maxKeys: 3 });
  fc.assert(
    fc.property(file, metadata, (tensors, texts) => {
      const list = Object.entries(tensors).map(([name, [dtype, data]]) => ({
        name,
        dtype: dtype as 'U8',
        shape: [data.length],
        data,
      }));
      writeSafetensors(path, list, texts);
      const read = readSafetensors(path);
      expect(read.tensors.size).toBe(list.length);
      for (const { name, data } of list) expect(read.tensors.get(name)?.data).toEqual(new Uint8Array(data));
      expect(Object.entries(read.metadata).sort()).toEqual(Object.entries(texts).sort());
    }),
    { numRuns: 100 },
  );
});

/** Either the file parses, or it is refused with its name; nothing else may happen, and memory stays bounded by the file. */
function parsesOrRefuses(content: Uint8Array): void {
  writeFileSync(path, content);
  const before = process.memoryUsage().arrayBuffers;
  try {
    const { tensors } = readSafetensors(path);
    let total = 0;
    for (const { data } of tensors.values()) total += data.length;
    expect(total).toBeLessThanOrEqual(content.length);
  } catch (error) {
    expect(error).toBeInstanceOf(UsageError);
    expect((error as Error).message.startsWith(`${path}: `)).toBe(true);
    expect((error as Error).message).not.toContain('\n');
  }
  expect(process.memoryUsage().arrayBuffers - before).toBeLessThan(1_000_000);
}

function withPrefix(header: Uint8Array, data: Uint8Array, claimed = BigInt(header.length)): Uint8Array {
  const prefix = new Uint8Array(new BigUint64Array([claimed]).buffer);
  return Buffer.concat([prefix, header, data]);
}

test('fuzz: random bytes', () => {
  fc.assert(fc.property(fc.uint8Array({ maxLength: 200 }), parsesOrRefuses), { numRuns: 400 });
});

test('fuzz: huge claims', () => {
  const claim = fc.bigInt({ min: 0n, max: 2n ** 64n - 1n });
  const body = fc.uint8Array({ maxLength: 60 });
  fc.assert(fc.property(claim, body, (size, bytes) => parsesOrRefuses(withPrefix(bytes, new Uint8Array(0), size))));
});

test('fuzz: truncations and flipped bits of a good file', () => {
  writeSafetensors(path, WEIGHTS, { a: 'b' });
  const good = readFileSync(path);
  for (let length = 0; length < good.length; length++) parsesOrRefuses(good.subarray(0, length));
  for (let bit = 0; bit < good.length * 8; bit++) {
    const flipped = new Uint8Array(good);
    flipped[bit >> 3] ^= 1 << (bit & 7);
    parsesOrRefuses(flipped);
  }
});

test('fuzz: headers that are JSON of the right kind with hostile values', () => {
  const number = fc.oneof(fc.integer({ min: -2, max: 12 }), fc.maxSafeInteger(), fc.double(), fc.constant(2 ** 63));
  const entry = fc.record(
    {
      dtype: fc.oneof(fc.constantFrom('F32', 'U8', 'F64', 'BF16', '__proto__'), fc.jsonValue()),
      shape: fc.oneof(fc.array(number, { maxLength: 4 }), fc.jsonValue()),
      data_offsets: fc.oneof(fc.array(number, { maxLength: 3 }), fc.jsonValue()),
    },
    { requiredKeys: [] },
  );
  const name = fc.oneof(fc.constantFrom('a', 'b', '__metadata__', '__proto__', 'constructor'), fc.string());
  const header = fc.oneof(fc.dictionary(name, fc.oneof(entry, fc.jsonValue())), fc.jsonValue());
  fc.assert(
    fc.property(header, fc.uint8Array({ maxLength: 16 }), (value, data) =>
      parsesOrRefuses(withPrefix(new TextEncoder().encode(JSON.stringify(value)), data)),
    ),
    { numRuns: 1000 },
  );
});

test('deep nesting does not exhaust the stack', () => {
  for (const text of ['['.repeat(300_000), `{"a":${'['.repeat(300_000)}${']'.repeat(300_000)}}`]) {
    parsesOrRefuses(withPrefix(new TextEncoder().encode(text), new Uint8Array(0)));
  }
});

test('a file larger than 2 GiB opens, and one tensor of it is read', () => {
  // The data is a hole in a sparse file: nothing is written to the disk.
  const size = 3 * 2 ** 30;
  const header = `{"big":{"dtype":"U8","shape":[${size}],"data_offsets":[0,${size}]},"end":{"dtype":"U8","shape":[1],"data_offsets":[${size},${size + 1}]}}`;
  writeFileSync(path, withPrefix(new TextEncoder().encode(header), new Uint8Array(0)));
  truncateSync(path, 8 + header.length + size + 1);
  const file = openSafetensors(path);
  expect([...file.read('end').data]).toEqual([0]);
  expect(file.entry('big').end).toBe(size);
  file.close();
});
