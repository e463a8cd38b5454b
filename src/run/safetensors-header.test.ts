import { expect, test } from 'vitest';
import { UsageError } from '../errors.js';
import { checkHeaderLength, encodeHeader, layOut, parseHeader } from './safetensors-format.js';

const PATH = '/models/evil.safetensors';

function parse(header: unknown, dataBytes: number): ReturnType<typeof parseHeader> {
  const text = typeof header === 'string' ? header : JSON.stringify(header);
  return parseHeader(PATH, new TextEncoder().encode(text), dataBytes);
}

function f32(begin: unknown, end: unknown, shape: unknown = [1]): unknown {
  return { dtype: 'F32', shape, data_offsets: [begin, end] };
}

/** Attacks on a reader of this format: each must be refused, with the reason named. */
const ATTACKS: [name: string, header: unknown, dataBytes: number, reason: string][] = [
  ['no JSON', '{"a":', 4, 'not JSON'],
  ['empty', '', 0, 'not JSON'],
  ['an array', [], 0, 'not a JSON object'],
  ['null', 'null', 0, 'not a JSON object'],
  ['the same name twice', '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "\\u0061" : {}}', 4, 'twice'],
  ['the same field twice', '{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', 4, '"shape" appears'],
  ['an unknown dtype', { a: { dtype: 'F4', shape: [1], data_offsets: [0, 4] } }, 4, '"F4"'],
  ['a dtype from the prototype', { a: { dtype: 'toString', shape: [1], data_offsets: [0, 4] } }, 4, '"toString"'],
  ['no dtype', { a: { shape: [1], data_offsets: [0, 4] } }, 4, 'no dtype'],
  ['a tensor that is no object', { a: 7 }, 0, 'not described'],
  ['no shape', { a: { dtype: 'F32', data_offsets: [0, 4] } }, 4, 'no shape'],
  ['a negative shape', { a: f32(0, 4, [-1, -1]) }, 4, 'a shape'],
  ['a fractional shape', { a: f32(0, 4, [0.5, 2]) }, 4, 'a shape'],
  ['a shape that overflows', { a: f32(0, 0, [2 ** 40, 2 ** 40]) }, 0, 'a shape'],
  [
    'a shape beyond the exact integers',
    '{"a":{"dtype":"U8","shape":[9007199254740993],"data_offsets":[0,1]}}',
    1,
    'a shape',
  ],
  ['one offset', { a: { dtype: 'F32', shape: [1], data_offsets: [0] } }, 4, 'offsets'],
  ['text offsets', { a: f32('0', '4') }, 4, 'offsets'],
  ['an infinite offset', '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}', 4, 'offsets'],
  ['a negative offset', { a: f32(-4, 0) }, 4, 'outside'],
  ['end before begin', { a: f32(4, 0) }, 4, 'outside'],
  ['beyond the end', { a: f32(0, 8, [2]) }, 4, 'outside'],
  ['fewer bytes than the shape needs', { a: f32(0, 4, [2]) }, 4, 'needs 8'],
  ['an overlap', { a: f32(0, 4), b: f32(0, 4) }, 4, 'overlaps'],
  ['a partial overlap', { a: f32(0, 8, [2]), b: f32(4, 12, [2]) }, 12, 'overlaps'],
  ['a hole', { a: f32(0, 4), b: f32(8, 12) }, 12, 'hole'],
  ['a hole at the front', { a: f32(4, 8) }, 8, 'hole'],
  ['bytes at the end', { a: f32(0, 4) }, 8, 'belong to no tensor'],
  ['bytes and no tensors', {}, 8, 'belong to no tensor'],
  ['metadata of numbers', { __metadata__: { step: 3 } }, 0, '"step" is not a string'],
  ['a million levels', `${'{"a":'.repeat(1e6)}1${'}'.repeat(1e6)}`, 0, 'more than 16 levels'],
  ['metadata of a list', { __metadata__: [] }, 0, 'metadata'],
];

for (const [name, header, dataBytes, reason] of ATTACKS) {
  test(`refused: ${name}`, () => {
    expect(() => parse(header, dataBytes)).toThrow(UsageError);
    expect(() => parse(header, dataBytes)).toThrow(PATH);
    expect(() => parse(header, dataBytes)).toThrow(reason);
  });
}

test('bytes that are not UTF-8 are refused', () => {
  expect(() => parseHeader(PATH, new Uint8Array([0x7b, 0xff, 0x7d]), 0)).toThrow('not JSON');
});

test('braces and escaped quotes inside names do not confuse the search for duplicates', () => {
  const names = ['{"a\\', 'a"}', '', 'shape', '{'.repeat(50), `"\\${'['.repeat(50)}`];
  const header = Object.fromEntries(names.map((name, i) => [name, f32(4 * i, 4 * i + 4)]));
  expect([...parse(header, 4 * names.length).entries.keys()]).toEqual(names);
});

test('a name from the prototype is an ordinary name', () => {
  const text = '{"__metadata__":{"__proto__":"x"},"__proto__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}';
  const { entries, metadata } = parse(text, 1);
  expect(entries.get('__proto__')?.end).toBe(1);
  expect(Object.entries(metadata)).toEqual([['__proto__', 'x']]);
  expect(({} as { x?: string }).x).toBeUndefined();
});

test('empty tensors may share an offset, in any order', () => {
  const header = { a: f32(0, 4), empty: f32(0, 0, [0, 3]), last: f32(4, 4, [0]) };
  expect(parse(header, 4).entries.size).toBe(3);
});

test('the length of the header is refused before it is used', () => {
  const prefix = (length: bigint): Uint8Array => new Uint8Array(new BigUint64Array([length]).buffer);
  expect(checkHeaderLength(PATH, prefix(12n), 20)).toBe(12);
  expect(() => checkHeaderLength(PATH, prefix(13n), 20)).toThrow('the file has 20');
  expect(() => checkHeaderLength(PATH, prefix(100_000_001n), 2 ** 40)).toThrow('limit');
  expect(() => checkHeaderLength(PATH, prefix(2n ** 64n - 1n), 2 ** 40)).toThrow('limit');
  expect(() => checkHeaderLength(PATH, new Uint8Array(7), 7)).toThrow('too few');
});

test('the layout puts each tensor at a multiple of its element size and the header at a multiple of 8', () => {
  const entries = layOut(PATH, [
    { name: 'bytes', dtype: 'U8', shape: [3] },
    { name: '2', dtype: 'F32', shape: [1] },
    { name: '1', dtype: 'F32', shape: [1] },
    { name: 'wide', dtype: 'I64', shape: [1] },
  ]);
  expect([...entries].map(([name, { begin }]) => [name, begin])).toEqual([
    ['wide', 0],
    ['2', 8],
    ['1', 12],
    ['bytes', 16],
  ]);
  const bytes = encodeHeader(entries, { format: 'pt' });
  expect(bytes.length % 8).toBe(0);
  const parsed = parseHeader(PATH, bytes.subarray(8), 19);
  expect(parsed.metadata).toEqual({ format: 'pt' });
  expect(parsed.entries).toEqual(new Map([...entries].sort(([a], [b]) => (a < b ? -1 : 1))));
});

test('what would be refused when read is not written', () => {
  expect(() => layOut(PATH, [{ name: '__metadata__', dtype: 'U8', shape: [1] }])).toThrow('cannot be called');
  expect(() => layOut(PATH, [{ name: 'a', dtype: 'U8', shape: [-1] }])).toThrow('bad shape');
  const twice = { name: 'a', dtype: 'U8', shape: [1] } as const;
  expect(() => layOut(PATH, [twice, twice])).toThrow('two tensors');
});
