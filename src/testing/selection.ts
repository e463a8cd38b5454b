/** Comparing selections: where two scores differ by less than 1e-6 relative, either choice is right. */
import type { AttentionCase } from './attention.js';

export interface SelectionDifference {
  readonly token: number;
  readonly group: number;
  readonly actual: readonly number[];
  readonly expected: readonly number[];
}

/** Importance of all blocks for one (token, group), from the reference. */
export type Scores = (token: number, group: number) => ArrayLike<number>;

/** The rows where a selection is wrong, near ties excepted. Padding (-1) may stand anywhere. */
export function differentSelections(
  actual: ArrayLike<number>,
  expected: ArrayLike<number>,
  { heads, sparse }: Pick<AttentionCase, 'heads' | 'sparse'>,
  scores: Scores,
  nearTie = 1e-6,
): SelectionDifference[] {
  const { groups } = heads;
  const { nSel } = sparse;
  const wrong: SelectionDifference[] = [];
  for (let row = 0; row * nSel < expected.length; row++) {
    const pick = (from: ArrayLike<number>) =>
      Array.from({ length: nSel }, (_, i) => from[row * nSel + i])
        .filter((block) => block >= 0)
        .sort((a, b) => a - b);
    const [got, wanted] = [pick(actual), pick(expected)];
    if (got.length === wanted.length && got.every((block, i) => block === wanted[i])) continue;
    const token = Math.floor(row / groups);
    const group = row % groups;
    const score = scores(token, group);
    const extra = got.filter((block) => !wanted.includes(block)).map((block) => score[block]);
    const missing = wanted.filter((block) => !got.includes(block)).map((block) => score[block]);
    const gap = Math.max(...missing) - Math.min(...extra);
    const tie = got.length === wanted.length && gap <= nearTie * Math.abs(Math.max(...missing));
    if (!tie) wrong.push({ token, group, actual: got, expected: wanted });
  }
  return wrong;
}
