import { describe, expect, it } from 'vitest';
import { Tape } from '../../tensor/tape.js';
import { AWKWARD, randomInputs, upload } from '../../testing/attention.js';
import { devices, tolerance } from '../../testing/devices.js';
import { nsaLayout } from '../../testing/nsa.js';
import { relativeError } from '../../testing/numbers.js';
import { differentSelections } from '../../testing/selection.js';
import { Sequences } from '../common/sequences.js';
import { nativeSparseAttention } from './nsa.js';
import { importance } from './select/reference.js';

describe.each(devices())('attention core on $name', ({ device, dtype }) => {
  const example = AWKWARD.find(({ name }) => name === 'ragged')!;
  const run = (parity: boolean) => {
    const { dOut, ...given } = randomInputs(example, 1, dtype);
    const tape = new Tape(device());
    const inputs = Object.fromEntries(
      Object.entries(given).map(([name, input]) => [name, tape.watch(tape.own(upload(device(), input)))]),
    ) as unknown as Parameters<typeof nativeSparseAttention>[1];
    const tokens = tape.hold(new Sequences(device(), example.lengths));
    const errors: number[] = [];
    const outputs = nativeSparseAttention(tape, inputs, tokens, example.sparse, {
      parity,
      onCompare: (error) => errors.push(error),
    });
    const values = [outputs.out, outputs.oCmp, outputs.oSel, outputs.oWin].map((tensor) => tensor.read());
    const selected = outputs.selected.read();
    tape.backward(outputs.out, dOut.values);
    const gradients = Object.values(inputs).map((tensor) => tape.gradient(tensor)!.read());
    tape.end();
    return { values: [...values, ...gradients], selected, errors };
  };

  it('gives with the reference in place of all kernels what the kernels give', () => {
    const [kernels, reference] = [run(false), run(true)];
    const { starts, cmpStarts } = nsaLayout(example.lengths, example.heads, example.sparse);
    const { q, kCmp } = randomInputs(example, 1, dtype);
    const scores = importance(q.values, kCmp.values, starts, cmpStarts, example.heads, example.sparse);
    const nearTie = dtype === 'f32' ? 1e-6 : 1e-3;
    expect(differentSelections(kernels.selected, reference.selected, example, scores, nearTie)).toEqual([]);
    for (const [i, value] of kernels.values.entries())
      expect(relativeError(value, reference.values[i])).toBeLessThan(tolerance(dtype));
  });

  it('reports how far the kernels are from the reference', () => {
    expect(run(false).errors).toHaveLength(1);
    expect(run(false).errors[0]).toBeLessThan(tolerance(dtype));
    expect(run(false).errors[0]).toBeGreaterThan(0);
  });
});
