import { setImmediate } from 'node:timers/promises';
import { beforeEach, describe, expect, it } from 'vitest';
import { cudaAbsence } from '../../../device/cuda/cuda.js';
import type { Device } from '../../../device/device.js';
import { Tape } from '../../../tensor/tape.js';
import { Tensor } from '../../../tensor/tensor.js';
import { type AttentionCase, AWKWARD, randomInputs } from '../../../testing/attention.js';
import { cpu, cuda, tolerance } from '../../../testing/devices.js';
import { nsaLayout } from '../../../testing/nsa.js';
import { relativeError } from '../../../testing/numbers.js';
import { differentSelections } from '../../../testing/selection.js';
import { sampled } from '../../../verify/long.js';
import { compressedCount, Sequences } from '../../common/sequences.js';
import { AttentionCounters } from '../counters.js';
import { nativeSparseAttention, type SparseInputs, type SparseOptions } from '../nsa.js';
import { type NsaInputs, nsaBackward, nsaForward } from '../reference.js';
import { importance, selectBlocks } from '../select/reference.js';
import { FusedBatch } from './code.js';
import { fusedRefusal, fusedSparseAttentionFrom } from './op.js';
import { gatherShared, scorerShared, sharedBytes, sharedLimit, unionTokens } from './plan.js';
import { compareWhole } from './testing/compare.js';

const PAPER = { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 };
const heads = (count: number, groups: number, dk: number, dv = dk) => ({ heads: count, groups, dk, dv });

/** Every head size and grouping that has code of its own, long enough for more blocks than slots. */
const SHAPES: readonly AttentionCase[] = [
  { name: 'the 125m shape', lengths: [1100, 70], heads: heads(12, 2, 64), sparse: PAPER },
  {
    name: '5 heads of 128',
    lengths: [500, 1, 65],
    heads: heads(10, 2, 128),
    sparse: { l: 16, d: 8, lSel: 64, nSel: 5, w: 100 },
  },
  { name: '16 heads a group', lengths: [700], heads: heads(16, 1, 64), sparse: { ...PAPER, nSel: 8, w: 128 } },
  {
    name: 'heads of 32',
    lengths: [400, 31],
    heads: heads(12, 2, 32),
    sparse: { l: 16, d: 8, lSel: 32, nSel: 6, w: 48 },
  },
  { name: '16 heads of 128', lengths: [500, 40], heads: heads(16, 1, 128), sparse: { ...PAPER, nSel: 5 } },
  {
    name: '13 heads of 192',
    lengths: [400],
    heads: heads(13, 1, 192, 128),
    sparse: { ...PAPER, lSel: 48, nSel: 4, w: 100 },
  },
  { name: 'keys of 192, values of 128', lengths: [600], heads: heads(4, 2, 192, 128), sparse: { ...PAPER, nSel: 6 } },
  {
    name: 'blocks of 48',
    lengths: [400, 100],
    heads: heads(12, 2, 64),
    sparse: { ...PAPER, lSel: 48, nSel: 5, w: 200 },
  },
  {
    name: 'heads of 96, no overlap',
    lengths: [400],
    heads: heads(6, 1, 96),
    sparse: { ...PAPER, d: 32, nSel: 4, w: 65 },
  },
  { name: '64 slots, 48 and 80', lengths: [300], heads: heads(2, 2, 48, 80), sparse: { ...PAPER, nSel: 64, w: 100 } },
];
/** Ragged, with more blocks than slots, and empty sequences at the start, in the middle and at the end. */
const RAGGED: AttentionCase = {
  name: 'ragged',
  lengths: [0, 700, 33, 0, 5, 1, 130, 0],
  heads: heads(6, 1, 64),
  sparse: { ...PAPER, nSel: 6, w: 100 },
};

const problemOf = ({ heads, sparse, lengths }: AttentionCase) => ({
  heads,
  sparse,
  dtype: 'bf16' as const,
  tokens: { total: lengths.reduce((sum, length) => sum + length, 0), longest: Math.max(0, ...lengths) },
});

describe('refusals of the fused kernels', () => {
  const gpu = { kind: 'cuda', architecture: 90, compile() {} } as unknown as Device;
  const [example] = SHAPES;

  it('are none for what they are made for', () => {
    for (const shape of [...SHAPES, RAGGED]) expect(fusedRefusal(problemOf(shape), gpu), shape.name).toBeNull();
    expect(fusedRefusal(problemOf(example), gpu, { kernel: 'v1', fusedFrom: 1100 })).toBeNull();
  });

  it('name the device, the precision, the shape and the switches', () => {
    const problem = problemOf(example);
    expect(fusedRefusal(problem, cpu())).toBe('the fused kernels run on CUDA, not on cpu');
    expect(fusedRefusal({ ...problem, dtype: 'f32' }, gpu)).toBe('the fused kernels take bf16, not f32');
    expect(fusedRefusal({ ...problem, heads: heads(4, 2, 24) }, gpu)).toContain('d_k 24');
    const forced = { ...problem.sparse, initBlocks: 0 };
    expect(fusedRefusal({ ...problem, sparse: forced }, gpu)).toContain('init_blocks 1, local_blocks 2');
    expect(fusedRefusal(problem, gpu, { kernel: 'reference' })).toBe('the reference kernel was requested');
    expect(fusedRefusal(problem, gpu, { fusedFrom: 1101 })).toBe('the fused kernels run from 1101 tokens on');
    expect(fusedRefusal(problem, gpu, { fusedFrom: Number.POSITIVE_INFINITY })).toBe(
      'the fused kernels are switched off',
    );
  });
});

describe('blocks of a layout', () => {
  it('are made once and freed with it', () => {
    const before = cpu().pool.bytesInUse;
    const sequences = new Sequences(cpu(), [0, 1, 64, 65]);
    expect([...sequences.inBlocks(64).offsets.read()]).toEqual([0, 0, 1, 2, 4]);
    expect(sequences.inBlocks(64)).toBe(sequences.inBlocks(64));
    expect(sequences.inBlocks(16)).not.toBe(sequences.inBlocks(64));
    sequences.free();
    expect(cpu().pool.bytesInUse).toBe(before);
  });
});

const absence = cudaAbsence();

const NAMES = ['q', 'kCmp', 'vCmp', 'kSel', 'vSel', 'kWin', 'vWin', 'gates'] as const;
type Values = NsaInputs & { readonly dOut: Float64Array };

/** Random values as the kernels get them. */
function valuesOf(example: AttentionCase, seed: number): Values {
  const entries = Object.entries(randomInputs(example, seed, 'bf16')).map(([name, { values }]) => [name, values]);
  return Object.fromEntries(entries) as unknown as Values;
}

interface Result {
  readonly outputs: Readonly<Record<'out' | 'oCmp' | 'oSel' | 'oWin', Float32Array>>;
  readonly selected: Int32Array;
  /** In the order of NAMES. */
  readonly gradients: Float32Array[];
  readonly counts: ReturnType<AttentionCounters['read']>;
}

/** `uses`: how often the same inputs go through the core, so that gradients add up. */
function run(example: AttentionCase, values: Values, options: SparseOptions = {}, uses = 1): Result {
  const device = cuda();
  const before = device.pool.bytesInUse;
  const tape = new Tape(device);
  const like = randomInputs(example, 1, 'bf16');
  const inputs = Object.fromEntries(
    NAMES.map((name) => [name, tape.watch(tape.from(values[name], like[name].shape, like[name].dtype))]),
  ) as unknown as SparseInputs;
  const tokens = new Sequences(device, example.lengths);
  const counters = new AttentionCounters(device);
  const dOut = Tensor.from(device, values.dOut, like.dOut.shape, 'bf16');
  const all = Array.from({ length: uses }, () =>
    nativeSparseAttention(tape, inputs, tokens, example.sparse, { ...options, counters }),
  );
  const read = (tensor: Tensor) => tensor.read() as Float32Array;
  const { out, oCmp, oSel, oWin, selected } = all[0];
  const outputs = { out: read(out), oCmp: read(oCmp), oSel: read(oSel), oWin: read(oWin) };
  const chosen = selected.read() as Int32Array;
  tape.backward(
    all.map((outputs) => outputs.out),
    all.map(() => dOut),
  );
  const gradients = NAMES.map((name) => read(tape.gradient(inputs[name])!));
  const counts = counters.read();
  tape.end();
  for (const owned of [tokens, counters, dOut]) owned.free();
  expect(device.pool.bytesInUse).toBe(before); // every buffer went back
  return { outputs, selected: chosen, gradients, counts };
}

/** ‖a-b‖/‖b‖; where the true value is zero (one visible key) only rounding may remain, 1e-5 a value. */
function distance(actual: ArrayLike<number>, expected: Float64Array): number {
  const squares = expected.reduce((sum, value) => sum + value * value, 0);
  if (squares > 1e-12 * expected.length) return relativeError(actual, expected);
  const left = expected.reduce((sum, value, i) => sum + (actual[i] - value) ** 2, 0);
  return expected.length === 0 ? 0 : Math.sqrt(left / expected.length) * 1e3;
}

function sameBits(a: Float32Array | Int32Array, b: Float32Array | Int32Array): boolean {
  return Buffer.compare(new Uint8Array(a.buffer), new Uint8Array(b.buffer)) === 0;
}

/** Kernels are compiled, and float64 takes its time: between the parts the runner may speak. */
async function expectReference(example: AttentionCase, options: SparseOptions = {}, seed = 1): Promise<void> {
  const values = valuesOf(example, seed);
  const { heads, sparse } = example;
  const result = run(example, values, options);
  expect(result.counts.attention_portable, 'the fused kernels served').toBe(0);
  await setImmediate();
  const layout = nsaLayout(example.lengths, heads, sparse);
  const place = [layout.starts, layout.cmpStarts, heads, sparse] as const;
  const wanted = selectBlocks(values.q, values.kCmp, ...place);
  await setImmediate();
  const scores = importance(values.q, values.kCmp, ...place);
  expect(differentSelections(result.selected, wanted, example, scores)).toEqual([]);
  await setImmediate();
  const expected = nsaForward(values, layout, result.selected);
  const limit = tolerance('bf16');
  for (const name of ['out', 'oCmp', 'oSel', 'oWin'] as const)
    expect(distance(result.outputs[name], expected[name]), name).toBeLessThan(limit);
  await setImmediate();
  const g = nsaBackward(values, layout, expected, values.dOut);
  const gradients = [g.dq, g.dkCmp, g.dvCmp, g.dkSel, g.dvSel, g.dkWin, g.dvWin, g.dGates];
  NAMES.forEach((name, i) => {
    expect(distance(result.gradients[i], gradients[i]), `gradient of ${name}`).toBeLessThan(limit);
  });
}

describe('the fused kernels', () => {
  beforeEach((context) => {
    if (absence !== null) context.skip(absence);
  });

  it.each(SHAPES)('equal the reference: $name', async (example) => {
    await expectReference(example);
  });

  const takes = (example: AttentionCase) => {
    const gpu = { kind: 'cuda', architecture: 90, compile() {} } as unknown as Device;
    return fusedRefusal(problemOf(example), gpu) === null;
  };
  it.each(AWKWARD.filter(takes))('equal the reference, awkward: $name', async (example) => {
    await expectReference(example);
  });

  const VARIANTS: readonly [string, SparseOptions][] = [
    ['v2', { kernel: 'v2' }],
    ['v1', { kernel: 'v1' }],
    ['union', { path: 'union' }],
    ['outer', { path: 'outer' }],
    ['gather', { path: 'gather' }],
    ['apart', { joint: false }],
    ['deterministic', { deterministic: true }],
    ['deterministic outer', { deterministic: true, path: 'outer' }],
    ['mma.sync', { mmaSync: true }],
    ['mma.sync outer', { mmaSync: true, path: 'outer' }],
  ];
  it.each(VARIANTS)('equal the reference, ragged batch: %s', async (_, options) => {
    await expectReference(RAGGED, options, 2);
  });

  /** Blocks of the joint kernel hold 192 compressed keys and walk 1,024 tokens. */
  const JOINT: readonly AttentionCase[] = [
    SHAPES[0],
    { name: 'several blocks', lengths: [4300, 33, 3100], heads: heads(12, 2, 64), sparse: PAPER },
    { name: '16 heads a group', lengths: [1500], heads: heads(16, 1, 64), sparse: { ...PAPER, nSel: 8, w: 128 } },
    { name: 'one head a group', lengths: [700, 1100], heads: heads(2, 2, 64), sparse: { ...PAPER, l: 16, d: 8 } },
  ];
  it.each(JOINT)('equal the reference, compressed and window gradients by one kernel: $name', async (example) => {
    await expectReference(example);
  });

  const APART: readonly [string, SparseOptions][] = [
    ['adaptive', {}],
    ['outer', { path: 'outer' }],
    ['gather', { path: 'gather' }],
    ['deterministic', { deterministic: true }],
    ['mma.sync', { mmaSync: true }],
  ];
  it.each(APART)('equal the reference, window queries apart and scorer loss: %s', async (_, options) => {
    for (const example of [SHAPES[0], RAGGED]) {
      const { errors } = compareWhole(cuda(), example, options);
      for (const [name, error] of Object.entries(errors))
        expect(error, name).toBeLessThan(name === 'loss' ? 1e-3 : tolerance('bf16'));
      await setImmediate();
    }
  });

  it.each([1, 63, 64, 65, 150, 500, 699])('give the tokens from %i on the bits of the whole sequence', (start) => {
    const example = { ...RAGGED, lengths: [700] };
    const values = valuesOf(example, 3);
    const { outputs, selected } = run(example, values, { path: 'union' });
    const device = cuda();
    const before = device.pool.bytesInUse;
    const tape = new Tape(device, { record: false });
    const like = randomInputs(example, 1, 'bf16');
    const inputs = Object.fromEntries(
      NAMES.map((name) => [name, tape.from(values[name], like[name].shape, like[name].dtype)]),
    ) as unknown as SparseInputs;
    inputs.q.rows(0, start).zero();
    inputs.gates.rows(0, start).zero();
    const tokens = new Sequences(device, example.lengths);
    const result = fusedSparseAttentionFrom(tape, inputs, tokens, example.sparse, start);
    const expectRows = (actual: Tensor, all: Float32Array | Int32Array) => {
      const width = all.length / 700;
      expect(sameBits(actual.rows(start, 700).read() as Float32Array, all.slice(start * width))).toBe(true);
    };
    expectRows(result.selected, selected);
    for (const name of ['oCmp', 'oWin', 'oSel', 'out'] as const) expectRows(result[name], outputs[name]);
    tape.end();
    tokens.free();
    expect(device.pool.bytesInUse).toBe(before);
  });

  it('count which path ran', () => {
    const values = valuesOf(RAGGED, 2);
    const served = (options: SparseOptions) => run(RAGGED, values, options).counts;
    const counted = (union: number, outer: number, gather: number) =>
      expect.objectContaining({ attention_union: union, attention_outer: outer, attention_gather: gather });
    expect(served({ path: 'union' })).toEqual(counted(1, 0, 0));
    expect(served({ path: 'outer' })).toEqual(counted(0, 1, 0));
    expect(served({ path: 'gather' })).toEqual(counted(0, 0, 1));
    const { attention_union, attention_outer, attention_gather } = served({});
    expect(attention_union + attention_outer + attention_gather).toBe(1);
    expect(served({ fusedFrom: Number.POSITIVE_INFINITY })).toMatchObject({
      attention_union: 0,
      attention_outer: 0,
      attention_portable: 1,
    });
  });

  it('add to existing gradients', () => {
    const values = valuesOf(RAGGED, 3);
    const options = { deterministic: true };
    const [once, twice] = [run(RAGGED, values, options), run(RAGGED, values, options, 2)];
    once.gradients.forEach((gradient, i) => {
      expect(
        relativeError(
          twice.gradients[i],
          gradient.map((value) => 2 * value),
        ),
        NAMES[i],
      ).toBe(0);
    });
  });

  const LONG: AttentionCase = { name: 'long', lengths: [5000, 77], heads: heads(12, 2, 64), sparse: PAPER };
  it.each(['union', 'outer', 'gather', 'adaptive'] as const)(
    'give the same bits every time in deterministic mode: %s',
    (path) => {
      const values = valuesOf(LONG, 4);
      const [first, ...others] = [1, 2, 3].map(() => run(LONG, values, { deterministic: true, path }));
      for (const other of others) {
        for (const name of ['out', 'oCmp', 'oSel', 'oWin'] as const)
          expect(sameBits(other.outputs[name], first.outputs[name]), name).toBe(true);
        expect(sameBits(other.selected, first.selected), 'selected').toBe(true);
        NAMES.forEach((name, i) => {
          expect(sameBits(other.gradients[i], first.gradients[i]), `gradient of ${name}`).toBe(true);
        });
      }
    },
  );

  // Not `adaptive`: its choice of path looks at the whole batch, and two paths round differently.
  const PATHS = [{ path: 'union' }, { path: 'outer' }, { path: 'gather' }, { kernel: 'v1' }] as const;
  it.each(PATHS)('cannot see the future: %o', (options) => {
    const example = { ...RAGGED, lengths: [400] };
    const { dk, dv, groups } = example.heads;
    const values = valuesOf(example, 5);
    const before = run(example, values, options);
    for (const t of [0, 63, 64, 200, 383]) {
      const others = valuesOf(example, 6);
      const finished = compressedCount(t + 1, example.sparse.l, example.sparse.d);
      // Much larger scores: later rows of a tile then move their softmax reference when earlier ones do not.
      const factor = (name: string) => (name === 'q' || name.startsWith('k') ? 16 : 1);
      const after = (name: (typeof NAMES)[number], rows: number, size: number) =>
        values[name].map((value, i) => (i < rows * size ? value : factor(name) * others[name][i]));
      const changed: Values = {
        gates: after('gates', t + 1, example.heads.heads * 3),
        q: after('q', t + 1, example.heads.heads * dk),
        kCmp: after('kCmp', finished, groups * dk),
        vCmp: after('vCmp', finished, groups * dv),
        kSel: after('kSel', t + 1, groups * dk),
        vSel: after('vSel', t + 1, groups * dv),
        kWin: after('kWin', t + 1, groups * dk),
        vWin: after('vWin', t + 1, groups * dv),
        dOut: values.dOut,
      };
      const now = run(example, changed, options);
      const row = example.heads.heads * dv;
      for (const name of ['out', 'oCmp', 'oSel', 'oWin'] as const)
        expect(
          sameBits(now.outputs[name].slice(0, (t + 1) * row), before.outputs[name].slice(0, (t + 1) * row)),
          `${name} up to ${t}`,
        ).toBe(true);
    }
  });

  it.each(['union', 'outer', 'gather'] as const)('equal the reference at sampled rows of 65,536 tokens: %s', (path) => {
    const example = { name: 'long', length: 65_536, heads: heads(12, 2, 64), sparse: PAPER };
    const finding = sampled(cuda(), example, 'bf16', { path });
    expect('error' in finding && finding.error, JSON.stringify(finding)).toBeLessThan(tolerance('bf16'));
  });

  it.each([...SHAPES, RAGGED])('need the shared memory that the plan computes: $name', (example) => {
    for (const queryMajor of [false, true]) {
      const build = { queryMajor, mmaSync: false, scored: true };
      const tokens = new Sequences(cuda(), example.lengths);
      const batch = new FusedBatch(cuda(), example, build, tokens);
      const union = unionTokens(example, build, sharedLimit(cuda().architecture));
      for (const [name, bytes] of Object.entries(sharedBytes(example, build, union))) {
        const source = name.split('_')[0] as 'compressed' | 'select' | 'selected' | 'window';
        expect(batch.constant(source, name), name).toBe(bytes);
      }
      if (batch.limits.gather > 0)
        expect(batch.constant('selected', 'selected_gather_shared')).toBe(gatherShared(example));
      for (const [name, bytes] of Object.entries(scorerShared(example)))
        expect(batch.constant('scorer', name), name).toBe(bytes);
      tokens.free();
    }
  });
});
