/** The kernels of a decode step against float64, on a GPU and on an emulated one. */
import { describe, expect, it } from 'vitest';
import { cudaAbsence } from '../../../../device/cuda/cuda.js';
import type { CudaRuntime } from '../../../../device/cuda/runtime.js';
import type { Device } from '../../../../device/device.js';
import { Tape } from '../../../../tensor/tape.js';
import { Tensor } from '../../../../tensor/tensor.js';
import { addressTable } from '../../../../testing/attention.js';
import { cuda, rounded, tolerance } from '../../../../testing/devices.js';
import { EmulatedCuda } from '../../../../testing/emulated-cuda.js';
import { randomValues, relativeError } from '../../../../testing/numbers.js';
import { RecordingCuda } from '../../../../testing/recording-cuda.js';
import { siluForward, swigluForward } from '../../../activation/reference.js';
import { compressedCount, Sequences } from '../../../common/sequences.js';
import { linearForward } from '../../../linear/reference.js';
import { rmsnormForward } from '../../../rmsnorm/reference.js';
import { type RotaryScaling, rotaryAngles } from '../../../rope/frequencies.js';
import { RotaryTable } from '../../../rope/op.js';
import { gateForward } from '../../gate/reference.js';
import { isSelection } from '../../select/reference.js';
import type { HeadShape, SparseShape } from '../../shape.js';
import { pageNumbers, storePages } from '../paged/op.js';
import { type StepHistory, type StepProblem, stepForward, stepImportance } from './reference.js';
import { type StepShape, stepCluster, stepRefusal } from './shape.js';
import { StepKernels, stepContextLimit, stepSharedContext } from './step.js';

const absence = cudaAbsence();
type StepDevice = Device & CudaRuntime;
const emulated = new EmulatedCuda({ multiprocessors: 16 }); // eight for each of two groups
/** On the emulator every build of a kernel takes seconds: a few cases always, the others with TREFOIL_LONG=1. */
type Emulation = 'always' | 'long' | 'never';
/** On a GPU, and on the emulator. */
const onGpu = (name: string, body: (device: StepDevice) => void, emulation: Emulation = 'always') => {
  it(name, (context) => {
    if (absence) return context.skip(absence);
    body(cuda());
  });
  if (emulation === 'never') return;
  it(`${name}, emulated`, (context) => {
    if (emulation === 'long' && !process.env['TREFOIL_LONG']) return context.skip('takes a while: TREFOIL_LONG=1');
    body(emulated);
  });
};

const bf16 = (count: number, seed: number, spread = 1) =>
  rounded(
    randomValues(count, seed).map((x) => x * spread),
    'bf16',
  );
const PAPER: SparseShape = { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 };
const heads = (count: number, groups: number, dk: number, dv = dk): HeadShape => ({ heads: count, groups, dk, dv });
const SHAPE: StepShape = { heads: heads(12, 2, 64), sparse: PAPER, cmpRope: 'after' };

describe('linear layers of a step', () => {
  const plain = { also: 0, activation: 'none' as const, norm: false, residual: true };
  const normed = { also: 36, activation: 'none' as const, norm: true, residual: false };
  /** Columns shared out by a cluster, and more rows of the weight for a block. */
  const wide = [
    { batch: 19, rows: 300, inputs: 3072, tiles: 1, ...plain },
    { batch: 19, rows: 1540, inputs: 64, tiles: 1, ...normed },
  ];
  const cases = [1, 3, 16, 17, 32, 40, 130].flatMap((batch) => [
    { batch, rows: 200, inputs: 768, also: 36, tiles: 1, activation: 'none' as const, norm: true, residual: false },
    { batch, rows: 96, inputs: 3072, also: 0, tiles: 1, activation: 'none' as const, norm: false, residual: true },
    { batch, rows: 120, inputs: 64, also: 0, tiles: 2, activation: 'silu' as const, norm: true, residual: false },
    { batch, rows: 2 * 100, inputs: 96, also: 0, tiles: 2, activation: 'swiglu' as const, norm: true, residual: false },
    { batch, rows: 1003, inputs: 768, also: 0, tiles: 4, activation: 'none' as const, norm: true, residual: false },
    { batch, rows: 208, inputs: 64, also: 12, tiles: 2, activation: 'none' as const, norm: true, residual: true },
  ]);
  for (const { batch, rows, inputs, also, tiles, activation, norm, residual } of [...wide, ...cases])
    onGpu(
      `equal the reference: ${batch} x ${rows} x ${inputs} ${activation}`,
      (device) => {
        const tape = new Tape(device, { record: false });
        const [x, w] = [bf16(batch * inputs, 1), bf16(rows * inputs, 2)];
        const [w2, scale] = [bf16(also * inputs, 3), randomValues(inputs, 4)];
        const results = activation === 'swiglu' ? rows / 2 : rows;
        const added = bf16(batch * results, 5, 10);
        const normed = norm ? rmsnormForward(x, scale, 1e-6) : x;
        const plain = linearForward(normed, w, batch, rows, inputs);
        const active =
          activation === 'silu' ? siluForward(plain) : activation === 'swiglu' ? swigluForward(plain, rows / 2) : plain;
        const expected = active.map((value, i) => value + (residual ? added[i] : 0));
        const isLogits = tiles === 4;
        const y = tape.empty([batch, results], isLogits ? 'f32' : 'bf16');
        const second = tape.empty([batch, Math.max(1, also)]);
        new StepKernels(device, SHAPE, 768, batch, { context: 64 }).linear({
          x: tape.from(x, [batch, inputs], 'bf16'),
          weight: tape.from(w, [rows, inputs], 'bf16'),
          y,
          activation,
          tiles,
          ...(norm ? { norm: { weight: tape.from(scale, [inputs]), epsilon: 1e-6 } } : {}),
          ...(residual ? { residual: tape.from(added, [batch, results], 'bf16') } : {}),
          ...(also > 0 ? { also: { weight: tape.from(w2, [also, inputs], 'bf16'), y: second } } : {}),
        });
        expect(relativeError(y.read(), expected)).toBeLessThan(tolerance('bf16'));
        if (also > 0)
          expect(relativeError(second.read(), linearForward(normed, w2, batch, also, inputs))).toBeLessThan(
            tolerance('bf16'),
          );
        tape.end();
      },
      batch === 3 || batch === 19 || (batch >= 40 && inputs < 100)
        ? 'always'
        : batch === 17 || batch === 130
          ? 'long'
          : 'never',
    );
});

describe('bias and norms of heads', () => {
  for (const [name, sparse, hasBias, hasNorms] of [
    ['both, sparse', PAPER, true, true],
    ['a bias, dense', null, true, false],
    ['norms, dense', null, false, true],
  ] as const)
    onGpu(`equal the reference: ${name}`, (device) => {
      const [batch, epsilon] = [3, 1e-5];
      const heads = { heads: 6, groups: 2, dk: 64, dv: 40 };
      const [keys, values] = [
        { size: heads.dk, count: heads.groups, norm: 'key' },
        { size: heads.dv, count: heads.groups, norm: null },
      ] as const;
      const branches = Array.from({ length: sparse ? 3 : 1 }, () => [keys, values]).flat();
      const parts = [{ size: heads.dk, count: heads.heads, norm: 'query' } as const, ...branches];
      const rows = parts.flatMap(({ size, count, norm }) => Array.from({ length: count }, () => ({ size, norm })));
      const width = rows.reduce((total, { size }) => total + size, 0);
      const tape = new Tape(device, { record: false });
      const kernels = new StepKernels(device, { heads, sparse, cmpRope: 'after' }, 96, batch, { context: 64 });
      const [x, bias] = [bf16(batch * width, 1, 2), randomValues(width, 2)];
      const norms = { query: randomValues(heads.dk, 3), key: randomValues(heads.dk, 4) };
      const projection = tape.from(x, [batch, width], 'bf16');
      const put = (numbers: Float64Array) => tape.from(numbers, [numbers.length]);
      const weights = { query: put(norms.query), key: put(norms.key), epsilon };
      kernels.heads(projection, hasBias ? put(bias) : null, hasNorms ? weights : null);
      const biased = x.map((value, i) => value + (hasBias ? bias[i % width] : 0));
      let at = 0;
      const expected = Array.from({ length: batch }, () => rows)
        .flat()
        .flatMap(({ size, norm }) => {
          const head = biased.slice(at, at + size);
          at += size;
          return Array.from(hasNorms && norm ? rmsnormForward(head, norms[norm], epsilon) : head);
        });
      expect(relativeError(projection.read(), expected)).toBeLessThan(4e-3);
      tape.end();
      kernels.free();
    });
});

describe('the ends of a step', () => {
  onGpu('embed, and choose the most probable token, the lower of equals', (device) => {
    const tape = new Tape(device, { record: false });
    const kernels = new StepKernels(device, SHAPE, 96, 3, { context: 64 });
    const logits = randomValues(3 * 5000, 7);
    for (const at of [4000, 4100, 4999]) logits[at] = 2;
    logits[5000 + 4900] = 3; // beyond the vocabulary
    logits[5000 + 17] = 1.5;
    logits[10_000 + 30] = Number.NaN;
    const [ids, positions, next] = [0, 1, 2].map(() => tape.from([5, 6, 7], [3], 'i32'));
    kernels.end(
      tape.from(new Float64Array(15_000).fill(Number.NEGATIVE_INFINITY), [3, 5000]),
      4500,
      ids,
      positions,
      next,
    );
    expect(Array.from(next.read())).toEqual([-1, -1, -1]);
    positions.write([5, 6, 7]);
    kernels.end(tape.from(logits, [3, 5000]), 4500, ids, positions, next);
    expect(Array.from(next.read())).toEqual([4000, 17, -1]);
    expect(Array.from(ids.read())).toEqual([4000, 17, -1]);
    expect(Array.from(positions.read())).toEqual([6, 7, 8]);
    const table = randomValues(20 * 96, 8);
    const x = tape.empty([3, 96], 'bf16');
    const buffers = {
      projection: x,
      positions,
      rotations: tape.empty([3, 2, 32, 2]),
    };
    ids.write([3, 19, 0]);
    const attentionFactor = 1.25;
    const scaling: RotaryScaling = {
      type: 'yarn',
      factor: 1,
      originalContext: 64,
      betaFast: 32,
      betaSlow: 1,
      attentionFactor,
    };
    const turns = new RotaryTable(device, { size: 64, theta: 10_000, scaling });
    tape.own(turns.frequencies);
    kernels.begin(tape.from(table, [20, 96]), ids, turns, x, buffers);
    const wanted = [3, 19, 0].flatMap((id) => Array.from(table.slice(id * 96, (id + 1) * 96)));
    expect(relativeError(x.read(), wanted)).toBeLessThan(4e-3);
    const turn = (position: number, j: number) => position * 10_000 ** ((-2 * j) / 64);
    const expected = [6, 7, 8].flatMap((position) =>
      [position, 0].flatMap((at) =>
        Array.from({ length: 32 }, (_, j) => [Math.cos(turn(at, j)), Math.sin(turn(at, j))])
          .flat()
          .map((value) => attentionFactor * value),
      ),
    );
    expect(relativeError(buffers.rotations.read(), expected)).toBeLessThan(1e-6);
    tape.end();
  });
});

interface Case {
  readonly name: string;
  readonly heads: HeadShape;
  readonly sparse: SparseShape;
  /** Tokens before the new one, of each sequence. */
  readonly positions: readonly number[];
  readonly cmpRope?: StepShape['cmpRope'];
  readonly rope?: 'window';
  readonly conv?: boolean;
  readonly gate?: 'softmax' | 'sigmoid' | 'fixed';
  /** Tokens that there is room for. */
  readonly context?: number;
  /** The compressed branch has launches of its own; by default where the context is long. */
  readonly spread?: boolean;
  readonly cluster?: number;
}

const SMALL: SparseShape = { l: 8, d: 4, lSel: 32, nSel: 5, w: 50 };
const CASES: readonly Case[] = [
  { name: 'the first token', heads: heads(12, 2, 64), sparse: PAPER, positions: [0] },
  {
    name: 'edges of the first blocks',
    heads: heads(4, 2, 32),
    sparse: SMALL,
    positions: [6, 7, 8, 11, 31, 32, 49, 50],
  },
  { name: 'the 125m shape', heads: heads(12, 2, 64), sparse: PAPER, positions: [3000, 1023, 1024, 2047, 31] },
  { name: 'one long sequence', heads: heads(12, 2, 64), sparse: PAPER, positions: [20_001] },
  {
    name: 'scores that do not fit into shared memory',
    heads: heads(12, 2, 64),
    sparse: PAPER,
    positions: [2500],
    context: 2 ** 20,
    spread: false,
  },
  {
    name: 'one long sequence, ranked by warps',
    heads: heads(12, 2, 64),
    sparse: PAPER,
    positions: [20_001],
    cluster: 1,
  },
  {
    name: 'ranked by warps, in clusters of two',
    heads: heads(12, 2, 64),
    sparse: PAPER,
    positions: [40_001, 3001],
    cluster: 2,
  },
  {
    name: 'compressed keys spread over the GPU',
    heads: heads(12, 2, 64),
    sparse: PAPER,
    positions: [20_001],
    spread: true,
  },
  {
    name: 'compressed keys spread, one that completes a block, in room for a million tokens',
    heads: heads(12, 2, 64),
    sparse: PAPER,
    positions: [4111],
    context: 2 ** 20,
  },
  {
    name: 'compressed keys spread, nothing to rank',
    heads: heads(12, 2, 64),
    sparse: PAPER,
    positions: [40],
    spread: true,
  },
  { name: 'one that completes a block', heads: heads(12, 2, 64), sparse: PAPER, positions: [4111] },
  {
    name: 'too many blocks for warps to rank',
    heads: heads(4, 2, 32),
    sparse: SMALL,
    positions: [40_001],
    cluster: 1,
  },
  {
    name: 'too many blocks to compare each with each, in clusters of four',
    heads: heads(4, 2, 32),
    sparse: SMALL,
    positions: [40_001],
    cluster: 4,
  },
  {
    name: 'compressed keys rotated before',
    heads: heads(4, 2, 32),
    sparse: SMALL,
    positions: [407, 408],
    cmpRope: 'before',
  },
  {
    name: 'compressed keys not rotated, conv',
    heads: heads(4, 2, 32),
    sparse: SMALL,
    positions: [407, 300],
    cmpRope: 'none',
    conv: true,
  },
  {
    name: 'positions in the window alone',
    heads: heads(12, 2, 64),
    sparse: { ...PAPER, l: 16, d: 8, nSel: 5, w: 100 },
    positions: [1007, 1500, 3],
    ...{ cmpRope: 'none', rope: 'window' },
  },
  {
    name: 'positions in the window alone, compressed keys spread',
    heads: heads(12, 1, 32),
    sparse: SMALL,
    positions: [1203, 900],
    ...{ cmpRope: 'none', rope: 'window', spread: true },
  },
  {
    name: '16 heads of 128',
    heads: heads(16, 1, 128),
    sparse: { ...PAPER, nSel: 6, w: 100 },
    positions: [1535, 700],
    gate: 'sigmoid',
  },
  {
    name: '9 heads, values of 24',
    heads: heads(9, 1, 32, 24),
    sparse: { ...SMALL, nSel: 3 },
    positions: [500],
    gate: 'fixed',
  },
  {
    name: 'no overlap, one head a group',
    heads: heads(3, 3, 64, 32),
    sparse: { l: 16, d: 16, lSel: 32, nSel: 8, w: 33 },
    positions: [1000, 15],
  },
  {
    name: 'many sequences',
    heads: heads(12, 2, 64),
    sparse: PAPER,
    positions: Array.from({ length: 33 }, (_, i) => 1200 + 37 * i),
  },
];

const ALWAYS_EMULATED = [
  'one long sequence',
  'one that completes a block',
  'scores that do not fit into shared memory',
  'one long sequence, ranked by warps',
  'compressed keys spread over the GPU',
  'compressed keys spread, one that completes a block, in room for a million tokens',
  'no overlap, one head a group',
  'ranked by warps, in clusters of two',
  'too many blocks for warps to rank',
  'positions in the window alone',
  'positions in the window alone, compressed keys spread',
];
function emulationOf({ name, positions }: Case): Emulation {
  if (ALWAYS_EMULATED.includes(name)) return 'always';
  return positions.length < 9 ? 'long' : 'never';
}

describe('attention of a step', () => {
  for (const example of CASES)
    onGpu(`equals the reference: ${example.name}`, (device) => check(device, example), emulationOf(example));

  it('has as many blocks for each sequence and group as run at once', () => {
    const plan = (batch: number, architecture = 90) =>
      stepCluster(SHAPE, batch, new RecordingCuda(() => 0, architecture));
    expect([1, 8, 9, 16, 17, 32, 33, 66, 67, 1000].map((batch) => plan(batch))).toEqual([8, 8, 4, 4, 2, 2, 2, 1, 1, 1]);
    expect(plan(1, 80)).toBe(1);
  });

  it('rejects a context that does not fit', () => {
    const device = new RecordingCuda(() => 40_000);
    expect(() => new StepKernels(device, SHAPE, 96, 8, { context: 2 ** 20 })).not.toThrow();
    expect(() => new StepKernels(device, SHAPE, 96, 1, { context: 2 ** 21 })).not.toThrow(); // each share ranks its own
    expect(() => new StepKernels(device, SHAPE, 96, 8, { context: 2 ** 21 })).toThrow(
      /2097152 tokens of context needs 302160 bytes of shared memory .* this GPU has [0-9]+$/,
    );
  });

  it('computes the longest context that fits', () => {
    const make = (device: RecordingCuda, context: number) => new StepKernels(device, SHAPE, 96, 8, { context });
    for (const [architecture, fixed] of [
      [90, 40_000],
      [90, 41_007],
      [86, 35_000],
    ]) {
      const device = new RecordingCuda(() => fixed, architecture);
      const most = stepContextLimit(device, SHAPE, 8);
      expect(most).toBeGreaterThan(400_000);
      expect(() => make(device, most)).not.toThrow();
      expect(() => make(device, most + 1)).toThrow('to rank blocks');
    }
    expect(stepContextLimit(new RecordingCuda(() => 120_000, 86), SHAPE, 1)).toBe(0);
    expect(stepContextLimit(new RecordingCuda(() => 120_000), SHAPE, 1)).toBe(Number.POSITIVE_INFINITY);
    expect(stepContextLimit(new RecordingCuda(() => 0), { ...SHAPE, sparse: null }, 1)).toBe(Number.POSITIVE_INFINITY);
  });

  it('computes the longest context whose scores stay in shared memory', () => {
    const device = new RecordingCuda(() => 40_000);
    const scoresIn = (batch: number, context: number) => {
      const kernels = new StepKernels(device, SHAPE, 96, batch, { context });
      const before = device.pool.bytesInUse;
      kernels.free();
      return before === device.pool.bytesInUse ? 'shared memory' : 'memory';
    };
    for (const batch of [8, 32, 256]) {
      const most = stepSharedContext(device, SHAPE, batch);
      expect(most).toBeGreaterThan(100_000);
      expect(scoresIn(batch, most)).toBe('shared memory');
      expect(scoresIn(batch, most + 512 * 8)).toBe('memory');
    }
    expect(stepSharedContext(new RecordingCuda(() => 232_000), SHAPE, 256)).toBe(0);
    expect(stepSharedContext(device, { ...SHAPE, sparse: null }, 256)).toBe(Number.POSITIVE_INFINITY);
  });

  it('rejects unsupported shapes with a reason', () => {
    expect(stepRefusal(SHAPE, [768, 3072])).toBeNull();
    expect(stepRefusal({ ...SHAPE, heads: heads(4, 2, 16) }, [])).toBe('d_k 16 is not a multiple of 32 up to 128');
    expect(stepRefusal({ ...SHAPE, heads: heads(4, 2, 32, 12) }, [])).toBe('d_v 12 is not a multiple of 8 up to 128');
    expect(stepRefusal({ ...SHAPE, heads: heads(34, 2, 32) }, [])).toBe('more than 16 heads a group');
    expect(stepRefusal(SHAPE, [768, 100])).toBe('a layer of 100 inputs: not a multiple of 32');
    expect(stepRefusal({ ...SHAPE, sparse: { ...PAPER, lSel: 48 } }, [])).toBe('l_sel 48 is not a multiple of 32');
    expect(stepRefusal({ ...SHAPE, sparse: { ...PAPER, nSel: 65 } }, [])).toBe('n_sel 65 is more than 64');
    expect(stepRefusal({ ...SHAPE, sparse: { ...PAPER, l: 64, d: 1 } }, [])).toBe('l 64 is more than 33 times d 1');
    expect(stepRefusal({ ...SHAPE, sparse: { ...PAPER, localBlocks: 1 } }, [])).toContain('local_blocks 2');
  });
});

function check(device: StepDevice, example: Case): void {
  const { heads, sparse, positions, cmpRope = 'after', conv = false, gate = 'softmax', spread, cluster } = example;
  const { rope: rotated = 'all' } = example;
  const context = example.context ?? Math.max(...positions) + 1;
  const tape = new Tape(device, { record: false });
  const batch = positions.length;
  const { groups, dk, dv } = heads;
  const width = heads.heads * dk + 3 * groups * (dk + dv);
  const rotary = { size: dk, theta: 10_000 };
  const rope = rotaryAngles(rotary);
  const weights = (size: number, seed: number) => randomValues(sparse.l * groups * size, seed);
  const phi = conv ? { keys: weights(dk, 90), values: weights(dv, 91) } : null;
  const windowRope = rotated === 'window';
  const problem: StepProblem = { heads, sparse, rope, cmpRope, windowRope, phi, round: (x) => rounded(x, 'bf16') };
  const projection = bf16(batch * width, 1, 2);
  const logits = randomValues(batch * 3 * heads.heads, 2);
  const bias = randomValues(3 * heads.heads, 3);
  const known = positions.map((position) => compressedCount(position, sparse.l, sparse.d));
  const rows = (count: number, size: number, seed: number) => bf16(count * groups * size, seed);
  const histories = positions.map((position, b): StepHistory => {
    const seed = 10 * b + 100;
    const raw = position - known[b] * sparse.d;
    return {
      kCmp: rows(known[b], dk, seed),
      vCmp: rows(known[b], dv, seed + 1),
      kSel: rows(position, dk, seed + 2),
      vSel: rows(position, dv, seed + 3),
      kWin: rows(position, dk, seed + 4),
      vWin: rows(position, dv, seed + 5),
      rawKeys: rows(raw, dk, seed + 6),
      rawValues: rows(raw, dv, seed + 7),
    };
  });
  // Pages between those of two other layers, with room for the new token.
  const others: Tensor[] = [];
  const table = (counts: readonly number[], size: number, numbers: number) => {
    const addresses = counts.map((count) => {
      const pages = Math.ceil((count + 1) / size);
      const memory = tape.zeros([pages, 3 * numbers], 'bf16');
      for (let i = 0; i < pages; i++) {
        const layers = memory.rows(i, i + 1).reshape([3, numbers]);
        others.push(layers.rows(0, 1), layers.rows(2, 3));
      }
      return addressTable(
        tape,
        Array.from({ length: pages }, (_, i) => memory.rows(i, i + 1).pointer),
      ).pointer;
    });
    return { tables: addressTable(tape, addresses), place: numbers, size };
  };
  const filled = (size: number, counts: readonly number[], k: keyof StepHistory, v: keyof StepHistory) => {
    const pages = table(counts, size, pageNumbers(heads, size, 1));
    const of = (name: keyof StepHistory, columns: number) =>
      tape.from(
        Float64Array.from(histories.flatMap((history) => Array.from(history[name]))),
        [counts.reduce((a, b) => a + b, 0), groups, columns],
        'bf16',
      );
    const sequences = new Sequences(device, counts);
    const begin = tape.from(
      counts.map(() => 0),
      [batch],
      'i32',
    );
    storePages(device, of(k, dk), of(v, dv), pages, { sequences, starts: begin });
    return pages;
  };
  const tail = table(
    positions.map(() => 0),
    sparse.l,
    sparse.l * groups * (dk + dv),
  );
  /** Raw rows that compressed blocks to come need: a step moves them on. */
  const fillTails = () => {
    histories.forEach(({ rawKeys, rawValues }, b) => {
      // keys [l][groups * dk], then values
      const first = Tensor.empty(device, [1], 'address');
      device.copy(first.pointer, tail.tables.read()[b], 8);
      const [page] = first.read();
      const at = page + BigInt(2 * tail.place);
      const put = (values: Float64Array, offset: number) => {
        if (values.length === 0) return;
        const tensor = tape.from(values, [values.length], 'bf16');
        device.copy(at + BigInt(2 * offset), tensor.pointer, 2 * values.length);
      };
      put(rawKeys, 0);
      put(rawValues, sparse.l * groups * dk);
      first.free();
    });
  };
  const pages = {
    cmp: filled(64, known, 'kCmp', 'vCmp'),
    sel: filled(sparse.lSel, positions, 'kSel', 'vSel'),
    win: filled(64, positions, 'kWin', 'vWin'),
    tail,
  };
  const shape: StepShape = { heads, sparse, cmpRope, rope: rotated };
  const options = { ...(spread === undefined ? {} : { spread }), ...(cluster === undefined ? {} : { cluster }) };
  const kernels = new StepKernels(device, shape, 96, batch, { context, ...options });
  const buffers = {
    projection: tape.from(projection, [batch, width], 'bf16'),
    positions: tape.from(positions, [batch], 'i32'),
    rotations: tape.empty([batch, 2, dk / 2, 2]),
  };
  const turns = new RotaryTable(device, rotary);
  tape.own(turns.frequencies);
  kernels.begin(tape.zeros([1, 96]), tape.zeros([batch], 'i32'), turns, tape.empty([batch, 96], 'bf16'), buffers);
  const device_phi = phi && {
    keys: tape.from(phi.keys, [sparse.l, groups, dk]),
    values: tape.from(phi.values, [sparse.l, groups, dv]),
  };
  const outputs = {
    out: tape.empty([batch, heads.heads, dv], 'bf16'),
    selected: tape.empty([batch, groups, sparse.nSel], 'i32'),
    reads: tape.empty([batch, groups, 3], 'i32'),
  };
  const fixed = [0.2, 0.5, 0.3] as const;
  const attend = (kind: 'softmax' | 'sigmoid' | 'fixed', mix: readonly [number, number, number]) => {
    const of = { logits: tape.from(logits, [batch, 3 * heads.heads]), bias: tape.from(bias, [3 * heads.heads]) };
    fillTails();
    kernels.attention(buffers, pages, device_phi, { kind, temperature: 1.5, weights: mix, ...of }, outputs);
    return outputs.out.read();
  };
  const branches = (
    [
      [1, 0, 0],
      [0, 1, 0],
      [0, 0, 1],
    ] as const
  ).map((mix) => attend('fixed', mix));
  const out = attend(gate, fixed);
  const [selected, reads] = [outputs.selected.read(), outputs.reads.read()];
  const isUntouched = others.every((layer) => layer.read().every((value) => value === 0));
  expect(isUntouched, 'the pages of other layers').toBe(true);
  const size = heads.heads * dv;
  positions.forEach((position, b) => {
    const row = projection.slice(b * width, (b + 1) * width);
    const picked = Array.from({ length: groups }, (_, g) =>
      Array.from(selected.slice((b * groups + g) * sparse.nSel, (b * groups + g + 1) * sparse.nSel)),
    );
    const score = stepImportance(problem, histories[b], row, position);
    picked.forEach((blocks, g) => {
      expect(isSelection(score[g], blocks, 1e-4), `sequence ${b}, group ${g}: ${blocks.join()}`).toBe(true);
    });
    const exact = stepForward(
      problem,
      histories[b],
      row,
      position,
      picked.map((blocks) => blocks.filter((j) => j >= 0)),
    );
    const limit = tolerance('bf16');
    [exact.oCmp, exact.oSel, exact.oWin].forEach((expected, branch) => {
      const got = branches[branch].slice(b * size, (b + 1) * size);
      const name = `sequence ${b} at ${position}, branch ${branch}`;
      if (expected.every((value) => value === 0))
        expect(
          got.every((value) => value === 0),
          name,
        ).toBe(true);
      else expect(relativeError(got, expected), name).toBeLessThan(limit);
    });
    const gates =
      gate === 'fixed'
        ? Float64Array.from({ length: 3 * heads.heads }, (_, i) => fixed[i % 3])
        : gateForward(
            Float64Array.from({ length: 3 * heads.heads }, (_, i) => logits[b * 3 * heads.heads + i] + bias[i]),
            { kind: gate, temperature: 1.5 },
          );
    const sum = Float64Array.from({ length: size }, (_, i) => {
      const head = Math.floor(i / dv);
      return (
        gates[3 * head] * exact.oCmp[i] + gates[3 * head + 1] * exact.oSel[i] + gates[3 * head + 2] * exact.oWin[i]
      );
    });
    expect(relativeError(out.slice(b * size, (b + 1) * size), sum), `sequence ${b}: sum`).toBeLessThan(limit);
    for (let g = 0; g < groups; g++) {
      const blocks = picked[g].filter((j) => j >= 0);
      const last = position + 1 - Math.floor(position / sparse.lSel) * sparse.lSel;
      expect(reads[(b * groups + g) * 3]).toBe(compressedCount(position + 1, sparse.l, sparse.d));
      expect(reads[(b * groups + g) * 3 + 1]).toBe((blocks.length - 1) * sparse.lSel + last);
      expect(reads[(b * groups + g) * 3 + 2]).toBe(Math.min(sparse.w, position + 1));
    }
  });
  kernels.free();
  tape.end();
}
