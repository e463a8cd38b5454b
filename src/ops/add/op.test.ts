import { describe, expect, it } from 'vitest';
import { Parameter } from '../../tensor/parameter.js';
import { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { devices, rounded, tolerance } from '../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { silu } from '../activation/op.js';
import { siluBackward } from '../activation/reference.js';
import { add, addInto } from './op.js';
import { addBackward, addForward } from './reference.js';

describe('add reference', () => {
  it('has gradients equal to finite differences', () => {
    const [x, r, dy] = [randomValues(6, 1), randomValues(6, 2), randomValues(6, 3)];
    const { dx, dr } = addBackward(dy);
    const value = () => dot(addForward(x, r), dy);
    expect(relativeError(dx, finiteDifferences(value, x))).toBeLessThan(1e-8);
    expect(relativeError(dr, finiteDifferences(value, r))).toBeLessThan(1e-8);
  });
});

describe.each(devices())('add on $name', ({ device, dtype }) => {
  const random = (count: number, seed: number) => rounded(randomValues(count, seed), dtype);

  it.each([1, 5, 16, 40001, 0])('equals the reference for %i numbers', (count) => {
    const [x, r, dy] = [random(count, 1), random(count, 2), random(count, 3)];
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [count], dtype));
    const tr = tape.watch(tape.from(r, [count], dtype));
    const y = add(tape, tx, tr);
    expect(relativeError(y.read(), addForward(x, r))).toBeLessThan(tolerance(dtype));
    tape.backward(y, dy);
    const { dx, dr } = addBackward(dy);
    expect(relativeError(tape.gradient(tx)!.read(), dx)).toBe(0);
    expect(relativeError(tape.gradient(tr)!.read(), dr)).toBe(0);
    tape.end();
  });

  it('hands one gradient to both sides without a copy', () => {
    const tape = new Tape(device());
    const [x, r] = [1, 2].map(() => tape.watch(tape.zeros([1000], dtype)));
    const y = add(tape, x, r);
    const dy = tape.from(randomValues(1000, 1), [1000], dtype);
    const before = device().pool.bytesInUse;
    tape.backward(y, dy); // frees y and allocates nothing
    expect(device().pool.bytesInUse).toBeLessThan(before);
    expect(tape.gradient(x)!.pointer).toBe(tape.gradient(r)!.pointer);
    tape.end();
  });

  it('gives x + x twice the gradient', () => {
    const tape = new Tape(device());
    const x = tape.watch(tape.from([1, 2, 3], [3], dtype));
    const y = add(tape, x, x);
    expect([...y.read()]).toEqual([2, 4, 6]);
    tape.backward(y, [1, 10, 100]);
    expect([...tape.gradient(x)!.read()]).toEqual([2, 20, 200]);
    tape.end();
  });

  it('adds to existing gradients', () => {
    const [values, dy] = [random(8, 1), random(8, 2)];
    const tape = new Tape(device());
    const x = tape.watch(tape.from(values, [2, 4], dtype));
    const y = add(tape, x, silu(tape, x));
    tape.backward(y, dy);
    const branch = siluBackward(values, dy);
    const expected = dy.map((slope, i) => slope + branch[i]);
    expect(relativeError(tape.gradient(x)!.read(), expected)).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it('adds to the gradient of a parameter', () => {
    const dy = randomValues(8, 2);
    const bias = new Parameter(device(), 'bias', [2, 4]);
    bias.value.zero();
    const tape = new Tape(device());
    const x = tape.watch(tape.zeros([2, 4]));
    tape.backward(add(tape, add(tape, x, bias.value), bias.value), dy);
    const twice = dy.map((slope) => 2 * slope);
    expect(relativeError(bias.gradient!.read(), twice)).toBeLessThan(tolerance('f32'));
    tape.end();
    bias.free();
  });

  it('names the tensor whose shape does not fit', () => {
    const tape = new Tape(device());
    expect(() => add(tape, tape.zeros([2, 4]), tape.zeros([8]))).toThrow('add: r must have shape [2, 4], not [8]');
    expect(() => addInto(device(), tape.zeros([2]), tape.zeros([3]))).toThrow('cannot reshape [3] to [2]');
    expect(() => addInto(device(), tape.zeros([2], 'i32'), tape.zeros([2]))).toThrow('must be f32, not i32');
    tape.end();
  });

  it('adds in place, NaN included', () => {
    const into = Tensor.from(device(), [1, Number.NaN, 3], [3], dtype);
    const value = Tensor.from(device(), [10, 20, 30], [1, 3], dtype);
    addInto(device(), into, value);
    expect([...into.read()]).toEqual([11, Number.NaN, 33]);
    const wide = Tensor.zeros(device(), [3]);
    addInto(device(), wide, value); // f32 += the dtype under test
    addInto(device(), wide, value);
    expect([...wide.read()]).toEqual([20, 40, 60]);
    for (const tensor of [into, value, wide]) tensor.free();
    expect(device().pool.bytesInUse).toBe(0);
  });
});
