import { describe, expect, it } from 'vitest';
import { Tape } from '../../../tensor/tape.js';
import { AWKWARD, randomInputs, starts, upload } from '../../../testing/attention.js';
import { devices, tolerance } from '../../../testing/devices.js';
import { relativeError } from '../../../testing/numbers.js';
import { Sequences } from '../../common/sequences.js';
import { windowAttention } from './op.js';
import { windowBackward, windowForward } from './reference.js';

describe.each(devices())('window attention on $name', ({ device, dtype }) => {
  const cases = [
    ...AWKWARD,
    { ...AWKWARD[11], name: 'long, short window', lengths: [2100], sparse: { ...AWKWARD[11].sparse, w: 70 } },
  ];
  it.each(cases)('equals the reference, forward and backward: $name', (example) => {
    const { q, kWin, vWin, dOut } = randomInputs(example, 1, dtype);
    const offsets = starts(example.lengths);
    const { w } = example.sparse;
    const tape = new Tape(device());
    const [tq, tk, tv] = [q, kWin, vWin].map((input) => tape.watch(tape.own(upload(device(), input))));
    const sequences = new Sequences(device(), example.lengths);
    const out = windowAttention(tape, { q: tq, k: tk, v: tv }, sequences, w);
    const expected = windowForward(q.values, kWin.values, vWin.values, offsets, example.heads, w);
    const limit = tolerance(dtype);
    expect(relativeError(out.read(), expected.out)).toBeLessThan(limit);
    tape.backward(out, dOut.values);
    const gradients = windowBackward(q.values, kWin.values, vWin.values, offsets, example.heads, w, dOut.values);
    expect(relativeError(tape.gradient(tq)!.read(), gradients.dq)).toBeLessThan(limit);
    expect(relativeError(tape.gradient(tk)!.read(), gradients.dk)).toBeLessThan(limit);
    expect(relativeError(tape.gradient(tv)!.read(), gradients.dv)).toBeLessThan(limit);
    tape.end();
    sequences.free();
  });

  it('reads exactly w keys: a value just outside the window does not matter, even infinite', () => {
    const example = { ...AWKWARD[0], lengths: [90] };
    const { q, kWin, vWin } = randomInputs(example, 3, dtype);
    const run = () => {
      const tape = new Tape(device(), { record: false });
      const [tq, tk, tv] = [q, kWin, vWin].map((input) => tape.own(upload(device(), input)));
      const out = windowAttention(tape, { q: tq, k: tk, v: tv }, new Sequences(device(), [90]), 10).read();
      tape.end();
      return out;
    };
    const before = run();
    const { groups, dv, heads } = example.heads;
    vWin.values.fill(Number.POSITIVE_INFINITY, 20 * groups * dv, 21 * groups * dv);
    const after = run();
    const row = heads * dv;
    expect(after.slice(0, 20 * row)).toEqual(before.slice(0, 20 * row));
    expect(Number.isFinite(after[29 * row])).toBe(false); // the last token that sees token 20
    expect(after.slice(30 * row)).toEqual(before.slice(30 * row));
  });

  it('refuses a window that is no whole number from 1', () => {
    const tape = new Tape(device());
    const x = tape.zeros([2, 1, 4]);
    expect(() => windowAttention(tape, { q: x, k: x, v: x }, new Sequences(device(), [2]), 0)).toThrow(
      'w must be a whole number from 1, not 0',
    );
    tape.end();
  });
});
