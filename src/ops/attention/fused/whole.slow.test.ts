/** The fused core as a whole on the thread emulator, forward and backward, against float64. */
import { setImmediate } from 'node:timers/promises';
import { afterEach, describe, expect, it } from 'vitest';
import { Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import { type AttentionCase, randomInputs, upload } from '../../../testing/attention.js';
import { EmulatedCuda } from '../../../testing/emulated-cuda.js';
import { Sequences } from '../../common/sequences.js';
import type { SparseInputs, SparseOptions } from '../nsa.js';
import { fusedSparseAttention, fusedSparseAttentionFrom } from './op.js';
import { fusedMacros, scorerShared } from './plan.js';
import { compareWhole } from './testing/compare.js';

const CASE: AttentionCase = {
  name: '',
  // A multiple of 8, the tokens that KV-outer merges at a time: the emulator takes whole warps.
  lengths: [280, 1, 23],
  heads: { heads: 6, groups: 2, dk: 64, dv: 64 },
  sparse: { l: 16, d: 8, lSel: 32, nSel: 6, w: 40 },
};
/** A shape of the kernels that are for Hopper alone. */
const HOPPER: AttentionCase = { ...CASE, lengths: [390, 1, 9], sparse: { l: 32, d: 16, lSel: 64, nSel: 5, w: 100 } };

interface Variant {
  readonly name: string;
  readonly example: AttentionCase;
  readonly architecture?: number;
  readonly options?: SparseOptions & { readonly plain?: boolean };
}
const heads = (heads: number, groups: number, dk: number, dv = dk) => ({ heads, groups, dk, dv });
const VARIANTS: readonly Variant[] = [
  { name: 'without them', example: CASE, options: { plain: true } },
  { name: 'tile-union', example: CASE },
  { name: 'KV-outer', example: CASE, options: { path: 'outer' } },
  { name: 'sums in a fixed order', example: CASE, options: { deterministic: true } },
  { name: 'tile-gather, joint gradients', example: HOPPER, architecture: 90, options: { path: 'gather' } },
  {
    name: 'two tiles of compressed keys, 5 heads a group, two panels of columns',
    example: {
      ...{ name: '', lengths: [140], heads: heads(5, 1, 80, 16) },
      sparse: { l: 8, d: 1, lSel: 16, nSel: 5, w: 20 },
    },
  },
  {
    name: 'no overlap, more slots than lanes, lists of several work items',
    example: {
      ...{ name: '', lengths: [700], heads: heads(1, 1, 16) },
      sparse: { l: 8, d: 8, lSel: 16, nSel: 37, w: 20 },
    },
  },
  {
    name: 'blocks of 40, 16 heads a group',
    example: {
      ...{ name: '', lengths: [250], heads: heads(16, 1, 16) },
      sparse: { l: 16, d: 8, lSel: 40, nSel: 5, w: 20 },
    },
    architecture: 90,
  },
  { name: 'nothing is chosen by score', example: { ...CASE, lengths: [100, 0, 7] } },
];

// The emulator blocks the thread, and the test runner wants to hear of it.
afterEach(() => setImmediate());

describe('the fused core on the emulator, with queries of the window branch apart and the scorer loss', () => {
  it.each(VARIANTS)('equals the reference: $name', ({ example, architecture = 80, options }) => {
    const cuda = new EmulatedCuda({ architecture });
    const { errors, size, pairs } = compareWhole(cuda, example, { path: 'union', ...options });
    if (pairs > 0 && !options?.plain) expect(size).toBeGreaterThan(0.1);
    for (const [name, error] of Object.entries(errors)) expect(error, name).toBeLessThan(name === 'loss' ? 1e-4 : 6e-3);
  });

  it('gives the same gradients where a block of the model is run again', () => {
    const example = { ...CASE, lengths: [230] };
    const cuda = new EmulatedCuda({ architecture: 80 });
    using tokens = new Sequences(cuda, example.lengths);
    const { dOut, ...given } = { ...randomInputs(example, 1, 'bf16'), qWin: randomInputs(example, 2, 'bf16').q };
    const gradients = (isCheckpointed: boolean) => {
      using tape = new Tape(cuda);
      const tensors = Object.entries(given).map(
        ([name, value]) => [name, tape.watch(tape.own(upload(cuda, value)))] as const,
      );
      const inputs = Object.fromEntries(tensors) as unknown as SparseInputs;
      const attend = (inner: Tape) => {
        const options = { path: 'union', deterministic: true, scorerWeight: 1000 } as const;
        const { out, ...rest } = fusedSparseAttention(inner, inputs, tokens, example.sparse, options);
        for (const tensor of Object.values(rest)) inner.drop(tensor);
        return out;
      };
      const all = tensors.map(([, tensor]) => tensor);
      const out = isCheckpointed ? tape.checkpoint(all, attend) : attend(tape);
      using gradient = upload(cuda, dOut);
      tape.backward([out], [gradient]);
      return all.map((tensor) => tape.gradient(tensor)!.read());
    };
    expect(gradients(true)).toEqual(gradients(false));
  });

  it.each([1, 200])('gives the tokens from %i on the bits of the whole sequence', (start) => {
    const example = { ...CASE, lengths: [300] };
    const cuda = new EmulatedCuda({ architecture: 80 });
    using tape = new Tape(cuda, { record: false });
    using tokens = new Sequences(cuda, example.lengths);
    const { dOut: _, ...given } = { ...randomInputs(example, 1, 'bf16'), qWin: randomInputs(example, 2, 'bf16').q };
    const inputs = Object.fromEntries(
      Object.entries(given).map(([name, value]) => [name, tape.own(upload(cuda, value))]),
    ) as unknown as SparseInputs & { readonly qWin: Tensor };
    const whole = fusedSparseAttention(tape, inputs, tokens, example.sparse, { path: 'union' }).out.read();
    for (const tensor of [inputs.q, inputs.qWin, inputs.gates]) tensor.rows(0, start).zero();
    const { out } = fusedSparseAttentionFrom(tape, inputs, tokens, example.sparse, start);
    const from = start * out.shape[1] * out.shape[2];
    expect(out.read().slice(from)).toEqual(whole.slice(from));
  });

  it.each([CASE, HOPPER, VARIANTS[5].example])('needs the shared memory that the plan computes: %#', (example) => {
    const macros = fusedMacros(example, { queryMajor: false, mmaSync: false }, 1);
    const code = new EmulatedCuda().compile(new URL('./scorer.cu', import.meta.url), macros);
    for (const [name, bytes] of Object.entries(scorerShared(example))) expect(code.constant(name), name).toBe(bytes);
  });
});
