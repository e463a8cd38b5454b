/**
 * The shapes that attention is checked with: every edge case of docs/explain/attention.md, at sizes the float64
 * reference can compute.
 */

import type { NsaInputs, NsaLayout } from '../ops/attention/reference.js';
import type { HeadShape, SparseShape } from '../ops/attention/shape.js';
import { compressedCount } from '../ops/common/sequences.js';
import { randomValues, startsOf, sum } from './numbers.js';

/** Sizes of an attention case. */
export interface CaseShapes {
  readonly lengths: readonly number[];
  readonly heads: HeadShape;
  readonly sparse: SparseShape;
}

export interface NamedShapes extends CaseShapes {
  readonly name: string;
}

/** Small blocks, so that short sequences cross every edge. */
export const SMALL: SparseShape = { l: 8, d: 4, lSel: 16, nSel: 4, w: 24 };
const heads = (count: number, groups: number, dk = 16, dv = dk): HeadShape => ({ heads: count, groups, dk, dv });
const small = (name: string, lengths: number[], shape: HeadShape, sparse: Partial<SparseShape> = {}): NamedShapes => ({
  name,
  lengths,
  heads: shape,
  sparse: { ...SMALL, ...sparse },
});

export const AWKWARD: readonly NamedShapes[] = [
  small('S = 1', [1], heads(2, 1)),
  small('S < l', [7], heads(2, 2)),
  small('S = l', [8], heads(2, 1)),
  small("S < l'", [15], heads(2, 1)),
  small("S no multiple of l'", [101], heads(4, 2)),
  small('S = w', [24], heads(2, 1)),
  small('S = w + 1', [25], heads(2, 1)),
  small('G = H', [70], heads(3, 3)),
  small('h = 1', [90], heads(2, 2, 32)),
  small('h = 5', [90], heads(5, 1, 8)),
  small('h = 6, two groups', [130], heads(12, 2)),
  small('h = 16', [80], heads(16, 1, 8)),
  small('d_k 10, d_v 7', [77], heads(4, 2, 10, 7)),
  small('d_k 24, d_v 40', [66], heads(2, 1, 24, 40)),
  small("d = l = l'", [100], heads(2, 1), { l: 8, d: 8, lSel: 8, nSel: 3, w: 5 }),
  small('n = 3, forced blocks only', [150], heads(2, 1), { nSel: 3 }),
  small('w = 1', [40], heads(2, 1), { w: 1 }),
  small('blocks of 12', [131], heads(2, 1), { l: 12, d: 4, lSel: 12, nSel: 5, w: 30 }),
  small('blocks of the paper', [700], heads(2, 1), { l: 32, d: 16, lSel: 64, nSel: 4, w: 128 }),
  small('ragged with empty sequences', [3, 0, 64, 1, 129, 17], heads(4, 2)),
  small('empty batch', [], heads(2, 1)),
  small('only empty sequences', [0, 0], heads(2, 1)),
];

/** The inputs by the names of the golden files, in their order. */
export const INPUT_NAMES = ['q', 'kCmp', 'vCmp', 'kSel', 'vSel', 'kWin', 'vWin', 'gates'] as const;
/** Names of attention inputs. */
export type InputName = (typeof INPUT_NAMES)[number];

/** Names of the inputs in files and messages. */
export const FILE_NAMES: Record<InputName, string> = {
  q: 'q',
  kCmp: 'k_cmp',
  vCmp: 'v_cmp',
  kSel: 'k_sel',
  vSel: 'v_sel',
  kWin: 'k_win',
  vWin: 'v_win',
  gates: 'gates',
};

export function gradientName(input: InputName): string {
  return input === 'gates' ? 'd_gates' : `d${FILE_NAMES[input]}`;
}

export function layoutOf({ lengths, heads: shape, sparse }: CaseShapes): NsaLayout {
  const blocks = lengths.map((length) => compressedCount(length, sparse.l, sparse.d));
  return { starts: startsOf(lengths), cmpStarts: startsOf(blocks), heads: shape, sparse };
}

export function inputShapes({ lengths, heads: h, sparse }: CaseShapes): Record<InputName, readonly number[]> {
  const tokens = sum(lengths);
  const blocks = sum(lengths.map((length) => compressedCount(length, sparse.l, sparse.d)));
  return {
    q: [tokens, h.heads, h.dk],
    kCmp: [blocks, h.groups, h.dk],
    vCmp: [blocks, h.groups, h.dv],
    kSel: [tokens, h.groups, h.dk],
    vSel: [tokens, h.groups, h.dv],
    kWin: [tokens, h.groups, h.dk],
    vWin: [tokens, h.groups, h.dv],
    gates: [tokens, h.heads, 3],
  };
}

export function outputShape({ lengths, heads: h }: CaseShapes): readonly number[] {
  return [sum(lengths), h.heads, h.dv];
}

/** Elements of the output. */
export function outputSize(shapes: CaseShapes): number {
  return outputShape(shapes).reduce((product, size) => product * size, 1);
}

/** A spread of 2 gives peaked softmaxes: small scores would hide errors in the maximum and the selection. */
export function randomInputs(shapes: CaseShapes, seed: number): NsaInputs {
  const sizes = inputShapes(shapes);
  const values = INPUT_NAMES.map((name, i) => {
    const count = sizes[name].reduce((product, size) => product * size, 1);
    return [name, randomValues(count, seed * 100 + i, name === 'gates' ? 1 : 2)] as const;
  });
  return Object.fromEntries(values) as Record<InputName, Float64Array>;
}
