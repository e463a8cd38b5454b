import { describe, expect, it } from 'vitest';
import { Tape } from '../../tensor/tape.js';
import { cpu, devices, tolerance } from '../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { linear } from './op.js';
import { linearBackward, linearForward } from './reference.js';

describe('linear reference', () => {
  it('has gradients equal to finite differences', () => {
    const [x, w, dy] = [randomValues(6, 1), randomValues(12, 2), randomValues(8, 3)];
    const { dx, dw } = linearBackward(x, w, dy, 2, 4, 3);
    const value = () => dot(linearForward(x, w, 2, 4, 3), dy);
    expect(relativeError(dx, finiteDifferences(value, x))).toBeLessThan(1e-8);
    expect(relativeError(dw, finiteDifferences(value, w))).toBeLessThan(1e-8);
  });
});

const SHAPES = [
  [1, 1, 1],
  [1, 70, 3],
  [7, 64, 16],
  [97, 65, 33],
  [5, 130, 1100],
  [200, 36, 48],
  [100, 7, 600],
  [401, 450, 530], // several blocks of rows, chunks of panels and slabs of depth in all three products
  [3, 5, 0],
  [0, 4, 4],
];

describe.each(devices())('linear on $name', ({ device }) => {
  it.each(SHAPES)('equals the reference for %i rows, %i outputs, %i inputs', (rows, outputs, inputs) => {
    const [x, w] = [randomValues(rows * inputs, 1), randomValues(outputs * inputs, 2)];
    const [bias, dy] = [randomValues(outputs, 3), randomValues(rows * outputs, 4)];
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [rows, inputs]));
    const tw = tape.watch(tape.from(w, [outputs, inputs]));
    const tb = tape.watch(tape.from(bias, [outputs]));
    const y = linear(tape, tx, tw, tb);
    const expected = linearForward(x, w, rows, outputs, inputs).map((value, i) => value + bias[i % outputs]);
    const limit = tolerance(device());
    expect(relativeError(y.read(), expected)).toBeLessThan(limit);
    tape.seed(y, dy);
    tape.backward();
    const { dx, dw } = linearBackward(x, w, dy, rows, outputs, inputs);
    expect(relativeError(tape.gradient(tx)!.read(), dx)).toBeLessThan(limit);
    expect(relativeError(tape.gradient(tw)!.read(), dw)).toBeLessThan(limit);
    const dBias = new Float64Array(outputs);
    dy.forEach((value, i) => {
      dBias[i % outputs] += value;
    });
    expect(relativeError(tape.gradient(tb)!.read(), dBias)).toBeLessThan(limit);
    tape.end();
  });

  it('adds to gradients that are there already', () => {
    const tape = new Tape(device());
    const x = tape.watch(tape.from(randomValues(40, 1), [5, 8]));
    const w = tape.watch(tape.from(randomValues(72, 2), [9, 8]));
    const [first, second] = [linear(tape, x, w), linear(tape, x, w)];
    tape.seed(first, randomValues(45, 3));
    tape.seed(second, randomValues(45, 3));
    tape.backward();
    const { dx, dw } = linearBackward(randomValues(40, 1), randomValues(72, 2), randomValues(45, 3), 5, 9, 8);
    expect(
      relativeError(
        tape.gradient(x)!.read(),
        dx.map((v) => 2 * v),
      ),
    ).toBeLessThan(tolerance(device()));
    expect(
      relativeError(
        tape.gradient(w)!.read(),
        dw.map((v) => 2 * v),
      ),
    ).toBeLessThan(tolerance(device()));
    tape.end();
  });

  it('names the tensor whose shape does not fit', () => {
    const tape = new Tape(device());
    const w = tape.zeros([4, 3]);
    expect(() => linear(tape, tape.zeros([2, 5]), w)).toThrow('linear: x must have shape [*, 3], not [2, 5]');
    expect(() => linear(tape, tape.zeros([2, 3]), w, tape.zeros([3]))).toThrow('linear: bias must have shape [4]');
    tape.end();
  });
});

it('gives the same numbers for any number of threads', () => {
  const [rows, outputs, inputs] = [401, 450, 530];
  expectSameForAnyThreadCount(() => {
    const tape = new Tape(cpu());
    const x = tape.watch(tape.from(randomValues(rows * inputs, 1), [rows, inputs]));
    const w = tape.watch(tape.from(randomValues(outputs * inputs, 2), [outputs, inputs]));
    const y = linear(tape, x, w);
    const bytes = [y.readBytes()];
    tape.seed(y, randomValues(rows * outputs, 3));
    tape.backward();
    bytes.push(tape.gradient(x)!.readBytes(), tape.gradient(w)!.readBytes());
    tape.end();
    return bytes;
  });
});

it('gives a row the same numbers whatever rows stand beside it', () => {
  const [rows, outputs, inputs] = [200, 90, 70];
  const values = randomValues(rows * inputs, 1);
  const tape = new Tape(cpu(), { record: false });
  const w = tape.from(randomValues(outputs * inputs, 2), [outputs, inputs]);
  const all = linear(tape, tape.from(values, [rows, inputs]), w).read();
  for (const row of [0, 5, 197]) {
    const alone = linear(tape, tape.from(values.slice(row * inputs, (row + 1) * inputs), [1, inputs]), w).read();
    expect([...alone]).toEqual([...all.subarray(row * outputs, (row + 1) * outputs)]);
  }
  tape.end();
});
