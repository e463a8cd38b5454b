/**
 * Attention of a decode step in float64: one new token of one sequence, from its row of the fused projection to the
 * sum of the branches, over keys and values of the tokens before it.
 */

import { compressedCount } from '../../../common/sequences.js';
import type { RotaryAngles } from '../../../rope/frequencies.js';
import { angle } from '../../../rope/reference.js';
import { attendForward, range } from '../../branch-reference.js';
import { importance } from '../../select/reference.js';
import type { HeadShape, SparseShape } from '../../shape.js';

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
  readonly rope: RotaryAngles;
  readonly cmpRope: 'before' | 'after' | 'none';
  /** Whether queries and keys of the window branch alone are rotated. */
  readonly windowRope?: boolean;
  /** Weights of phi conv [l, groups, size]; null for the mean. */
  readonly phi: { readonly keys: Float64Array; readonly values: Float64Array } | null;
  /** Rounds a number as storing it does. */
  readonly round: (values: Float64Array) => Float64Array;
}

/** The result of one decode step. */
export interface StepResult {
  /** [heads, dv] of each branch */
  readonly oCmp: Float64Array;
  /** By the given selection. */
  readonly oSel: Float64Array;
  readonly oWin: Float64Array;
  /** With the new token. */
  readonly history: StepHistory;
}

/** Importance of all blocks for each group. */
export function stepImportance(
  problem: StepProblem,
  history: StepHistory,
  projection: Float64Array,
  position: number,
): Float64Array[] {
  const { heads, sparse } = problem;
  const { kCmp } = compressedHistory(problem, history, projection, position);
  const q = new Float64Array((position + 1) * heads.heads * heads.dk);
  q.set(queries(problem, projection, position, !problem.windowRope), position * heads.heads * heads.dk);
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
  const { heads, sparse, windowRope = false } = problem;
  const [sel, win] = [part(problem, projection, 1), part(problem, projection, 2)];
  const now: StepHistory = {
    ...compressedHistory(problem, history, projection, position),
    kSel: joined(history.kSel, windowRope ? sel.k : turned(problem, sel.k, position)),
    vSel: joined(history.vSel, sel.v),
    kWin: joined(history.kWin, turned(problem, win.k, position)),
    vWin: joined(history.vWin, win.v),
  };
  const [q, qWin] = [!windowRope, true].map((isRotated) => queries(problem, projection, position, isRotated));
  const attend = (k: Float64Array, v: Float64Array, visible: (group: number) => number[], of = q) =>
    attendForward(of, k, v, heads, (_, group) => visible(group)).out;
  const tokensOf = (index: number) => range(index * sparse.lSel, Math.min(position + 1, (index + 1) * sparse.lSel));
  return {
    oCmp: attend(now.kCmp, now.vCmp, () => range(0, compressedCount(position + 1, sparse.l, sparse.d))),
    oSel: attend(now.kSel, now.vSel, (group) => (selected[group] ?? []).flatMap(tokensOf)),
    oWin: attend(now.kWin, now.vWin, () => range(Math.max(0, position + 1 - sparse.w), position + 1), qWin),
    history: now,
  };
}

/**
 * Appends the new token's raw row. If it completes a compressed block, computes it and drops rows that no later block
 * needs.
 */
function compressedHistory(problem: StepProblem, history: StepHistory, projection: Float64Array, position: number) {
  const { heads, sparse, cmpRope, round, phi } = problem;
  const { k, v } = part(problem, projection, 0);
  const rawKeys = joined(history.rawKeys, cmpRope === 'before' ? turned(problem, k, position) : k);
  const rawValues = joined(history.rawValues, v);
  const known = compressedCount(position, sparse.l, sparse.d);
  if (compressedCount(position + 1, sparse.l, sparse.d) === known)
    return { kCmp: history.kCmp, vCmp: history.vCmp, rawKeys, rawValues };
  const key = round(compressed(rawKeys, sparse.l, phi?.keys ?? null));
  const value = round(compressed(rawValues, sparse.l, phi?.values ?? null));
  return {
    kCmp: joined(history.kCmp, cmpRope === 'after' ? turned(problem, key, known * sparse.d) : key),
    vCmp: joined(history.vCmp, value),
    rawKeys: rawKeys.slice(sparse.d * heads.groups * heads.dk),
    rawValues: rawValues.slice(sparse.d * heads.groups * heads.dv),
  };
}

/** Columns of the projection with keys and values of the compressed (0), selected (1) or window branch (2). */
function part({ heads }: StepProblem, projection: Float64Array, branch: number) {
  const [keys, values] = [heads.groups * heads.dk, heads.groups * heads.dv];
  const at = heads.heads * heads.dk + branch * (keys + values);
  return { k: projection.slice(at, at + keys), v: projection.slice(at + keys, at + keys + values) };
}

function turned({ heads, rope, round }: StepProblem, x: Float64Array, position: number): Float64Array {
  return round(rotated(x, heads.dk, position, rope));
}

function queries(problem: StepProblem, projection: Float64Array, position: number, isRotated: boolean): Float64Array {
  const q = projection.slice(0, problem.heads.heads * problem.heads.dk);
  return isRotated ? turned(problem, q, position) : q;
}

function rotated(x: Float64Array, size: number, position: number, rope: RotaryAngles): Float64Array {
  const half = size / 2;
  return x.map((value, i) => {
    const j = i % size;
    const turn = angle(position, j % half, rope);
    const [cosine, sine] = [rope.amplitude * Math.cos(turn), rope.amplitude * Math.sin(turn)];
    return j < half ? value * cosine - x[i + half] * sine : value * cosine + x[i - half] * sine;
  });
}

/** Compresses `l` rows into one. */
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
