/** joint_gradients on the thread emulator, by mma.sync, against float64. */
import { describe, expect, it } from 'vitest';
import { Tape } from '../../../tensor/tape.js';
import { type AttentionCase, randomInputs, starts, upload } from '../../../testing/attention.js';
import { EmulatedCuda } from '../../../testing/emulated-cuda.js';
import { relativeError } from '../../../testing/numbers.js';
import { Sequences } from '../../common/sequences.js';
import { compressedBackward, compressedForward } from '../compressed/reference.js';
import { windowBackward, windowForward } from '../window/reference.js';
import { fusedMacros } from './plan.js';

const cuda = new EmulatedCuda();
const KEYS = 192;
const CHUNK = 128;

/** Many compressed keys with few tokens: more than a block has, chunks of tokens, tiles that are not full. */
const CASES: readonly AttentionCase[] = [
  {
    name: 'three heads a group, several sequences',
    lengths: [430, 1, 33, 70],
    heads: { heads: 6, groups: 2, dk: 64, dv: 64 },
    sparse: { l: 4, d: 2, lSel: 64, nSel: 4, w: 150 },
  },
  {
    name: 'one head, a window longer than the sequence',
    lengths: [260],
    heads: { heads: 1, groups: 1, dk: 64, dv: 64 },
    sparse: { l: 8, d: 4, lSel: 64, nSel: 4, w: 2 ** 30 },
  },
];

/** Where column `column` of row `row` of a tile of sums lies (query-sums.cuh). */
function querySum(row: number, column: number): number {
  const thread = Math.floor(row / 16) * 32 + (row % 8) * 4 + Math.floor((column % 8) / 2);
  const part = Math.floor(column / 16) * 2 + (Math.floor(row / 8) % 2);
  return (part * 128 + thread) * 4 + (Math.floor(column / 8) % 2) * 2 + (column % 2);
}

describe.each(CASES)('gradients of the compressed and the window branch by one kernel: $name', (example) => {
  it('equal the reference', () => {
    const { heads: shape, sparse, lengths } = example;
    const { heads, groups } = shape;
    const perGroup = heads / groups;
    const inputs = randomInputs(example, 1, 'bf16');
    const tape = new Tape(cuda, { record: false });
    const tokens = new Sequences(cuda, lengths);
    const compressed = tokens.compressed(sparse.l, sparse.d);
    const blocks = tokens.inBlocks(64);
    const begins = starts(lengths);
    const place = [begins, starts(compressed.lengths), shape, sparse] as const;
    const [q, kCmp, vCmp, kWin, vWin, dOut] = (['q', 'kCmp', 'vCmp', 'kWin', 'vWin', 'dOut'] as const).map(
      (name) => inputs[name].values,
    );
    const branches = [
      {
        ...compressedForward(q, kCmp, vCmp, ...place),
        ...compressedBackward(q, kCmp, vCmp, ...place, dOut),
      },
      {
        ...windowForward(q, kWin, vWin, begins, shape, sparse.w),
        ...windowBackward(q, kWin, vWin, begins, shape, sparse.w, dOut),
      },
    ];
    const rows = tokens.total * heads;
    const shift = new Float64Array(3 * rows).fill(Number.NaN);
    const delta = new Float64Array(3 * rows).fill(Number.NaN);
    branches.forEach(({ out, lse }, i) => {
      for (let row = 0; row < rows; row++) {
        shift[2 * i * rows + row] =
          lse[row] === Number.NEGATIVE_INFINITY ? Number.POSITIVE_INFINITY : lse[row] * Math.LOG2E;
        let sum = 0;
        for (let c = 0; c < 64; c++) sum += out[row * 64 + c] * dOut[row * 64 + c];
        delta[2 * i * rows + row] = sum;
      }
    });
    const code = cuda.compile(new URL('./joint.cu', import.meta.url), {
      ...fusedMacros({ heads: shape, sparse }, { queryMajor: false, mmaSync: true }, 1),
      EMULATED: 1,
      JOINT_CHUNK: CHUNK,
    });
    const count = (all: readonly number[]) => all.reduce((sum, keys) => sum + Math.ceil(keys / KEYS), 0);
    const tiles = count(compressed.lengths);
    const chunks = Math.ceil(tokens.longest / CHUNK);
    const sums = tape.zeros([blocks.total * 64 * heads, 64]);
    const [dkCmp, dvCmp] = [tape.zeros([compressed.total * groups, 64]), tape.zeros([compressed.total * groups, 64])];
    const [dkWin, dvWin] = [0, 1].map(() => tape.zeros([tokens.total * groups, 64], 'bf16'));
    const given = (name: 'q' | 'dOut' | 'kCmp' | 'vCmp' | 'kWin' | 'vWin') => tape.own(upload(cuda, inputs[name]));
    code.launch(
      'joint_gradients',
      {
        grid: (tiles * chunks + count(lengths)) * groups,
        block: code.constant('joint_gradients_threads'),
        shared: code.constant('joint_gradients_shared'),
      },
      ...[given('q'), given('dOut'), tape.from(shift, [3, rows]), tape.from(delta, [3, rows])],
      ...[given('kCmp'), given('vCmp'), dkCmp, dvCmp, given('kWin'), given('vWin'), dkWin, dvWin, sums],
      ...[tokens.offsets, compressed.offsets, blocks.offsets, lengths.length, tiles, chunks],
    );
    const found = sums.read();
    const dq = new Float64Array(q.length);
    lengths.forEach((length, s) => {
      const firstTile = blocks.offsets.read()[s] * perGroup;
      for (let t = 0; t < length; t++)
        for (let h = 0; h < heads; h++) {
          const row = t * perGroup + (h % perGroup);
          const tile = (firstTile + Math.floor(row / 64)) * groups + Math.floor(h / perGroup);
          for (let c = 0; c < 64; c++)
            dq[((begins[s] + t) * heads + h) * 64 + c] = found[tile * 4096 + querySum(row % 64, c)] / 8;
        }
    });
    const [cmp, win] = branches;
    const expected = cmp.dq.map((value, i) => value + win.dq[i]);
    for (const [name, actual, wanted] of [
      ['dq', dq, expected],
      ['dk_cmp', dkCmp.read(), cmp.dk],
      ['dv_cmp', dvCmp.read(), cmp.dv],
      ['dk_win', dkWin.read(), win.dk],
      ['dv_win', dvWin.read(), win.dv],
    ] as const)
      expect(relativeError(actual, wanted), name).toBeLessThan(8e-3);
    tape.end();
  });
});
