import { beforeEach, describe, expect, it } from 'vitest';
import { cudaAbsence } from '../../../device/cuda/cuda.js';
import type { Device } from '../../../device/device.js';
import { Tape } from '../../../tensor/tape.js';
import { type AttentionCase, randomInputs, starts } from '../../../testing/attention.js';
import { cpu, cuda, tolerance } from '../../../testing/devices.js';
import { relativeError } from '../../../testing/numbers.js';
import { Sequences } from '../../common/sequences.js';
import { denseBackward, denseForward } from '../dense/reference.js';
import { denseRefusal, fusedDenseAttention } from './dense.js';

const SPARSE = { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 };
const example = (heads: number, groups: number, dk: number, dv: number, lengths: number[]): AttentionCase => ({
  name: `${heads} heads in ${groups} groups, ${dk} and ${dv}`,
  lengths,
  sparse: SPARSE,
  heads: { heads, groups, dk, dv },
});
const CASES = [
  example(12, 2, 64, 64, [0, 700, 33, 0, 5, 1]),
  example(16, 1, 16, 16, [129]),
  example(3, 3, 32, 48, [64, 65, 1]),
  example(10, 2, 128, 128, [300]),
  example(4, 2, 192, 128, [257, 2]),
  example(2, 1, 64, 64, []),
];

describe('refusals of fused dense attention', () => {
  const gpu = (architecture: number) => ({ kind: 'cuda', architecture, compile() {} }) as unknown as Device;
  const problem = { heads: CASES[0].heads, dtype: 'bf16' as const, tokens: { total: 2048, longest: 1024 } };

  it('are none for bf16 on CUDA', () => {
    for (const { heads } of CASES) expect(denseRefusal({ ...problem, heads }, gpu(90))).toBeNull();
    expect(denseRefusal(problem, gpu(80), { fusedFrom: 1024 })).toBeNull();
  });

  it('name the device, the precision, the heads and the switch', () => {
    expect(denseRefusal(problem, cpu())).toBe('the fused kernels run on CUDA, not on cpu');
    expect(denseRefusal({ ...problem, dtype: 'f32' }, gpu(90))).toBe('the fused kernels take bf16, not f32');
    expect(denseRefusal({ ...problem, heads: { ...problem.heads, dv: 20 } }, gpu(90))).toContain('d_v 20');
    expect(denseRefusal(problem, gpu(90), { fusedFrom: 1025 })).toContain('switched off at this length');
    expect(denseRefusal(problem, gpu(89))).toContain('bytes of shared memory');
    const huge = { total: 2 ** 28, longest: 2 ** 20 };
    expect(denseRefusal({ ...problem, tokens: huge }, gpu(90))).toContain('counted in 32 bits');
  });
});

const absence = cudaAbsence();

describe('fused dense attention', () => {
  beforeEach((context) => {
    if (absence !== null) context.skip(absence);
  });

  const run = (dense: AttentionCase, uses = 1) => {
    const device = cuda();
    const before = device.pool.bytesInUse;
    const { q, kSel: k, vSel: v, dOut } = randomInputs(dense, 1, 'bf16');
    const tape = new Tape(device);
    const [tq, tk, tv] = [q, k, v].map(({ values, shape }) => tape.watch(tape.from(values, shape, 'bf16')));
    const sequences = new Sequences(device, dense.lengths);
    const outputs = Array.from({ length: uses }, () => fusedDenseAttention(tape, { q: tq, k: tk, v: tv }, sequences));
    const out = outputs[0].read();
    tape.backward(
      outputs,
      outputs.map(() => dOut.values),
    );
    const gradients = [tq, tk, tv].map((tensor) => tape.gradient(tensor)!.read());
    tape.end();
    sequences.free();
    expect(device.pool.bytesInUse).toBe(before);
    return { out, gradients };
  };

  it.each(CASES)('equals the reference: $name', (dense) => {
    const inputs = randomInputs(dense, 1, 'bf16');
    const [q, k, v, dOut] = [inputs.q, inputs.kSel, inputs.vSel, inputs.dOut].map(({ values }) => values);
    const offsets = starts(dense.lengths);
    const { out, gradients } = run(dense);
    expect(relativeError(out, denseForward(q, k, v, offsets, dense.heads).out)).toBeLessThan(tolerance('bf16'));
    const expected = denseBackward(q, k, v, offsets, dense.heads, dOut);
    [expected.dq, expected.dk, expected.dv].forEach((gradient, i) => {
      expect(relativeError(gradients[i], gradient), ['dq', 'dk', 'dv'][i]).toBeLessThan(tolerance('bf16'));
    });
  });

  it('repeats bit for bit, and adds to existing gradients', () => {
    const [once, again, twice] = [run(CASES[0]), run(CASES[0]), run(CASES[0], 2)];
    expect(relativeError(again.out, once.out)).toBe(0);
    once.gradients.forEach((gradient, i) => {
      expect(relativeError(again.gradients[i], gradient)).toBe(0);
      expect(
        relativeError(
          twice.gradients[i],
          gradient.map((value) => 2 * value),
        ),
      ).toBe(0);
    });
  });
});
