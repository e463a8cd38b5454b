import { describe, expect, it } from 'vitest';
import { readGolden } from '../../testing/golden.js';
import { nsaInputs, nsaLayout } from '../../testing/nsa.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { compressedCount } from '../common/sequences.js';
import { denseForward } from './dense/reference.js';
import { type NsaInputs, nsaBackward, nsaForward } from './reference.js';
import type { HeadShape, SparseShape } from './shape.js';

const HEADS: HeadShape = { heads: 4, groups: 2, dk: 4, dv: 3 };
const SPARSE: SparseShape = { l: 4, d: 2, lSel: 4, nSel: 3, w: 5 };

/** The tensors that every call has. */
type Name = Exclude<keyof NsaInputs, 'qWin'>;

describe('the reference equals the golden case', () => {
  const golden = readGolden();
  const outputs = nsaForward(golden.inputs, golden.layout);
  const gradients = nsaBackward(golden.inputs, golden.layout, outputs, golden.dOut);

  it.each(['out', 'oCmp', 'oSel', 'oWin'] as const)('in %s', (name) => {
    expect(relativeError(outputs[name], golden.outputs[name])).toBeLessThan(1e-6);
  });
  it('in the selected blocks', () => {
    expect(outputs.selected).toEqual(golden.selected);
  });
  it.each(['dq', 'dkCmp', 'dvCmp', 'dkSel', 'dvSel', 'dkWin', 'dvWin', 'dGates'] as const)('in %s', (name) => {
    expect(relativeError(gradients[name], golden.gradients[name])).toBeLessThan(1e-6);
  });
});

describe('the whole core', () => {
  it('has gradients equal to finite differences', () => {
    const layout = nsaLayout([13, 3, 6], HEADS, SPARSE);
    const inputs = nsaInputs(layout, 1);
    const outputs = nsaForward(inputs, layout);
    const dOut = randomValues(outputs.out.length, 9);
    const gradients = nsaBackward(inputs, layout, outputs, dOut);
    // No gradient flows through the selection: it is held still while the inputs move.
    const value = () => dot(nsaForward(inputs, layout, outputs.selected).out, dOut);
    const pairs: [Name, Float64Array][] = [
      ['q', gradients.dq],
      ['kCmp', gradients.dkCmp],
      ['vCmp', gradients.dvCmp],
      ['kSel', gradients.dkSel],
      ['vSel', gradients.dvSel],
      ['kWin', gradients.dkWin],
      ['vWin', gradients.dvWin],
      ['gates', gradients.dGates],
    ];
    for (const [name, gradient] of pairs)
      expect(relativeError(gradient, finiteDifferences(value, inputs[name])), name).toBeLessThan(1e-8);
  });

  it('has gradients of queries that only the window branch reads', () => {
    const layout = nsaLayout([13, 3, 6], HEADS, SPARSE);
    const shared = nsaInputs(layout, 1);
    const qWin = shared.q.map((value, i) => value + Math.sin(i));
    const inputs = { ...shared, qWin };
    const outputs = nsaForward(inputs, layout);
    const dOut = randomValues(outputs.out.length, 9);
    const { dq, dqWin } = nsaBackward(inputs, layout, outputs, dOut);
    const value = () => dot(nsaForward(inputs, layout, outputs.selected).out, dOut);
    expect(relativeError(dq, finiteDifferences(value, inputs.q))).toBeLessThan(1e-8);
    expect(relativeError(dqWin!, finiteDifferences(value, qWin))).toBeLessThan(1e-8);
    expect(outputs.oSel).toEqual(nsaForward(shared, layout).oSel);
  });

  it('cannot see the future', () => {
    const length = 23;
    const layout = nsaLayout([length], HEADS, SPARSE);
    const inputs = nsaInputs(layout, 2);
    const before = nsaForward(inputs, layout);
    for (let t = 0; t < length - 1; t++) {
      // Everything that depends on a token after t changes: tokens, and the blocks that hold one of them.
      const changed = { ...inputs };
      const finished = compressedCount(t + 1, SPARSE.l, SPARSE.d);
      for (const name of Object.keys(inputs) as Name[]) {
        const rows = name.endsWith('Cmp') ? layout.cmpStarts[1] : length;
        const kept = ((name.endsWith('Cmp') ? finished : t + 1) * inputs[name].length) / rows;
        changed[name] = inputs[name].map((value, i) => (i < kept ? value : value + 100));
      }
      const after = nsaForward(changed, layout);
      const outSize = ((t + 1) * before.out.length) / length;
      const selectedSize = ((t + 1) * before.selected.length) / length;
      expect(after.out.slice(0, outSize)).toEqual(before.out.slice(0, outSize));
      expect(after.selected.slice(0, selectedSize)).toEqual(before.selected.slice(0, selectedSize));
    }
  });

  it('gives a packed batch what each sequence gets alone', () => {
    const lengths = [0, 1, 3, 4, 0, 17, 9, 0];
    const layout = nsaLayout(lengths, HEADS, SPARSE);
    const inputs = nsaInputs(layout, 3);
    const packed = nsaForward(inputs, layout);
    const dOut = randomValues(packed.out.length, 9);
    const gradients = nsaBackward(inputs, layout, packed, dOut);
    lengths.forEach((length, s) => {
      const alone = nsaLayout([length], HEADS, SPARSE);
      const rows = (values: Float64Array, starts: ArrayLike<number>) => {
        const width = values.length / starts[starts.length - 1];
        return values.slice(starts[s] * width, starts[s + 1] * width);
      };
      const own = Object.fromEntries(
        Object.entries(inputs).map(([name, values]) => [
          name,
          rows(values, name.endsWith('Cmp') ? layout.cmpStarts : layout.starts),
        ]),
      ) as unknown as NsaInputs;
      const output = nsaForward(own, alone);
      const gradient = nsaBackward(own, alone, output, rows(dOut, layout.starts));
      expect(output.out).toEqual(rows(packed.out, layout.starts));
      expect(gradient.dq).toEqual(rows(gradients.dq, layout.starts));
      expect(gradient.dkCmp).toEqual(rows(gradients.dkCmp, layout.cmpStarts));
      expect(gradient.dvSel).toEqual(rows(gradients.dvSel, layout.starts));
      expect(gradient.dkWin).toEqual(rows(gradients.dkWin, layout.starts));
    });
  });

  it('becomes dense where the selection or the window holds everything', () => {
    const layout = nsaLayout([20, 7], HEADS, { ...SPARSE, nSel: 5, w: 20 });
    const inputs = nsaInputs(layout, 4);
    const { oSel, oWin } = nsaForward(inputs, layout);
    expect(oSel).toEqual(denseForward(inputs.q, inputs.kSel, inputs.vSel, layout.starts, HEADS).out);
    expect(oWin).toEqual(denseForward(inputs.q, inputs.kWin, inputs.vWin, layout.starts, HEADS).out);
  });

  it.each([
    ['as many groups as heads', { heads: 3, groups: 3, dk: 2, dv: 2 }],
    ['sixteen heads in a group', { heads: 16, groups: 1, dk: 2, dv: 1 }],
    ['one head', { heads: 1, groups: 1, dk: 1, dv: 5 }],
  ])('takes %s', (_, heads) => {
    const layout = nsaLayout([9], heads, SPARSE);
    const { out } = nsaForward(nsaInputs(layout, 5), layout);
    expect(out.every(Number.isFinite)).toBe(true);
  });

  it('takes an empty batch', () => {
    const layout = nsaLayout([], HEADS, SPARSE);
    const inputs = nsaInputs(layout, 6);
    const outputs = nsaForward(inputs, layout);
    expect(outputs.out.length).toBe(0);
    expect(nsaBackward(inputs, layout, outputs, outputs.out).dq.length).toBe(0);
  });
});
