import { describe, expect, it } from 'vitest';
import { nsaInputs, nsaLayout } from '../../../testing/nsa.js';
import type { SelectionRule } from '../shape.js';
import { importance, isSelection, overlap, selectBlocks, topBlocks } from './reference.js';

const PAPER = { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 };
const SMALL = { l: 4, d: 2, lSel: 4, nSel: 4, w: 8 };
const HEADS = { heads: 4, groups: 2, dk: 4, dv: 4 };

describe('overlap of compressed and selection blocks', () => {
  it('is 1,2,2,2,1 on the blocks 4j-1 to 4j+3 for the default sizes', () => {
    const row = Array.from({ length: 14 }, (_, i) => overlap(i, 2, PAPER));
    expect(row).toEqual([0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 2, 1, 0, 0]);
  });

  it('shares every compressed block out completely', () => {
    for (let i = 0; i < 20; i++) {
      let total = 0;
      for (let j = 0; j < 20; j++) total += overlap(i, j, PAPER);
      expect(total).toBe(PAPER.l / PAPER.d);
    }
  });
});

describe('importance', () => {
  it('spreads one unit per head over the overlaps, and is zero while nothing is visible', () => {
    const layout = nsaLayout([14], HEADS, SMALL);
    const inputs = nsaInputs(layout, 1);
    const score = importance(inputs.q, inputs.kCmp, layout.starts, layout.cmpStarts, HEADS, SMALL);
    for (let t = 0; t < 14; t++) {
      const row = score(t, 1);
      expect(row.length).toBe(Math.floor(t / 4) + 1);
      const heads = HEADS.heads / HEADS.groups;
      expect(row.reduce((a, b) => a + b)).toBeCloseTo(t < 3 ? 0 : (heads * SMALL.l) / SMALL.d, 12);
    }
  });
});

describe('top blocks', () => {
  it.each<[string, number[], number, number[]]>([
    ['one block', [5], 3, [0]],
    ['two blocks', [5, 5], 3, [0, 1]],
    ['exactly the forced ones', [1, 9, 2, 3], 3, [0, 2, 3]],
    ['the highest of the others', [0, 1, 3, 2, 0, 0], 5, [0, 2, 3, 4, 5]],
    ['the lower index of equals', [0, 1, 1, 1, 0, 0], 4, [0, 1, 4, 5]],
    ['all when fewer exist', [3, 2, 1, 0], 16, [0, 1, 2, 3]],
    ['zero scores from the left', [0, 0, 0, 0, 0, 0, 0], 5, [0, 1, 2, 5, 6]],
  ])('are %s', (_, score, count, expected) => {
    expect(topBlocks(score, count)).toEqual(expected);
  });
});

describe('top blocks with other forced blocks', () => {
  it.each<[string, number[], number, SelectionRule, number[]]>([
    ['the own block and the highest others', [9, 1, 3, 2, 5, 0], 3, { initBlocks: 0, localBlocks: 1 }, [0, 4, 5]],
    ['the first two and the last', [0, 0, 3, 4, 5, 0], 4, { initBlocks: 2, localBlocks: 1 }, [0, 1, 4, 5]],
    ['all when they overlap', [1, 2, 3], 8, { initBlocks: 4, localBlocks: 3 }, [0, 1, 2]],
    ['the last three alone', [9, 8, 7, 0, 0, 0], 3, { initBlocks: 0, localBlocks: 3 }, [3, 4, 5]],
  ])('are %s', (_, score, count, forced, expected) => {
    expect(topBlocks(score, count, forced)).toEqual(expected);
    expect(isSelection(score, [...expected, ...new Array(count - expected.length).fill(-1)], 0, forced)).toBe(true);
    expect(isSelection([...score].reverse(), expected.slice().reverse(), 0, forced)).toBe(false);
  });
});

describe('top blocks by chunks', () => {
  const CHUNKED: SelectionRule = { initBlocks: 0, localBlocks: 1, selection: 'chunked' };
  it.each<[string, number[], number, number[]]>([
    ['all of the first chunk', [9, 8, 7, 0], 4, [0, 1, 2, 3]],
    ['two before the chunk, and the own block alone in it', [3, 9, 1, 5, 0], 4, [1, 3, 4]],
    ['two before it, and the better one in it', [3, 9, 1, 5, 2, 7, 0], 4, [1, 3, 5, 6]],
    ['no more than two before it, however good these are', [9, 9, 9, 9, 0, 0, 0, 0], 4, [0, 1, 4, 7]],
    ['two of two chunks before it', [1, 2, 3, 4, 9, 0, 0, 8, 1, 0], 4, [4, 7, 8, 9]],
    ['one before it and the own block', [1, 5, 0, 9, 9, 0], 2, [3, 5]],
  ])('are %s', (_, score, count, expected) => {
    expect(topBlocks(score, count, CHUNKED)).toEqual(expected);
    const row = [...expected, ...new Array(count - expected.length).fill(-1)];
    expect(isSelection(score, row, 0, CHUNKED)).toBe(true);
    if (expected.length < count) expect(isSelection(score, row.with(-1, score.length - 1), 0, CHUNKED)).toBe(false);
  });
  it('are not the best of all', () => {
    expect(isSelection([9, 9, 9, 9, 0, 0, 0, 0], [0, 1, 2, 7], 0, CHUNKED)).toBe(false);
  });
});

describe('selection', () => {
  const layout = nsaLayout([3, 41, 0, 12], HEADS, SMALL);
  const { q, kCmp } = nsaInputs(layout, 2);
  const args = [q, kCmp, layout.starts, layout.cmpStarts, HEADS, SMALL] as const;
  const selected = selectBlocks(...args);
  const score = importance(...args);

  it('is one right row per token and group, numbered inside the sequence', () => {
    for (let t = 0; t < 56; t++)
      for (let g = 0; g < 2; g++)
        expect(isSelection(score(t, g), selected.subarray((t * 2 + g) * 4, (t * 2 + g + 1) * 4), 0)).toBe(true);
    expect([...selected.subarray(0, 4)]).toEqual([0, -1, -1, -1]);
    const firstOfLast = 44 * 2 * 4;
    expect([...selected.subarray(firstOfLast, firstOfLast + 4)]).toEqual([0, -1, -1, -1]);
  });

  it.each<[string, number[], boolean]>([
    ['the best', [0, 2, 4, 5], true],
    ['an equal within the tolerance', [0, 3, 4, 5], true],
    ['a worse one', [0, 1, 4, 5], false],
    ['without a forced block', [0, 2, 3, 5], false],
    ['too few', [0, 4, 5, -1], false],
    ['not ascending', [0, 4, 2, 5], false],
    ['one that does not exist', [0, 4, 5, 6], false],
    ['padding in front', [-1, 0, 4, 5], false],
    ['one twice', [0, 4, 4, 5], false],
  ])('check knows %s', (_, row, right) => {
    expect(isSelection([0, 0.5, 1, 1 - 1e-8, 0, 0], row)).toBe(right);
  });
});
