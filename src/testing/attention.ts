/** Attention cases for tests: shapes that bite, and tensors of random values on a device and in float64. */
import type { Device } from '../device/device.js';
import type { HeadShape, SparseShape } from '../ops/attention/shape.js';
import { compressedCount } from '../ops/common/sequences.js';
import type { Tape } from '../tensor/tape.js';
import { Tensor } from '../tensor/tensor.js';
import { type Precision, rounded } from './devices.js';
import { randomValues } from './numbers.js';

export interface AttentionCase {
  readonly name: string;
  readonly lengths: readonly number[];
  readonly heads: HeadShape;
  readonly sparse: SparseShape;
}

const SMALL: SparseShape = { l: 8, d: 4, lSel: 16, nSel: 4, w: 24 };
const heads = (count: number, groups: number, dk = 16, dv = dk): HeadShape => ({ heads: count, groups, dk, dv });

/** Every shape attention.md warns of, small enough for the float64 reference. */
export const AWKWARD: readonly AttentionCase[] = [
  { name: 'one token', lengths: [1], heads: heads(2, 1), sparse: SMALL },
  { name: 'shorter than l', lengths: [7], heads: heads(2, 2), sparse: SMALL },
  { name: 'exactly l', lengths: [8], heads: heads(2, 1), sparse: SMALL },
  { name: 'shorter than l_sel', lengths: [15], heads: heads(2, 1), sparse: SMALL },
  { name: 'no multiple of l_sel', lengths: [101], heads: heads(4, 2), sparse: SMALL },
  { name: 'S = w', lengths: [24], heads: heads(2, 1), sparse: SMALL },
  { name: 'S = w + 1', lengths: [25], heads: heads(2, 1), sparse: SMALL },
  { name: 'G = H', lengths: [70], heads: heads(3, 3), sparse: SMALL },
  { name: '5 heads a group', lengths: [90], heads: heads(5, 1, 8), sparse: SMALL },
  { name: '6 heads a group, two groups', lengths: [130], heads: heads(12, 2), sparse: SMALL },
  { name: '16 heads a group', lengths: [80], heads: heads(16, 1, 8), sparse: SMALL },
  { name: '32 heads a group, two groups', lengths: [70], heads: heads(64, 2, 8), sparse: SMALL },
  { name: 'dk != dv, neither a multiple of the vector', lengths: [77], heads: heads(4, 2, 10, 7), sparse: SMALL },
  { name: 'dk 24, dv 40', lengths: [66], heads: heads(2, 1, 24, 40), sparse: SMALL },
  { name: 'no overlap, d = l', lengths: [100], heads: heads(2, 1), sparse: { l: 8, d: 8, lSel: 8, nSel: 3, w: 5 } },
  { name: 'n_sel = 3: forced blocks only', lengths: [150], heads: heads(2, 1), sparse: { ...SMALL, nSel: 3 } },
  { name: 'window of one', lengths: [40], heads: heads(2, 1), sparse: { ...SMALL, w: 1 } },
  { name: 'blocks of 12', lengths: [131], heads: heads(2, 1), sparse: { l: 12, d: 4, lSel: 12, nSel: 5, w: 30 } },
  {
    name: 'blocks of the paper',
    lengths: [700],
    heads: heads(2, 1),
    sparse: { l: 32, d: 16, lSel: 64, nSel: 4, w: 128 },
  },
  { name: 'ragged', lengths: [3, 0, 64, 1, 129, 17], heads: heads(4, 2), sparse: SMALL },
  { name: 'empty batch', lengths: [], heads: heads(2, 1), sparse: SMALL },
  { name: 'only empty sequences', lengths: [0, 0], heads: heads(2, 1), sparse: SMALL },
  // Kernels work in tiles of 64 rows, keys and columns.
  { name: 'dk 256, dv 128', lengths: [90], heads: heads(2, 1, 256, 128), sparse: SMALL },
  { name: 'dk 130, dv 67', lengths: [70], heads: heads(3, 1, 130, 67), sparse: SMALL },
  {
    name: 'blocks longer than a tile',
    lengths: [620],
    heads: heads(3, 1, 8),
    sparse: { l: 40, d: 1, lSel: 100, nSel: 5, w: 65 },
  },
  {
    name: 'more slots than lanes of a warp',
    lengths: [400],
    heads: heads(2, 2, 8),
    sparse: { l: 4, d: 2, lSel: 4, nSel: 40, w: 64 },
  },
  {
    name: 'forced: the own block only',
    lengths: [150, 40],
    heads: heads(4, 2, 8),
    sparse: { ...SMALL, nSel: 3, initBlocks: 0, localBlocks: 1 },
  },
  {
    name: 'forced: three first and three last blocks',
    lengths: [230],
    heads: heads(2, 1, 8),
    sparse: { ...SMALL, nSel: 8, initBlocks: 3, localBlocks: 3 },
  },
  {
    name: 'forced: two first and three last blocks, scores by the largest',
    lengths: [230, 70],
    heads: heads(4, 2, 8),
    sparse: { ...SMALL, nSel: 8, initBlocks: 2, localBlocks: 3, scorePool: 'max' },
  },
  {
    name: 'forced: the own block only, by chunks of four',
    lengths: [230, 70],
    heads: heads(4, 2, 8),
    sparse: { ...SMALL, nSel: 4, initBlocks: 0, localBlocks: 1, selection: 'chunked' },
  },
  {
    name: 'forced: the own block only, by chunks of two, scores by the largest',
    lengths: [150],
    heads: heads(2, 1, 8),
    sparse: { ...SMALL, nSel: 2, initBlocks: 0, localBlocks: 1, selection: 'chunked', scorePool: 'max' },
  },
  {
    name: 'forced: nothing but the last two blocks, no other slot',
    lengths: [90],
    heads: heads(2, 1, 8),
    sparse: { ...SMALL, nSel: 2, initBlocks: 0, localBlocks: 2 },
  },
];

const total = (lengths: readonly number[]) => lengths.reduce((sum, length) => sum + length, 0);

/** Values of one attention input, in float64 and ready for a device. */
export interface Input {
  readonly values: Float64Array;
  readonly shape: readonly number[];
  readonly dtype: Precision;
}

export type InputName = 'q' | 'kCmp' | 'vCmp' | 'kSel' | 'vSel' | 'kWin' | 'vWin' | 'gates' | 'dOut';

/** `dtype`: what the tensors will be held in, so that the values are those a kernel sees. Gates are always f32. */
export function randomInputs(
  { lengths, heads: h, sparse }: AttentionCase,
  seed: number,
  dtype: Precision = 'f32',
): Record<InputName, Input> {
  const tokens = total(lengths);
  const blocks = total(lengths.map((length) => compressedCount(length, sparse.l, sparse.d)));
  let stream = seed * 100;
  // A spread of 2 makes peaked softmaxes: small scores would hide mistakes in the maximum and in the selection.
  const input = (shape: number[], spread = 2): Input => {
    stream += 1;
    const count = shape.reduce((product, size) => product * size, 1);
    return { values: randomValues(count, stream).map((value) => Math.fround(value * spread)), shape, dtype: 'f32' };
  };
  const held = (shape: number[], spread?: number): Input => {
    const { values } = input(shape, spread);
    return { values: rounded(values, dtype), shape, dtype };
  };
  /** No gate is negative, and the fused kernels rely on it. */
  const positive = ({ values, ...rest }: Input): Input => ({ ...rest, values: values.map(Math.abs) });
  return {
    q: held([tokens, h.heads, h.dk]),
    kCmp: held([blocks, h.groups, h.dk]),
    vCmp: held([blocks, h.groups, h.dv]),
    kSel: held([tokens, h.groups, h.dk]),
    vSel: held([tokens, h.groups, h.dv]),
    kWin: held([tokens, h.groups, h.dk]),
    vWin: held([tokens, h.groups, h.dv]),
    gates: positive(input([tokens, h.heads, 3], 1)),
    dOut: held([tokens, h.heads, h.dv], 1),
  };
}

export function upload(device: Device, { values, shape, dtype }: Input): Tensor {
  return Tensor.from(device, values, shape, dtype);
}

/** cu_seqlens of the tokens and of the compressed blocks. */
export function starts(lengths: readonly number[]): number[] {
  let sum = 0;
  return [0, ...lengths.map((length) => (sum += length))];
}

/** A table of addresses of pages, or of such tables, that lives until the tape ends. */
export function addressTable(tape: Tape, addresses: readonly bigint[]): Tensor<'address'> {
  const table = tape.hold(Tensor.empty(tape.device, [addresses.length], 'address'));
  table.write(addresses);
  return table;
}
