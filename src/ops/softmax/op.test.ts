import { describe, expect, it } from 'vitest';
import { Tape } from '../../tensor/tape.js';
import { cpu } from '../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { devicesAndEmulator, expectOperation } from '../../testing/operation.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { softmax } from './op.js';
import { softmaxBackward, softmaxForward } from './reference.js';

it('the reference has gradients equal to finite differences', () => {
  const [x, dy] = [randomValues(12, 1), randomValues(12, 2)];
  const gradient = softmaxBackward(softmaxForward(x, 4), 4, dy);
  expect(
    relativeError(
      gradient,
      finiteDifferences(() => dot(softmaxForward(x, 4), dy), x),
    ),
  ).toBeLessThan(1e-8);
});

describe.each(devicesAndEmulator())('softmax on $name', (on) => {
  it.each([[[1, 1]], [[7]], [[3, 5, 9]], [[5, 300]], [[70, 16]], [[0, 8]], [[4, 0]]])(
    'of %j equals the reference',
    (shape) => {
      const width = shape.at(-1)!;
      const count = shape.reduce((product, size) => product * size, 1);
      const values = randomValues(count, 1).map((value) => 8 * value);
      expectOperation(on, [{ shape, values }], softmax, (dy, x) => {
        const y = width === 0 ? x : softmaxForward(x, width);
        return { y, gradients: [width === 0 ? x : softmaxBackward(y, width, dy)] };
      });
    },
  );

  it('does not overflow, and NaN stays in its row', () => {
    const tape = new Tape(on.device());
    const y = softmax(tape, tape.from([3e38, 3e38, Number.NaN, 0, 1, 1], [3, 2], on.dtype));
    expect([...y.read()]).toEqual([0.5, 0.5, Number.NaN, Number.NaN, 0.5, 0.5]);
    tape.end();
  });
});

it('has the same bits for any number of threads', () => {
  expectSameForAnyThreadCount(() => {
    const tape = new Tape(cpu());
    const x = tape.watch(tape.from(randomValues(50_000, 1), [500, 100]));
    tape.backward(softmax(tape, x), randomValues(50_000, 2));
    const bytes = [tape.gradient(x)!.readBytes()];
    tape.end();
    return bytes;
  });
});
