import { createHash } from 'node:crypto';
import { describe, expect, it } from 'vitest';
import { cpu, devices } from '../../testing/devices.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { Tensor } from '../tensor.js';
import { fillIntegers, fillNormal, fillUniform, type RandomSource } from './op.js';
import { integersReference, normalPair, normalReference, philox, uniformReference } from './reference.js';

const hex = (words: readonly number[]) => words.map((word) => word.toString(16).padStart(8, '0')).join(' ');
const bytesOf = (values: Float32Array | Int32Array) => Buffer.from(values.buffer, values.byteOffset, values.byteLength);

describe('philox', () => {
  it.each([
    [[0, 0, 0, 0], [0, 0], '6627e8d5 e169c58d bc57ac4c 9b00dbd8'],
    [
      [2 ** 32 - 1, 2 ** 32 - 1, 2 ** 32 - 1, 2 ** 32 - 1],
      [2 ** 32 - 1, 2 ** 32 - 1],
      '408f276d 41c83b0e a20bc7c6 6d5451fd',
    ],
    [[0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0], 'd16cfe09 94fdcceb 5001e420 24126ea1'],
  ] as const)("gives its authors' known answer for counter %j, key %j", (counter, key, answer) => {
    expect(hex(philox(counter, key))).toBe(answer);
  });
});

describe('the normal reference', () => {
  it('is Box-Muller with the logarithm, sine and cosine of the library', () => {
    for (let i = 0; i < 2000; i++) {
      const words = philox([i, 0, 0, 0], [1, 2]);
      const unit = ((words[0] >>> 5) * 2 ** 26 + (words[1] >>> 6) + 1) * 2 ** -53;
      const turn = (words[2] * 2 ** 22 + (words[3] >>> 10)) * 2 ** -54; // of a full circle, from -45 degrees
      const [radius, angle] = [Math.sqrt(-2 * Math.log(unit)), 2 * Math.PI * turn - Math.PI / 4];
      const [x, y] = normalPair(words);
      expect(Math.abs(x - radius * Math.cos(angle))).toBeLessThan(1e-14);
      expect(Math.abs(y - radius * Math.sin(angle))).toBeLessThan(1e-14);
    }
  });

  it('is finite at both ends of the unit interval', () => {
    const most = 2 ** 32 - 1;
    expect(normalPair([0, 0, 0, 0]).every((value) => Math.abs(value) < 8.6)).toBe(true);
    expect(normalPair([most, most, most, most]).every((value) => Math.abs(value) === 0)).toBe(true);
  });
});

it('has not changed: runs of last year can be repeated', () => {
  const source = { seed: 1337, stream: 42, offset: 1000 };
  const lists = [
    uniformReference(source, 999),
    normalReference(source, 999, 0.02),
    integersReference(source, 999, 50257),
  ];
  const hash = createHash('sha256');
  for (const values of lists) hash.update(bytesOf(values));
  expect(hash.digest('hex')).toBe('1ba1fafde737f10b9cd583680bf9a8f127a769afd933ce6db8c72edf0cb4552b');
});

describe.each(devices())('random numbers on $name', ({ device }) => {
  function filled(dtype: 'f32', count: number, fill: (tensor: Tensor) => void): Float32Array;
  function filled(dtype: 'i32', count: number, fill: (tensor: Tensor) => void): Int32Array;
  function filled(dtype: 'f32' | 'i32', count: number, fill: (tensor: Tensor) => void) {
    const tensor = Tensor.empty(device(), [count], dtype);
    fill(tensor);
    const values = tensor.read();
    tensor.free();
    return values;
  }
  const kinds = [
    {
      kind: 'uniform',
      made: (source: RandomSource, count: number) => filled('f32', count, (t) => fillUniform(t, source)),
      reference: uniformReference,
    },
    {
      kind: 'normal',
      made: (source: RandomSource, count: number) => filled('f32', count, (t) => fillNormal(t, source, 0.02)),
      reference: (source: RandomSource, count: number) => normalReference(source, count, 0.02),
    },
    {
      kind: 'integer',
      made: (source: RandomSource, count: number) => filled('i32', count, (t) => fillIntegers(t, source, 50257)),
      reference: (source: RandomSource, count: number) => integersReference(source, count, 50257),
    },
  ];

  describe.each(kinds)('$kind', ({ made, reference }) => {
    it.each([
      [{ seed: 0, stream: 0 }, 20_011],
      [{ seed: 1337, stream: 3, offset: 5 }, 1],
      [{ seed: 2 ** 53 - 1, stream: 2 ** 53 - 1, offset: 2 ** 40 + 3 }, 300],
      [{ seed: 1, stream: 2 }, 0],
    ])('equals TypeScript bit for bit: %j, %i values', (source, count) => {
      expect(Buffer.compare(bytesOf(made(source, count)), bytesOf(reference(source, count)))).toBe(0);
    });

    it('is the same filled in pieces', () => {
      const source = { seed: 7, stream: 1 };
      const whole = made(source, 1000);
      for (const [from, to] of [
        [0, 1],
        [1, 3],
        [3, 260],
        [260, 1000],
      ]) {
        const piece = made({ ...source, offset: from }, to - from);
        expect([...piece]).toEqual([...whole.slice(from, to)]);
      }
    });

    it('differs between seeds and between streams', () => {
      const values = [
        { seed: 1, stream: 1 },
        { seed: 2, stream: 1 },
        { seed: 1, stream: 2 },
        { seed: 1 + 2 ** 32, stream: 1 },
        { seed: 1, stream: 1 + 2 ** 32 },
      ].map((source) => made(source, 8).join());
      expect(new Set(values).size).toBe(values.length);
    });
  });

  it('normal has the moments and the tails of a normal distribution', () => {
    const count = 1_000_000;
    const values = filled('f32', count, (t) => fillNormal(t, { seed: 1, stream: 0 }));
    const moment = (power: number) => values.reduce((sum, value) => sum + value ** power, 0) / count;
    const beyond = (limit: number) => values.reduce((sum, value) => sum + Number(Math.abs(value) > limit), 0);
    expect(Math.abs(moment(1))).toBeLessThan(0.004); // four standard errors each
    expect(Math.abs(moment(2) - 1)).toBeLessThan(0.006);
    expect(Math.abs(moment(3))).toBeLessThan(0.016);
    expect(Math.abs(moment(4) - 3)).toBeLessThan(0.04);
    expect(Math.abs(beyond(1) - 317_311)).toBeLessThan(1900);
    expect(Math.abs(beyond(3) - 2700)).toBeLessThan(210);
    expect(Math.abs(beyond(4) - 63)).toBeLessThan(32);
    expect(beyond(6.5)).toBe(0);
    let [neighbours, pairs] = [0, 0];
    for (let i = 0; i + 1 < count; i++) neighbours += values[i] * values[i + 1];
    for (let i = 0; i + 1 < count; i += 2) pairs += values[i] ** 2 * values[i + 1] ** 2;
    expect(Math.abs(neighbours / count)).toBeLessThan(0.004);
    expect(Math.abs(pairs / (count / 2) - 1)).toBeLessThan(0.017); // the two of a pair are independent too
  });

  it('uniform fills [0, 1) evenly', () => {
    const count = 1_000_000;
    const values = filled('f32', count, (t) => fillUniform(t, { seed: 1, stream: 0 }));
    expect(values.every((value) => value >= 0 && value < 1)).toBe(true);
    expect(chiSquare(values, 100, (value) => Math.floor(value * 100))).toBeLessThan(160);
  });

  it.each([1, 2, 100, 50257, 2 ** 31])('integers stay below %i and are even', (limit) => {
    const values = filled('i32', 200_000, (t) => fillIntegers(t, { seed: 1, stream: 0 }, limit));
    expect(values.every((value) => value >= 0 && value < limit)).toBe(true);
    const bins = Math.min(limit, 100);
    expect(chiSquare(values, bins, (value) => Math.floor((value * bins) / limit))).toBeLessThan(160);
  });

  it('says which argument cannot be used', () => {
    const [floats, ids] = [Tensor.empty(device(), [2]), Tensor.empty(device(), [2], 'i32')];
    const source = { seed: 0, stream: 0 };
    expect(() => fillUniform(ids, source)).toThrow('fillUniform: tensor must be f32, not i32');
    expect(() => fillNormal(floats, { ...source, seed: -1 })).toThrow('fillNormal: seed must be a whole number from 0');
    expect(() => fillNormal(floats, { ...source, stream: 0.5 })).toThrow('fillNormal: stream must be');
    expect(() => fillIntegers(ids, source, 0)).toThrow('fillIntegers: limit must be a whole number from 1 to 2^31');
    floats.free();
    ids.free();
    expect(device().pool.bytesInUse).toBe(0);
  });
});

it('is the same for any number of threads', () => {
  expectSameForAnyThreadCount(() => {
    const tensor = Tensor.empty(cpu(), [100_003]);
    fillNormal(tensor, { seed: 1, stream: 2, offset: 1 });
    const bytes = tensor.readBytes();
    tensor.free();
    return [bytes];
  });
});

function chiSquare(values: Float32Array | Int32Array, bins: number, bin: (value: number) => number): number {
  const counts = new Array<number>(bins).fill(0);
  for (const value of values) counts[bin(value)] += 1;
  const expected = values.length / bins;
  return counts.reduce((sum, count) => sum + (count - expected) ** 2 / expected, 0);
}
