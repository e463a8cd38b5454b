import { describe, expect, it } from 'vitest';
import { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { cpu, devices, rounded, tolerance } from '../../testing/devices.js';
import { EmulatedCuda } from '../../testing/emulated-cuda.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { eachThreadCount } from '../../testing/threads.js';
import { Sequences } from '../common/sequences.js';
import { type RotaryScaling, type RotaryShape, rotaryAngles } from './frequencies.js';
import { type HeadPart, RotaryTable, rotate, splitHeads } from './op.js';
import { angle, splitBackward, splitForward } from './reference.js';

const ROTARY = { theta: 10000 };
const YARN: RotaryScaling = {
  type: 'yarn',
  factor: 4,
  originalContext: 64,
  betaFast: 32,
  betaSlow: 1,
  attentionFactor: null,
};
const PARTS: HeadPart[] = [
  { heads: 4, size: 6, rotate: true },
  { heads: 2, size: 6, rotate: true },
  { heads: 2, size: 5, rotate: false },
];
const WIDTH = 46;

const anglesOf = (size: number, shape: Omit<RotaryShape, 'size'> = ROTARY) => rotaryAngles({ size, ...shape });

/** 0, stride, 2 * stride, … from `start` in every sequence. */
function positions(lengths: number[], stride = 1, start: number | number[] = 0): number[] {
  return lengths.flatMap((length, s) =>
    Array.from({ length }, (_, i) => i * stride + (typeof start === 'number' ? start : start[s])),
  );
}

describe('rotary reference', () => {
  it('turns pairs half a head apart', () => {
    const [y] = splitForward(Float64Array.of(1, 0, 0, 0), [{ heads: 1, size: 4, rotate: true }], [2], anglesOf(4));
    expect(relativeError(y, [Math.cos(2), 0, Math.sin(2), 0])).toBeLessThan(1e-15);
    expect(angle(3, 1, anglesOf(4, { theta: 100 }))).toBe(Math.fround(Math.fround(0.1) * 3));
    expect(angle(8, 0, anglesOf(4, { theta: 100, scale: 4 }))).toBe(2);
  });

  it('keeps the product of a query and a key when both move', () => {
    const part = [{ heads: 1, size: 8, rotate: true }];
    const [q, k] = [randomValues(8, 1), randomValues(8, 2)];
    const product = (a: number, b: number) =>
      dot(splitForward(q, part, [a], anglesOf(8))[0], splitForward(k, part, [b], anglesOf(8))[0]);
    expect(product(17, 12)).toBeCloseTo(product(5, 0), 6);
  });

  it.each([ROTARY, { theta: 100, scaling: YARN }])('has gradients equal to finite differences: %j', (shape) => {
    const angles = anglesOf(6, shape);
    const at = positions([2, 3]);
    const fused = randomValues(5 * WIDTH, 1);
    const gradients = PARTS.map(({ heads, size }, i) => randomValues(5 * heads * size, i + 2));
    const value = () =>
      splitForward(fused, PARTS, at, angles).reduce((total, part, i) => total + dot(part, gradients[i]), 0);
    const dFused = splitBackward(gradients, PARTS, at, angles);
    expect(relativeError(dFused, finiteDifferences(value, fused))).toBeLessThan(1e-8);
  });
});

describe.each(devices())('splitHeads on $name', ({ device, dtype }) => {
  const random = (count: number, seed: number) => rounded(randomValues(count, seed), dtype);
  /** The options of a rotation, with a table that the tape frees. */
  const rotary = (tape: Tape, size: number, shape: Omit<RotaryShape, 'size'> = ROTARY) => {
    const table = new RotaryTable(device(), { size, ...shape });
    tape.own(table.frequencies);
    return { table };
  };

  it.each([
    [[1], PARTS],
    [[0, 3, 0, 70, 130, 0], PARTS],
    [[200], [{ heads: 3, size: 64, rotate: true }]],
    [[9], [{ heads: 1, size: 2, rotate: true }]],
    [[9], [{ heads: 2, size: 3, rotate: false }]],
    [[0], PARTS],
    [[], PARTS],
    [
      [33, 900],
      // The parts of a sparse attention, whole vectors all of them.
      [
        { heads: 12, size: 64, rotate: true },
        { heads: 2, size: 64, rotate: true },
        { heads: 2, size: 32, rotate: false },
        { heads: 1, size: 64, rotate: true },
        { heads: 2, size: 64, rotate: false },
      ],
    ],
    // More columns than a block has threads, in groups of unequal width.
    [
      [19, 30],
      [
        { heads: 41, size: 128, rotate: true },
        { heads: 3, size: 128, rotate: false },
      ],
    ],
    // More parts than one launch takes.
    [[40], Array.from({ length: 11 }, (_, i) => ({ heads: 1 + (i % 3), size: 8, rotate: i % 2 === 0 }))],
  ])('equals the reference for sequences %j', (lengths, parts) => {
    const sequences = new Sequences(device(), lengths);
    const width = parts.reduce((total, { heads, size }) => total + heads * size, 0);
    const at = positions(lengths);
    const fused = random(at.length * width, 1);
    const gradients = parts.map(({ heads, size }, i) => random(at.length * heads * size, i + 2));
    const tape = new Tape(device());
    const x = tape.watch(tape.from(fused, [at.length, width], dtype));
    const size = parts.find((part) => part.rotate)?.size;
    const outputs = splitHeads(tape, x, parts, sequences, size ? rotary(tape, size) : null);
    const angles = anglesOf(size ?? 2);
    const limit = tolerance(dtype);
    splitForward(fused, parts, at, angles).forEach((expected, i) => {
      expect(relativeError(outputs[i].read(), expected)).toBeLessThan(limit);
    });
    tape.backward(outputs, gradients);
    const expected = splitBackward(gradients, parts, at, angles);
    expect(relativeError(tape.gradient(x)!.read(), expected)).toBeLessThan(limit);
    tape.end();
    sequences.free();
  });

  it.each([
    ['a stride', ROTARY, { stride: 16 }, positions([4, 3], 16)],
    ['a start', ROTARY, { start: 1000 }, positions([4, 3], 1, 1000)],
    ['a stride and a start', { theta: 500, scale: 2.5 }, { stride: 8, start: 64 }, positions([4, 3], 8, 64)],
    ['an amplitude', { theta: 500, scaling: YARN }, {}, positions([4, 3])],
  ])('takes %s', (_, shape, options, at) => {
    const sequences = new Sequences(device(), [4, 3]);
    const values = random(7 * 2 * 8, 1);
    const tape = new Tape(device());
    const x = tape.watch(tape.from(values, [7, 2, 8], dtype));
    const y = rotate(tape, x, sequences, { ...rotary(tape, 8, shape), ...options });
    expect(y.shape).toEqual([7, 2, 8]);
    const part = [{ heads: 2, size: 8, rotate: true }];
    const [expected] = splitForward(values, part, at, anglesOf(8, shape));
    expect(relativeError(y.read(), expected)).toBeLessThan(tolerance(dtype));
    const dy = random(7 * 2 * 8, 2);
    tape.backward(y, dy);
    const gradient = splitBackward([dy], part, at, anglesOf(8, shape));
    expect(relativeError(tape.gradient(x)!.read(), gradient)).toBeLessThan(tolerance(dtype));
    tape.end();
    sequences.free();
  });

  it('takes a start for each sequence', () => {
    const sequences = new Sequences(device(), [1, 0, 2]);
    const start = Tensor.from(device(), [70, 5, 9], [3], 'i32');
    const values = random(3 * 8, 1);
    const tape = new Tape(device());
    const y = rotate(tape, tape.from(values, [3, 1, 8], dtype), sequences, { ...rotary(tape, 8), start });
    const [expected] = splitForward(values, [{ heads: 1, size: 8, rotate: true }], [70, 9, 10], anglesOf(8));
    expect(relativeError(y.read(), expected)).toBeLessThan(tolerance(dtype));
    tape.end();
    start.free();
    sequences.free();
  });

  it.each([
    [131072, 64, 10000, 1],
    [131071, 128, 500000, 1],
    [131072, 96, 10000, 4],
    [1000003, 64, 10000, 1],
    [77777, 256, 1e6, 1.7],
  ])('is accurate at position %i with heads of %i and theta %d', (start, size, theta, scale) => {
    const tokens = 100;
    const sequences = new Sequences(device(), [tokens]);
    const values = random(tokens * size, 1);
    const tape = new Tape(device());
    const options = { ...rotary(tape, size, { theta, scale }), start };
    const y = rotate(tape, tape.from(values, [tokens, 1, size], dtype), sequences, options).read();
    const at = positions([tokens], 1, start);
    const [expected] = splitForward(values, [{ heads: 1, size, rotate: true }], at, anglesOf(size, { theta, scale }));
    // Every element, not only the norm: a single wrong frequency would hide among the others.
    const worst = expected.reduce((most, value, i) => Math.max(most, Math.abs(value - y[i])), 0);
    expect(worst).toBeLessThan(dtype === 'f32' ? 3e-7 : 1e-2);
    tape.end();
    sequences.free();
  });

  it('rotates back to where it came from', () => {
    const sequences = new Sequences(device(), [50]);
    const values = random(50 * 12, 1);
    const tape = new Tape(device());
    const x = tape.watch(tape.from(random(50 * 12, 2), [50, 2, 6], dtype));
    const options = rotary(tape, 6);
    const y = rotate(tape, x, sequences, options);
    // The gradient of a rotation is the rotation back: seeding with a rotated tensor returns the tensor.
    tape.backward(y, rotate(tape, tape.from(values, [50, 2, 6], dtype), sequences, options).read());
    expect(relativeError(tape.gradient(x)!.read(), values)).toBeLessThan(tolerance(dtype));
    tape.end();
    sequences.free();
  });

  it('counts a missing gradient as zero and adds to one that is there', () => {
    const sequences = new Sequences(device(), [3]);
    const at = positions([3]);
    const tape = new Tape(device());
    const x = tape.watch(tape.from(random(3 * WIDTH, 1), [3, WIDTH], dtype));
    const first = splitHeads(tape, x, PARTS, sequences, rotary(tape, 6));
    const second = splitHeads(tape, x, PARTS, sequences, rotary(tape, 6));
    const [a, b, c] = [random(72, 2), random(36, 3), random(30, 4)];
    tape.backward([second[1], first[0], first[2]], [b, a, c]);
    const expected = splitBackward([a, b, c], PARTS, at, anglesOf(6));
    expect(relativeError(tape.gradient(x)!.read(), expected)).toBeLessThan(tolerance(dtype));
    tape.end();
    sequences.free();
  });

  it('names what does not fit', () => {
    const sequences = new Sequences(device(), [2]);
    const tape = new Tape(device());
    const split = (columns: number, parts: HeadPart[], options = {}) =>
      splitHeads(tape, tape.zeros([2, columns]), parts, sequences, { ...rotary(tape, 6), ...options });
    expect(() => split(45, PARTS)).toThrow('splitHeads: fused must have shape [2, 46], not [2, 45]');
    const other = [{ heads: 1, size: 4, rotate: true }];
    expect(() => split(4, other)).toThrow('rotated heads of 4 need a table of that size, not 6');
    expect(() => splitHeads(tape, tape.zeros([2, 4]), other, sequences, null)).toThrow('of that size, not none');
    expect(() => split(WIDTH, PARTS, { stride: 1.5 })).toThrow('stride must be a whole number from 0, not 1.5');
    expect(() => split(WIDTH, PARTS, { start: tape.zeros([2], 'i32') })).toThrow('start must have shape [1], not [2]');
    expect(() => rotate(tape, tape.zeros([3, 1, 2]), sequences, rotary(tape, 2))).toThrow(
      'rotate: x must have shape [2, *, *]',
    );
    tape.end();
    sequences.free();
  });
});

describe('splitHeads on an emulated GPU', () => {
  it.each(['f32', 'bf16'] as const)('equals the reference in %s, with YaRN', (dtype) => {
    const device = new EmulatedCuda();
    const lengths = [3, 0, 30];
    const shape = { size: 16, theta: 1000, scaling: YARN };
    const parts = [
      { heads: 3, size: 16, rotate: true },
      { heads: 2, size: 8, rotate: false },
    ];
    const at = positions(lengths, 1, 5);
    const fused = rounded(randomValues(at.length * 64, 1), dtype);
    const gradients = parts.map(({ heads, size }, i) => rounded(randomValues(at.length * heads * size, i + 2), dtype));
    const tape = new Tape(device);
    const table = new RotaryTable(device, shape);
    const sequences = new Sequences(device, lengths);
    const x = tape.watch(tape.from(fused, [at.length, 64], dtype));
    const outputs = splitHeads(tape, x, parts, sequences, { table, start: 5 });
    splitForward(fused, parts, at, rotaryAngles(shape)).forEach((expected, i) => {
      expect(relativeError(outputs[i].read(), expected)).toBeLessThan(tolerance(dtype));
    });
    tape.backward(outputs, gradients);
    const expected = splitBackward(gradients, parts, at, rotaryAngles(shape));
    expect(relativeError(tape.gradient(x)!.read(), expected)).toBeLessThan(tolerance(dtype));
    tape.end();
    table.free();
    sequences.free();
  });
});

describe('splitHeads on the CPU', () => {
  it('does not depend on the thread count or on what is packed beside a sequence', () => {
    const values = randomValues(300 * WIDTH, 1);
    const run = (lengths: number[], from: number, to: number) => {
      const sequences = new Sequences(cpu(), lengths);
      const tape = new Tape(cpu());
      const x = tape.from(values.subarray(from * WIDTH, to * WIDTH), [to - from, WIDTH]);
      const table = new RotaryTable(cpu(), { size: 6, ...ROTARY });
      const bits = splitHeads(tape, x, PARTS, sequences, { table })[0].read();
      tape.end();
      table.free();
      sequences.free();
      return bits;
    };
    const [one, ...more] = eachThreadCount(() => run([100, 200], 0, 300));
    for (const bits of more) expect(bits).toEqual(one);
    expect(run([200], 100, 300)).toEqual(one.subarray(100 * 24));
  });
});
