import { describe, expect, it } from 'vitest';
import { Tape } from '../../../tensor/tape.js';
import { AWKWARD, randomInputs, starts, upload } from '../../../testing/attention.js';
import { devices, tolerance } from '../../../testing/devices.js';
import { relativeError } from '../../../testing/numbers.js';
import { Sequences } from '../../common/sequences.js';
import { denseAttention } from './op.js';
import { denseBackward, denseForward } from './reference.js';

describe.each(devices())('dense attention on $name', ({ device, dtype }) => {
  it.each(AWKWARD)('equals the reference, forward and backward: $name', (example) => {
    const { q, kSel, vSel, dOut } = randomInputs(example, 1, dtype);
    const offsets = starts(example.lengths);
    const tape = new Tape(device());
    const [tq, tk, tv] = [q, kSel, vSel].map((input) => tape.watch(tape.own(upload(device(), input))));
    const sequences = new Sequences(device(), example.lengths);
    const out = denseAttention(tape, { q: tq, k: tk, v: tv }, sequences);
    const expected = denseForward(q.values, kSel.values, vSel.values, offsets, example.heads);
    const limit = tolerance(dtype);
    expect(relativeError(out.read(), expected.out)).toBeLessThan(limit);
    tape.backward(out, dOut.values);
    const gradients = denseBackward(q.values, kSel.values, vSel.values, offsets, example.heads, dOut.values);
    expect(relativeError(tape.gradient(tq)!.read(), gradients.dq)).toBeLessThan(limit);
    expect(relativeError(tape.gradient(tk)!.read(), gradients.dk)).toBeLessThan(limit);
    expect(relativeError(tape.gradient(tv)!.read(), gradients.dv)).toBeLessThan(limit);
    tape.end();
    sequences.free();
  });

  it('never lets the future through, not even as 0 times infinity', () => {
    const example = { ...AWKWARD[0], lengths: [100] };
    const { q, kSel, vSel } = randomInputs(example, 2, dtype);
    const run = () => {
      const tape = new Tape(device(), { record: false });
      const [tq, tk, tv] = [q, kSel, vSel].map((input) => tape.own(upload(device(), input)));
      const out = denseAttention(tape, { q: tq, k: tk, v: tv }, new Sequences(device(), [100]), {
        fusedFrom: Number.POSITIVE_INFINITY, // the fused kernels multiply whole tiles: 0 times infinity is NaN there
      }).read();
      tape.end();
      return out;
    };
    const before = run();
    const changed = 60;
    const { groups, dk, dv, heads } = example.heads;
    kSel.values.fill(Number.NaN, changed * groups * dk);
    vSel.values.fill(Number.POSITIVE_INFINITY, changed * groups * dv);
    const visible = changed * heads * dv;
    expect(run().slice(0, visible)).toEqual(before.slice(0, visible));
  });

  it('names the tensor whose shape does not fit', () => {
    const tape = new Tape(device());
    const sequences = new Sequences(device(), [4]);
    const inputs = { q: tape.zeros([4, 2, 8]), k: tape.zeros([4, 1, 8]), v: tape.zeros([3, 1, 8]) };
    expect(() => denseAttention(tape, inputs, sequences)).toThrow(
      'dense attention: v must have shape [4, 1, *], not [3, 1, 8]',
    );
    const odd = { q: tape.zeros([4, 3, 8]), k: tape.zeros([4, 2, 8]), v: tape.zeros([4, 2, 8]) };
    expect(() => denseAttention(tape, odd, sequences)).toThrow('groups must divide heads');
    tape.end();
  });
});
