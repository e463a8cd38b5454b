import { describe, expect, it } from 'vitest';
import { Tape } from '../../tensor/tape.js';
import { cpu } from '../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { devicesAndEmulator, expectOperation } from '../../testing/operation.js';
import { slice } from './op.js';
import { sliceBackward, sliceForward } from './reference.js';

const partOf = (shape: readonly number[], axis: number, start: number, end: number) => ({
  size: shape[axis],
  inner: shape.slice(axis + 1).reduce((product, size) => product * size, 1),
  start,
  end,
});

it('the reference has gradients equal to finite differences', () => {
  const part = partOf([2, 3, 2], 1, 1, 3);
  const [x, dy] = [randomValues(12, 1), randomValues(8, 2)];
  const value = () => dot(sliceForward(x, part), dy);
  expect(relativeError(sliceBackward(12, part, dy), finiteDifferences(value, x))).toBeLessThan(1e-8);
});

describe.each(devicesAndEmulator())('slice on $name', (on) => {
  it.each([
    [[7], 0, 2, 5],
    [[5, 6], 0, 0, 3],
    [[5, 6], 1, 1, 6],
    [[4, 5, 6], 1, 2, 3],
    [[4, 5, 6], 2, 0, 6],
    [[40, 300], 1, 7, 8],
    [[3, 4], 1, 2, 2],
  ])('of %j, dimension %i from %i to %i equals the reference', (shape, axis, start, end) => {
    const part = partOf(shape, axis, start, end);
    expectOperation(
      on,
      [{ shape }],
      (tape, x) => {
        const y = slice(tape, x, axis, start, end);
        expect(y.shape).toEqual(shape.with(axis, end - start));
        return y;
      },
      (dy, x) => ({ y: sliceForward(x, part), gradients: [sliceBackward(x.length, part, dy)] }),
    );
  });
});

it('names what does not fit', () => {
  const tape = new Tape(cpu());
  const x = tape.zeros([2, 4]);
  expect(() => slice(tape, x, 2, 0, 1)).toThrow('slice: x has 2 dimensions, numbered from 0, and no 2');
  expect(() => slice(tape, x, 1, 2, 5)).toThrow('slice: 2 to 5 is not inside dimension 1 of [2, 4]');
  tape.end();
});
