/**
 * Softmax attention in float64 over an explicit list of keys. What the branches differ in is that list and nothing
 * else, so each branch's reference states its list and calls these loops.
 */
import type { HeadShape } from './shape.js';

/** The rows of k and v that a token's heads of one group attend. */
export type VisibleKeys = (token: number, group: number) => readonly number[];

/** `q` [T,H,dk], `k` [rows,G,dk], `v` [rows,G,dv] -> `out` [T,H,dv], `lse` [T,H]. Nothing visible: 0 and -Infinity. */
export function attendForward(
  q: Float64Array,
  k: Float64Array,
  v: Float64Array,
  shape: HeadShape,
  visible: VisibleKeys,
): { out: Float64Array; lse: Float64Array } {
  const { heads, groups, dv } = shape;
  const tokens = q.length / (heads * shape.dk);
  const out = new Float64Array(tokens * heads * dv);
  const lse = new Float64Array(tokens * heads);
  forEachHead(tokens, shape, visible, (row, group, keys) => {
    const { probabilities, logSum } = softmax(scores(q, k, shape, row, group, keys));
    lse[row] = logSum;
    for (let i = 0; i < keys.length; i++) {
      const [probability, from] = [probabilities[i], (keys[i] * groups + group) * dv];
      for (let c = 0; c < dv; c++) out[row * dv + c] += probability * v[from + c];
    }
  });
  return { out, lse };
}

/** Gradients of `sum(out * dOut)`; those of k and v are summed over the heads of the group. */
export function attendBackward(
  q: Float64Array,
  k: Float64Array,
  v: Float64Array,
  shape: HeadShape,
  visible: VisibleKeys,
  dOut: Float64Array,
): { dq: Float64Array; dk: Float64Array; dv: Float64Array } {
  const { heads, groups, dk: sizeK, dv: sizeV } = shape;
  const tokens = q.length / (heads * sizeK);
  const scale = 1 / Math.sqrt(sizeK);
  const [dq, dk, dv] = [new Float64Array(q.length), new Float64Array(k.length), new Float64Array(v.length)];
  forEachHead(tokens, shape, visible, (row, group, keys) => {
    const { probabilities } = softmax(scores(q, k, shape, row, group, keys));
    const dProbabilities = keys.map((key) => {
      const from = (key * groups + group) * sizeV;
      let total = 0;
      for (let c = 0; c < sizeV; c++) total += dOut[row * sizeV + c] * v[from + c];
      return total;
    });
    const mean = dProbabilities.reduce((total, value, i) => total + value * probabilities[i], 0);
    for (let i = 0; i < keys.length; i++) {
      const keyRow = keys[i] * groups + group;
      const [probability, atK, atV] = [probabilities[i], keyRow * sizeK, keyRow * sizeV];
      const dScore = probability * (dProbabilities[i] - mean) * scale;
      for (let c = 0; c < sizeK; c++) {
        dq[row * sizeK + c] += dScore * k[atK + c];
        dk[atK + c] += dScore * q[row * sizeK + c];
      }
      for (let c = 0; c < sizeV; c++) dv[atV + c] += probability * dOut[row * sizeV + c];
    }
  });
  return { dq, dk, dv };
}

/** Scaled scores of one query head: `row` = token * heads + head. */
export function scores(
  q: Float64Array,
  k: Float64Array,
  { groups, dk }: HeadShape,
  row: number,
  group: number,
  keys: readonly number[],
): number[] {
  const root = Math.sqrt(dk);
  return keys.map((key) => {
    const from = (key * groups + group) * dk;
    let total = 0;
    for (let c = 0; c < dk; c++) total += q[row * dk + c] * k[from + c];
    return total / root;
  });
}

/** Natural-log softmax; of nothing: no probabilities, and the logarithm of an empty sum. */
export function softmax(values: readonly number[]): { probabilities: number[]; logSum: number } {
  if (values.length === 0) return { probabilities: [], logSum: Number.NEGATIVE_INFINITY };
  const most = values.reduce((a, b) => Math.max(a, b));
  const exponentials = values.map((value) => Math.exp(value - most));
  const total = exponentials.reduce((a, b) => a + b);
  return { probabilities: exponentials.map((value) => value / total), logSum: most + Math.log(total) };
}

/** The sequence of every token. */
export function sequenceOf(starts: ArrayLike<number>): Int32Array {
  const found = new Int32Array(starts[starts.length - 1]);
  for (let s = 0; s + 1 < starts.length; s++) found.fill(s, starts[s], starts[s + 1]);
  return found;
}

/** Whole numbers from `begin` to `end` (exclusive). */
export function range(begin: number, end: number): number[] {
  return Array.from({ length: Math.max(0, end - begin) }, (_, i) => begin + i);
}

function forEachHead(
  tokens: number,
  { heads, groups }: HeadShape,
  visible: VisibleKeys,
  body: (row: number, group: number, keys: readonly number[]) => void,
): void {
  const perGroup = heads / groups;
  for (let token = 0; token < tokens; token++)
    for (let group = 0; group < groups; group++) {
      const keys = visible(token, group);
      for (let i = 0; i < perGroup; i++) body(token * heads + group * perGroup + i, group, keys);
    }
}
