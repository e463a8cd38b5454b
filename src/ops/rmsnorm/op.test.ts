import { describe, expect, it } from 'vitest';
import { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { devices, rounded, tolerance } from '../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { rmsnorm } from './op.js';
import { rmsnormBackward, rmsnormForward } from './reference.js';

const EPSILON = 1e-5;

describe('rmsnorm reference', () => {
  it('has gradients equal to finite differences', () => {
    const [x, weight, dy] = [randomValues(12, 1), randomValues(4, 2), randomValues(12, 3)];
    const { dx, dWeight } = rmsnormBackward(x, weight, EPSILON, dy);
    const value = () => dot(rmsnormForward(x, weight, EPSILON), dy);
    expect(relativeError(dx, finiteDifferences(value, x))).toBeLessThan(1e-8);
    expect(relativeError(dWeight, finiteDifferences(value, weight))).toBeLessThan(1e-8);
  });
});

describe.each(devices())('rmsnorm on $name', ({ device, dtype }) => {
  const random = (count: number, seed: number) => rounded(randomValues(count, seed), dtype);

  it.each([
    [1, 2],
    [3, 5],
    [17, 16],
    [300, 100],
    [0, 8],
    [70, 768],
    [33, 1032], // two warps on a row
    [5, 4096],
    [3, 8000],
    [40, 12000], // sixteen warps on a row
    [3, 9001], // longer than registers hold, and nothing aligned
    [2, 20000],
  ])('equals the reference for %i rows of %i', (rows, dim) => {
    const [x, weight, dy] = [random(rows * dim, 1), randomValues(dim, 2), random(rows * dim, 3)];
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [rows, dim], dtype));
    const tw = tape.watch(tape.from(weight, [dim]));
    const y = rmsnorm(tape, tx, tw, EPSILON);
    const limit = tolerance(dtype);
    expect(relativeError(y.read(), rmsnormForward(x, weight, EPSILON))).toBeLessThan(limit);
    tape.backward(y, dy);
    const expected = rmsnormBackward(x, weight, EPSILON, dy);
    expect(relativeError(tape.gradient(tx)!.read(), expected.dx)).toBeLessThan(limit);
    expect(relativeError(tape.gradient(tw)!.read(), expected.dWeight)).toBeLessThan(limit);
    tape.end();
  });

  it('adds to existing gradients', () => {
    const tape = new Tape(device());
    const x = tape.watch(tape.from(random(32, 1), [4, 8], dtype));
    const weight = tape.watch(tape.from(randomValues(8, 2), [8]));
    const [first, second] = [rmsnorm(tape, x, weight), rmsnorm(tape, x, weight)];
    tape.backward([first, second], [random(32, 3), random(32, 4)]);
    const dy = Float64Array.from(random(32, 3), (v, i) => v + random(32, 4)[i]);
    const expected = rmsnormBackward(random(32, 1), randomValues(8, 2), EPSILON, dy);
    expect(relativeError(tape.gradient(x)!.read(), expected.dx)).toBeLessThan(tolerance(dtype));
    expect(relativeError(tape.gradient(weight)!.read(), expected.dWeight)).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it('names the tensor whose shape does not fit', () => {
    const tape = new Tape(device());
    expect(() => rmsnorm(tape, tape.zeros([2, 4]), tape.zeros([3]))).toThrow(
      'rmsnorm: weight must have shape [4], not [3]',
    );
    tape.end();
  });

  it('propagates NaN to its row only', () => {
    const tape = new Tape(device());
    const x = Tensor.from(device(), [1, Number.NaN, 1, 2], [2, 2], dtype);
    const y = rmsnorm(tape, x, tape.from([1, 1], [2])).read();
    expect([Number.isNaN(y[0]), Number.isNaN(y[2])]).toEqual([true, false]);
    x.free();
    tape.end();
  });
});
