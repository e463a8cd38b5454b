/**
 * Attention of a decode step in float64: one new token of one sequence, from its row of the fused projection to the sum of
 * the branches, over keys and values of the tokens before it.
 */
import type { HeadShape, SparseShape } from '../attention.js';
import { attendForward } from '../attention-reference.js';
import { angle, type RotaryShape } from '../rope/reference.js';
import { importance } from '../select/reference.js';
import { compressedCount } from '../sequences.js';

/** Keys (rotated) and values of the earlier tokens, row after row of [groups, size]. */
export interface StepHistory {
  readonly kCmp: Float64Array;
  readonly vCmp: Float64Array;
  readonly kSel: Float64Array;
  readonly vSel: Float64Array;
  readonly kWin: Float64Array;
  readonly vWin: Float64Array;
  /** Raw rows that belong to no finished block yet, or to one that overlaps the next. */
  readonly rawKeys: Float64Array;
  readonly rawValues: Float64Array;
}

export interface StepProblem {
  readonly heads: HeadShape;
  readonly sparse: SparseShape;
  readonly rope: RotaryShape;
  readonly cmpRope: 'before' | 'after' | 'none';
  /** Weights of phi conv [l, groups, size]; null for the mean. */
  readonly phi: { readonly keys: Float64Array; readonly values: Float64Array } | null;
  /** What storing a number does to it. */
  readonly round: (values: Float64Array) => Float64Array;
}

export interface StepResult {
  /** [heads, dv] of each branch */
  readonly oCmp: Float64Array;
  /** By the given selection. */
  readonly oSel: Float64Array;
  readonly oWin: Float64Array;
  /** The compressed key and value that the token completes, [groups, size] each. */
  readonly block: { readonly key: Float64Array; readonly value: Float64Array } | null;
}

/** Importance of all blocks for each group. */
export function stepImportance(
  problem: StepProblem,
  history: StepHistory,
  projection: Float64Array,
  position: number,
): Float64Array[] {
  const { heads, sparse } = problem;
  const { block } = stepForward(problem, history, projection, position, []);
  const kCmp = joined(history.kCmp, block?.key);
  const q = new Float64Array((position + 1) * heads.heads * heads.dk);
  q.set(queries(problem, projection, position), position * heads.heads * heads.dk);
  const known = compressedCount(position + 1, sparse.l, sparse.d);
  const score = importance(q, kCmp, [0, position + 1], [0, known], heads, sparse);
  return Array.from({ length: heads.groups }, (_, group) => score(position, group));
}

/** `selected[group]`: the blocks that the group's heads attend to. */
export function stepForward(
  problem: StepProblem,
  history: StepHistory,
  projection: Float64Array,
  position: number,
  selected: readonly (readonly number[])[],
): StepResult {
  const { heads, sparse, cmpRope, round, rope } = problem;
  const { groups, dk, dv } = heads;
  const [keys, values] = [groups * dk, groups * dv];
  const part = (branch: number) => {
    const at = heads.heads * dk + branch * (keys + values);
    return { k: projection.slice(at, at + keys), v: projection.slice(at + keys, at + keys + values) };
  };
  const [cmp, sel, win] = [part(0), part(1), part(2)];
  const turned = (x: Float64Array, at: number) => round(rotated(x, dk, at, rope));
  const raw = {
    keys: joined(history.rawKeys, cmpRope === 'before' ? turned(cmp.k, position) : cmp.k),
    values: joined(history.rawValues, cmp.v),
  };
  const known = compressedCount(position, sparse.l, sparse.d);
  let block: StepResult['block'] = null;
  if (compressedCount(position + 1, sparse.l, sparse.d) > known) {
    const key = round(compressed(raw.keys, sparse.l, problem.phi?.keys ?? null));
    const value = round(compressed(raw.values, sparse.l, problem.phi?.values ?? null));
    block = { key: cmpRope === 'after' ? turned(key, known * sparse.d) : key, value };
  }
  const q = queries(problem, projection, position);
  const attend = (k: Float64Array, v: Float64Array, visible: (group: number) => number[]) =>
    attendForward(q, k, v, heads, (_, group) => visible(group)).out;
  const range = (low: number, high: number) => Array.from({ length: high - low }, (_, i) => low + i);
  const finished = known + (block ? 1 : 0);
  const tokensOf = (index: number) => range(index * sparse.lSel, Math.min(position + 1, (index + 1) * sparse.lSel));
  return {
    oCmp: attend(joined(history.kCmp, block?.key), joined(history.vCmp, block?.value), () => range(0, finished)),
    oSel: attend(joined(history.kSel, turned(sel.k, position)), joined(history.vSel, sel.v), (group) =>
      (selected[group] ?? []).flatMap(tokensOf),
    ),
    oWin: attend(joined(history.kWin, turned(win.k, position)), joined(history.vWin, win.v), () =>
      range(Math.max(0, position + 1 - sparse.w), position + 1),
    ),
    block,
  };
}

function queries({ heads, rope, round }: StepProblem, projection: Float64Array, position: number): Float64Array {
  return round(rotated(projection.slice(0, heads.heads * heads.dk), heads.dk, position, rope));
}

export function rotated(x: Float64Array, size: number, position: number, rope: RotaryShape): Float64Array {
  const half = size / 2;
  return x.map((value, i) => {
    const j = i % size;
    const turn = angle(position, j % half, size, rope);
    return j < half
      ? value * Math.cos(turn) - x[i + half] * Math.sin(turn)
      : value * Math.cos(turn) + x[i - half] * Math.sin(turn);
  });
}

/** The first `l` rows as one. */
function compressed(rows: Float64Array, l: number, weight: Float64Array | null): Float64Array {
  const width = rows.length / l;
  const out = new Float64Array(width);
  for (let p = 0; p < l; p++)
    for (let c = 0; c < width; c++) out[c] += (weight ? weight[p * width + c] : 1 / l) * rows[p * width + c];
  return out;
}

function joined(a: Float64Array, b: Float64Array = new Float64Array(0)): Float64Array {
  const all = new Float64Array(a.length + b.length);
  all.set(a);
  all.set(b, a.length);
  return all;
}
