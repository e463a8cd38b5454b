import { describe, expect, it } from 'vitest';
import { Tape } from '../tensor/tape.js';
import { AWKWARD, randomInputs, upload } from '../testing/attention.js';
import { devices, tolerance } from '../testing/devices.js';
import { relativeError } from '../testing/numbers.js';
import { nativeSparseAttention, sparseLayout } from './nsa.js';
import { Sequences } from './sequences.js';

describe.each(devices())('attention core on $name', ({ device }) => {
  const example = AWKWARD.find(({ name }) => name === 'ragged')!;
  const run = (parity: boolean) => {
    const { dOut, ...given } = randomInputs(example, 1);
    const tape = new Tape(device());
    const inputs = Object.fromEntries(
      Object.entries(given).map(([name, input]) => [name, tape.watch(tape.own(upload(device(), input)))]),
    ) as unknown as Parameters<typeof nativeSparseAttention>[1];
    const layout = sparseLayout(new Sequences(device(), example.lengths), example.sparse);
    const errors: number[] = [];
    const outputs = nativeSparseAttention(tape, inputs, layout, example.sparse, {
      parity,
      onCompare: (error) => errors.push(error),
    });
    const values = [outputs.out, outputs.oCmp, outputs.oSel, outputs.oWin].map((tensor) => tensor.read());
    tape.seed(outputs.out, dOut.values);
    tape.backward();
    const gradients = Object.values(inputs).map((tensor) => tape.gradient(tensor)!.read());
    tape.end();
    return { values: [...values, ...gradients], errors };
  };

  it('gives with the reference in place of all kernels what the kernels give', () => {
    const [kernels, reference] = [run(false), run(true)];
    for (const [i, value] of kernels.values.entries())
      expect(relativeError(value, reference.values[i])).toBeLessThan(tolerance(device()));
  });

  it('reports how far the kernels are from the reference', () => {
    expect(run(false).errors).toHaveLength(1);
    expect(run(false).errors[0]).toBeLessThan(tolerance(device()));
    expect(run(false).errors[0]).toBeGreaterThan(0);
  });
});
