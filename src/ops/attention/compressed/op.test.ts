import { describe, expect, it } from 'vitest';
import { Tape } from '../../../tensor/tape.js';
import { AWKWARD, randomInputs, starts, upload } from '../../../testing/attention.js';
import { devices, tolerance } from '../../../testing/devices.js';
import { relativeError } from '../../../testing/numbers.js';
import { Sequences } from '../../common/sequences.js';
import { compressedAttention } from './op.js';
import { compressedBackward, compressedForward } from './reference.js';

const finite = (values: ArrayLike<number>) =>
  Array.from(values, (value) => (value === Number.NEGATIVE_INFINITY ? 0 : value));

describe.each(devices())('compressed attention on $name', ({ device, dtype }) => {
  const long = { ...AWKWARD[4], name: 'long enough for several key chunks', lengths: [1500, 900] };
  it.each([...AWKWARD, long])('equals the reference, forward, LSE and backward: $name', (example) => {
    const { q, kCmp, vCmp, dOut } = randomInputs(example, 1, dtype);
    const { sparse, heads } = example;
    const tape = new Tape(device());
    const [tq, tk, tv] = [q, kCmp, vCmp].map((input) => tape.watch(tape.own(upload(device(), input))));
    const sequences = new Sequences(device(), example.lengths);
    const blocks = sequences.compressed(sparse);
    const offsets = starts(example.lengths);
    const { out, lse } = compressedAttention(tape, { q: tq, k: tk, v: tv }, sequences, sparse);
    const expected = compressedForward(q.values, kCmp.values, vCmp.values, offsets, blocks.starts, heads, sparse);
    const limit = tolerance(dtype);
    expect(relativeError(out.read(), expected.out)).toBeLessThan(limit);
    const logSums = lse.read();
    expect(Array.from(logSums, (value) => value === Number.NEGATIVE_INFINITY)).toEqual(
      Array.from(expected.lse, (value) => value === Number.NEGATIVE_INFINITY),
    );
    expect(relativeError(finite(logSums), finite(expected.lse))).toBeLessThan(limit);
    tape.backward(out, dOut.values);
    const gradients = compressedBackward(
      q.values,
      kCmp.values,
      vCmp.values,
      offsets,
      blocks.starts,
      heads,
      sparse,
      dOut.values,
    );
    expect(relativeError(tape.gradient(tq)!.read(), gradients.dq)).toBeLessThan(limit);
    expect(relativeError(tape.gradient(tk)!.read(), gradients.dk)).toBeLessThan(limit);
    expect(relativeError(tape.gradient(tv)!.read(), gradients.dv)).toBeLessThan(limit);
    tape.end();
    sequences.free();
  });

  it('names the tensor whose shape does not fit', () => {
    const tape = new Tape(device());
    const sequences = new Sequences(device(), [16]);
    const inputs = { q: tape.zeros([16, 2, 8]), k: tape.zeros([2, 1, 8]), v: tape.zeros([3, 1, 8]) };
    expect(() => compressedAttention(tape, inputs, sequences, { l: 8, d: 4 })).toThrow(
      'compressed attention: k must have shape [3, *, 8], not [2, 1, 8]',
    );
    tape.end();
  });
});
