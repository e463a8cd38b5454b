import { describe, expect, it } from 'vitest';
import { Tensor } from '../../../tensor/tensor.js';
import { devices } from '../../../testing/devices.js';
import { randomValues } from '../../../testing/numbers.js';
import { selectionCounts, summarizeSelection } from './op.js';
import { countSelections } from './reference.js';

/** Ascending blocks, then -1: as `selectBlocks` leaves them. */
function selections(rows: number, slots: number): Int32Array {
  const random = randomValues(rows, 5);
  return Int32Array.from({ length: rows * slots }, (_, i) => {
    const count = Math.floor(((random[Math.floor(i / slots)] + 1) / 2) * (slots + 1));
    return i % slots < count ? i % slots : -1;
  });
}

describe.each(devices().filter(({ dtype }) => dtype === 'f32'))('selection counts on $name', ({ device }) => {
  it.each([
    [1, 1, 3],
    [700, 2, 16],
    [5000, 3, 5],
    [0, 2, 4],
  ])('are those of the reference for %i tokens, %i groups and %i slots', (tokens, groups, slots) => {
    const values = selections(tokens * groups, slots);
    const selected = Tensor.from(device(), values, [tokens, groups, slots], 'i32');
    const counts = selectionCounts(device(), selected);
    expect([...counts.read()]).toEqual(countSelections(values, slots));
    selected.free();
    counts.free();
  });
});

describe('the summary of a selection', () => {
  it('has the mean, the largest number and the share that has it', () => {
    expect(summarizeSelection([0, 2, 0, 6, 0])).toEqual({ mean: 2.5, max: 3, percentAtMax: 75 });
    expect(summarizeSelection([0, 0, 0])).toEqual({ mean: 0, max: 0, percentAtMax: 0 });
  });
});
