import { describe, expect, it } from 'vitest';
import { Tape } from '../../tensor/tape.js';
import { cpu, devices, rounded, tolerance } from '../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { silu, swiglu } from './op.js';
import { siluBackward, siluForward, swigluBackward, swigluForward } from './reference.js';

/** Values out to ±8, where the sigmoid bends. */
const wide = (count: number, seed: number) => randomValues(count, seed).map((v) => v * 8);

describe('activation references', () => {
  it('have gradients equal to finite differences', () => {
    const [x, dy, half] = [wide(24, 1), randomValues(24, 2), randomValues(12, 3)];
    const ofSilu = finiteDifferences(() => dot(siluForward(x), dy), x);
    expect(relativeError(siluBackward(x, dy), ofSilu)).toBeLessThan(1e-8);
    const ofSwiglu = finiteDifferences(() => dot(swigluForward(x, 4), half), x);
    expect(relativeError(swigluBackward(x, 4, half), ofSwiglu)).toBeLessThan(1e-8);
  });
});

describe.each(devices())('silu on $name', ({ device, dtype }) => {
  it.each([1, 5, 16, 8192, 20011, 0])('equals the reference for %i numbers', (count) => {
    const [x, dy] = [rounded(wide(count, 1), dtype), rounded(randomValues(count, 2), dtype)];
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [count], dtype));
    const y = silu(tape, tx);
    expect(relativeError(y.read(), siluForward(x))).toBeLessThan(tolerance(dtype));
    tape.backward(y, dy);
    expect(relativeError(tape.gradient(tx)!.read(), siluBackward(x, dy))).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it('keeps the shape, and is right far out', () => {
    const tape = new Tape(device());
    const large = rounded(Float64Array.of(Math.fround(3e38)), dtype)[0];
    const y = silu(tape, tape.from([-200, -90, 0, 90, 200, large], [3, 1, 2], dtype));
    expect(y.shape).toEqual([3, 1, 2]);
    const values = y.read();
    expect(Math.abs(values[0]) + Math.abs(values[1]) + Math.abs(values[2])).toBeLessThan(1e-30);
    expect([...values.slice(3)]).toEqual([90, 200, large]);
    tape.end();
  });

  it('refuses another type', () => {
    const tape = new Tape(device());
    expect(() => silu(tape, tape.zeros([2], 'i32'))).toThrow('silu: x must be f32, not i32');
    if (device().kind === 'cpu')
      expect(() => silu(tape, tape.zeros([2], 'bf16'))).toThrow('silu: x must be f32, not bf16');
    tape.end();
  });

  it('adds to existing gradients', () => {
    const [x, first, second] = [wide(21, 1), randomValues(21, 2), randomValues(21, 3)].map((v) => rounded(v, dtype));
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [21], dtype));
    const [a, b] = [silu(tape, tx), silu(tape, tx)];
    tape.backward([a, b], [first, second]);
    const expected = siluBackward(
      x,
      first.map((v, i) => v + second[i]),
    );
    expect(relativeError(tape.gradient(tx)!.read(), expected)).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it('propagates NaN to its own place only', () => {
    const tape = new Tape(device());
    const x = tape.watch(tape.from([1, Number.NaN, 2], [3], dtype));
    const y = silu(tape, x);
    expect(Array.from(y.read(), Number.isNaN)).toEqual([false, true, false]);
    tape.backward(y, [1, 1, 1]);
    expect(Array.from(tape.gradient(x)!.read(), Number.isNaN)).toEqual([false, true, false]);
    tape.end();
  });
});

describe.each(devices())('swiglu on $name', ({ device, dtype }) => {
  it.each([
    [1, 1],
    [3, 5],
    [17, 16],
    [300, 100],
    [2, 9000],
    [0, 8],
    [3, 0],
  ])('equals the reference for %i rows of %i', (rows, hidden) => {
    const [x, dy] = [wide(rows * hidden * 2, 1), randomValues(rows * hidden, 2)].map((v) => rounded(v, dtype));
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [rows, 2 * hidden], dtype));
    const y = swiglu(tape, tx);
    expect(y.shape).toEqual([rows, hidden]);
    expect(relativeError(y.read(), swigluForward(x, hidden))).toBeLessThan(tolerance(dtype));
    tape.backward(y, dy);
    const expected = swigluBackward(x, hidden, dy);
    expect(relativeError(tape.gradient(tx)!.read(), expected)).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it('adds to existing gradients', () => {
    const [x, first, second] = [wide(2 * 21, 1), randomValues(21, 2), randomValues(21, 3)].map((v) =>
      rounded(v, dtype),
    );
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [3, 14], dtype));
    const [a, b] = [swiglu(tape, tx), swiglu(tape, tx)];
    tape.backward([a, b], [first, second]);
    const expected = swigluBackward(
      x,
      7,
      first.map((v, i) => v + second[i]),
    );
    expect(relativeError(tape.gradient(tx)!.read(), expected)).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it('names the expected shape in its error', () => {
    const tape = new Tape(device());
    expect(() => swiglu(tape, tape.zeros([2, 3]))).toThrow('swiglu: x must have an even number of columns');
    expect(() => swiglu(tape, tape.zeros([4]))).toThrow('swiglu: x must have shape [*, *], not [4]');
    tape.end();
  });

  it('propagates NaN to its own place only', () => {
    const tape = new Tape(device());
    const y = swiglu(tape, tape.from([1, Number.NaN, 1, 1, 1, 1, Number.NaN, 1], [2, 4], dtype)).read();
    expect(Array.from(y, Number.isNaN)).toEqual([false, true, true, false]);
    tape.end();
  });
});

it('gives the same numbers for any number of threads', () => {
  expectSameForAnyThreadCount(() => {
    const tape = new Tape(cpu());
    const x = tape.watch(tape.from(wide(100 * 602, 1), [100, 602]));
    const y = silu(tape, swiglu(tape, x));
    tape.release(y);
    tape.backward(y, randomValues(100 * 301, 2));
    const bytes = [y.readBytes(), tape.gradient(x)!.readBytes()];
    y.free();
    tape.end();
    return bytes;
  });
});
