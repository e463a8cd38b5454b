import { describe, expect, it } from 'vitest';
import { IGNORED_TARGET } from '../data/batch.js';
import { PositionLosses } from './evaluate.js';

const batch = (targets: readonly number[], cuSeqlens: readonly number[]) => ({
  inputs: new Int32Array(targets.length),
  targets: Int32Array.from(targets),
  targetCount: targets.filter((target) => target !== IGNORED_TARGET).length,
  cuSeqlens: Int32Array.from(cuSeqlens),
  sampleIds: [],
  epoch: 0,
});

describe('PositionLosses', () => {
  it('groups contexts of 1, 2, 3 to 4, 5 to 8 tokens', () => {
    const losses = new PositionLosses();
    losses.add(batch([7, 7, 7, 7, 7, 7], [0, 6]), [1, 2, 3, 5, 7, 9]);
    expect(losses.rows()).toEqual([
      { from: 1, to: 1, targets: 1, loss: 1 },
      { from: 2, to: 2, targets: 1, loss: 2 },
      { from: 3, to: 4, targets: 2, loss: 4 },
      { from: 5, to: 8, targets: 2, loss: 8 },
    ]);
  });

  it('counts from the start of each document, over batches, without ignored targets', () => {
    const losses = new PositionLosses();
    losses.add(batch([7, IGNORED_TARGET, 7, 7], [0, 2, 4]), [1, 50, 3, 4]);
    losses.add(batch([IGNORED_TARGET, 7, 7], [0, 3]), [50, 6, 8]);
    expect(losses.rows()).toEqual([
      { from: 1, to: 1, targets: 2, loss: 2 },
      { from: 2, to: 2, targets: 2, loss: 5 },
      { from: 3, to: 4, targets: 1, loss: 8 },
    ]);
  });
});
