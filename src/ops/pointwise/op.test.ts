import { describe, expect, it } from 'vitest';
import { Tape } from '../../tensor/tape.js';
import { cpu } from '../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { devicesAndEmulator, expectOperation } from '../../testing/operation.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { exp, log, mul, scale } from './op.js';
import * as reference from './reference.js';

const positive = (count: number, seed: number) => randomValues(count, seed).map((value) => 1.5 + value);

describe('pointwise references', () => {
  it('have gradients equal to finite differences', () => {
    const [a, b, dy] = [randomValues(12, 1), randomValues(4, 2), randomValues(12, 3)];
    const { da, db } = reference.mulBackward(a, b, dy);
    const product = () => dot(reference.mulForward(a, b), dy);
    expect(relativeError(da, finiteDifferences(product, a))).toBeLessThan(1e-8);
    expect(relativeError(db, finiteDifferences(product, b))).toBeLessThan(1e-8);
    const x = positive(12, 4);
    for (const [gradient, value] of [
      [reference.scaleBackward(dy, 3), () => dot(reference.scaleForward(x, 3), dy)],
      [reference.expBackward(x, dy), () => dot(reference.expForward(x), dy)],
      [reference.logBackward(x, dy), () => dot(reference.logForward(x), dy)],
    ] as const)
      expect(relativeError(gradient, finiteDifferences(value, x))).toBeLessThan(1e-8);
  });
});

describe.each(devicesAndEmulator())('on $name', (on) => {
  const expectMul = (a: number[], b: number[]) =>
    expectOperation(on, [{ shape: a }, { shape: b }], mul, (dy, x, y) => {
      const { da, db } = reference.mulBackward(x, y, dy);
      return { y: reference.mulForward(x, y), gradients: [da, db] };
    });

  it.each([
    [[5], [5]],
    [[0], [0]],
    [
      [3, 7, 5],
      [3, 7, 5],
    ],
    [
      [3, 7, 5],
      [3, 7],
    ],
    [[9, 33], [9]],
    [[4, 16], [1]],
    [
      [30, 700],
      [30, 700],
    ],
    [[30, 700], [30]],
  ])('mul of %j and %j equals the reference', (a, b) => expectMul(a, b));

  it.each([1, 5, 4103])('scale, exp and log of %i numbers equal the reference', (count) => {
    const x = { shape: [count], values: positive(count, 1) };
    expectOperation(
      on,
      [x],
      (tape, t) => scale(tape, t, -2.5),
      (dy, v) => ({ y: reference.scaleForward(v, -2.5), gradients: [reference.scaleBackward(dy, -2.5)] }),
    );
    expectOperation(on, [x], exp, (dy, v) => ({
      y: reference.expForward(v),
      gradients: [reference.expBackward(v, dy)],
    }));
    expectOperation(on, [x], log, (dy, v) => ({
      y: reference.logForward(v),
      gradients: [reference.logBackward(v, dy)],
    }));
  });

  it('a square adds both of its gradients', () => {
    expectOperation(
      on,
      [{ shape: [21] }],
      (tape, x) => mul(tape, x, x),
      (dy, x) => ({ y: x.map((v) => v * v), gradients: [x.map((v, i) => 2 * v * dy[i])] }),
    );
  });

  it('are right far out, and NaN stays in its place', () => {
    const tape = new Tape(on.device());
    const x = tape.from([-200, 0, 200, Number.NaN], [4], on.dtype);
    expect([...exp(tape, x).read()]).toEqual([0, 1, Number.POSITIVE_INFINITY, Number.NaN]);
    const of = tape.from([0, 1, -1, Number.POSITIVE_INFINITY], [4], on.dtype);
    expect([...log(tape, of).read()]).toEqual([Number.NEGATIVE_INFINITY, 0, Number.NaN, Number.POSITIVE_INFINITY]);
    tape.end();
  });
});

it('names the tensor whose shape does not fit', () => {
  const tape = new Tape(cpu());
  expect(() => mul(tape, tape.zeros([2, 4]), tape.zeros([4]))).toThrow(
    'mul: b must have the shape of a, its first dimensions, or one number, not [4] beside [2, 4]',
  );
  expect(() => exp(tape, tape.zeros([2], 'i32'))).toThrow('exp: x must be f32, not i32');
  tape.end();
});

it('have the same bits for any number of threads', () => {
  expectSameForAnyThreadCount(() => {
    const tape = new Tape(cpu());
    const a = tape.watch(tape.from(positive(30_000, 1), [300, 100]));
    const b = tape.watch(tape.from(positive(300, 2), [300]));
    const y = log(tape, exp(tape, scale(tape, mul(tape, a, b), 0.3)));
    tape.backward(y, randomValues(30_000, 3));
    const bytes = [tape.gradient(a)!.readBytes(), tape.gradient(b)!.readBytes()];
    tape.end();
    return bytes;
  });
});
