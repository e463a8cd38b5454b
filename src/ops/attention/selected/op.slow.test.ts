import { describe, expect, it } from 'vitest';
import { Tape } from '../../../tensor/tape.js';
import { type AttentionCase, AWKWARD, randomInputs, starts, upload } from '../../../testing/attention.js';
import { cpu, devices, tolerance } from '../../../testing/devices.js';
import { relativeError } from '../../../testing/numbers.js';
import { compressedCount, Sequences } from '../../common/sequences.js';
import { denseForward } from '../dense/reference.js';
import { selectBlocks } from '../select/reference.js';
import { chooseSelectionKernel, SELECTION_KERNELS, type SelectionKernel, selectedAttention } from './op.js';
import { selectedBackward, selectedForward } from './reference.js';

function referenceSelection(example: AttentionCase, q: Float64Array, kCmp: Float64Array): Int32Array {
  const { l, d } = example.sparse;
  const cmpStarts = starts(example.lengths.map((length) => compressedCount(length, l, d)));
  return selectBlocks(q, kCmp, starts(example.lengths), cmpStarts, example.heads, example.sparse);
}

describe.each(devices())('selected attention on $name', ({ device, dtype }) => {
  const run = (example: AttentionCase, kernel: SelectionKernel) => {
    const { q, kCmp, kSel, vSel, dOut } = randomInputs(example, 1, dtype);
    const selection = referenceSelection(example, q.values, kCmp.values);
    const tape = new Tape(device());
    const [tq, tk, tv] = [q, kSel, vSel].map((input) => tape.watch(tape.own(upload(device(), input))));
    const sequences = new Sequences(device(), example.lengths);
    const { groups } = example.heads;
    const { lSel, nSel } = example.sparse;
    const selected = tape.from(selection, [sequences.total, groups, nSel], 'i32');
    const { out } = selectedAttention(tape, { q: tq, k: tk, v: tv }, selected, sequences, lSel, { kernel });
    const values = out.read();
    tape.backward(out, dOut.values);
    const gradients = [tq, tk, tv].map((tensor) => tape.gradient(tensor)!.read());
    tape.end();
    sequences.free();
    return { out: values, dq: gradients[0], dk: gradients[1], dv: gradients[2], selection };
  };

  describe.each(SELECTION_KERNELS)('kernel %s', (kernel) => {
    it.each(AWKWARD)('equals the reference, forward and backward: $name', (example) => {
      const { q, kSel, vSel, dOut } = randomInputs(example, 1, dtype);
      const actual = run(example, kernel);
      const layout = [actual.selection, starts(example.lengths), example.heads, example.sparse] as const;
      const limit = tolerance(dtype);
      expect(
        relativeError(actual.out, selectedForward(q.values, kSel.values, vSel.values, ...layout).out),
      ).toBeLessThan(limit);
      const expected = selectedBackward(q.values, kSel.values, vSel.values, ...layout, dOut.values);
      expect(relativeError(actual.dq, expected.dq)).toBeLessThan(limit);
      expect(relativeError(actual.dk, expected.dk)).toBeLessThan(limit);
      expect(relativeError(actual.dv, expected.dv)).toBeLessThan(limit);
    });
  });

  it('gives the same bits query by query and with shared loads', () => {
    const example = AWKWARD.find(({ name }) => name === '6 heads a group, two groups')!;
    expect(run({ ...example, lengths: [400] }, 'v2').out).toEqual(run({ ...example, lengths: [400] }, 'v1').out);
  });

  it('equals dense attention when n * l_sel covers the sequence', () => {
    const example = { ...AWKWARD[4], lengths: [61] }; // 4 blocks of 16
    const { q, kSel, vSel } = randomInputs(example, 1, dtype);
    const dense = denseForward(q.values, kSel.values, vSel.values, [0, 61], example.heads);
    expect(relativeError(run(example, 'v2').out, dense.out)).toBeLessThan(tolerance(dtype));
  });

  it('reads nothing for block numbers that do not exist or lie in the future', () => {
    const sequences = new Sequences(device(), [20]);
    for (const kernel of ['v1', 'v2'] as const) {
      const tape = new Tape(device());
      const x = tape.from(new Float32Array(20 * 4).fill(1), [20, 1, 4]);
      const selected = tape.from(
        new Int32Array(60).map((_, i) => [0, 1, 1_000_000][i % 3]),
        [20, 1, 3],
        'i32',
      );
      const { out } = selectedAttention(tape, { q: tape.watch(x), k: x, v: x }, selected, sequences, 16, { kernel });
      expect(Array.from(out.read())).toEqual(new Array(80).fill(1));
      tape.backward(out, new Float32Array(80).fill(1));
      expect(tape.gradient(x)!.read().every(Number.isFinite)).toBe(true);
      tape.end();
    }
  });

  it('chooses v2 from the given length on', () => {
    expect(chooseSelectionKernel(1023)).toBe('v1');
    expect(chooseSelectionKernel(1024)).toBe('v2');
    expect(chooseSelectionKernel(10, { sharedFrom: 10 })).toBe('v2');
    expect(chooseSelectionKernel(10_000, { kernel: 'v1' })).toBe('v1');
  });
});

it('refuses, on the CPU, rows that are not ascending and distinct, by row and rule', () => {
  using tape = new Tape(cpu());
  using sequences = new Sequences(cpu(), [2]);
  const x = tape.from(new Float32Array(8).fill(1), [2, 1, 4]);
  const attend = (row: number[], kernel: SelectionKernel) =>
    selectedAttention(tape, { q: x, k: x, v: x }, tape.from([0, 1, -1, ...row], [2, 1, 3], 'i32'), sequences, 16, {
      kernel,
    });
  for (const kernel of SELECTION_KERNELS) {
    for (const row of [
      [0, 0, -1],
      [0, 2, 1],
      [-1, 0, 1],
      [0, -2, -1],
    ])
      expect(() => attend(row, kernel)).toThrow(
        `selected attention: row [1, 0] of selected is [${row.join(', ')}]: the blocks of a row must be ascending and ` +
          'distinct, with -1 in the slots after them',
      );
    for (const row of [
      [-1, -1, -1],
      [0, 1, 2],
    ])
      expect(attend(row, kernel).out.shape).toEqual([2, 1, 4]);
  }
});
