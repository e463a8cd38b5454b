import { describe, expect, it } from 'vitest';
import { Tape } from '../../tensor/tape.js';
import { cpu } from '../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { devicesAndEmulator, expectOperation } from '../../testing/operation.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { mean, sum } from './op.js';
import { sumBackward, sumForward } from './reference.js';

it('the reference has gradients equal to finite differences', () => {
  const [x, dy] = [randomValues(12, 1), randomValues(3, 2)];
  const value = () => dot(sumForward(x, 4, 0.7), dy);
  expect(relativeError(sumBackward(12, 4, dy, 0.7), finiteDifferences(value, x))).toBeLessThan(1e-8);
});

describe.each(devicesAndEmulator())('on $name', (on) => {
  it.each([[[1]], [[3, 5]], [[2, 3, 100]], [[13, 999]]])('sum and mean of %j equal the reference', (shape) => {
    const count = shape.reduce((product, size) => product * size, 1);
    // All of one sign: a sum near 0 has no relative error.
    const values = randomValues(count, 1).map((value) => 2 + value);
    const check = (over: 'all' | 'last', run: typeof sum, divide: boolean) => {
      const width = over === 'all' ? count : shape.at(-1)!;
      const factor = divide ? 1 / width : 1;
      expectOperation(
        on,
        [{ shape, values }],
        (tape, x) => run(tape, x, over),
        (dy, x) => ({ y: sumForward(x, width, factor), gradients: [sumBackward(count, width, dy, factor)] }),
      );
    };
    for (const over of ['all', 'last'] as const) {
      check(over, sum, false);
      check(over, mean, true);
    }
  });

  it('the sum of no numbers is 0', () => {
    const tape = new Tape(on.device());
    expect([...sum(tape, tape.zeros([0], on.dtype)).read()]).toEqual([0]);
    expect([...sum(tape, tape.zeros([2, 0], on.dtype), 'last').read()]).toEqual([0, 0]);
    tape.end();
  });
});

it('has the same bits for any number of threads', () => {
  expectSameForAnyThreadCount(() => {
    const tape = new Tape(cpu());
    const x = tape.watch(tape.from(randomValues(50_000, 1), [500, 100]));
    const y = tape.release(mean(tape, sum(tape, x, 'last')));
    tape.backward(y);
    const bytes = [y.readBytes(), tape.gradient(x)!.readBytes()];
    y.free();
    tape.end();
    return bytes;
  });
});
