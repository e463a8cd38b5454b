/** The loss by the length of the context, in powers of two: shows up to which length a model makes use of what it has read. */
import type { Batch } from '../data/batch.js';
import { IGNORED_TARGET } from '../data/batch.js';

/** The mean loss of the targets that are predicted from `from` to `to` tokens of context. */
export interface PositionLoss {
  readonly from: number;
  readonly to: number;
  readonly targets: number;
  /** In nats. */
  readonly loss: number;
}

/** Sums by position. The first row has a context of one token, then 2, 3 to 4, 5 to 8 and so on. */
export class PositionLosses {
  readonly #sums: number[] = [];
  readonly #counts: number[] = [];

  /** `losses`: one per target of the batch. Positions count from the start of each sequence that attention treats apart. */
  add({ targets, cuSeqlens }: Batch, losses: ArrayLike<number>): void {
    for (let sequence = 0; sequence + 1 < cuSeqlens.length; sequence++)
      for (let i = cuSeqlens[sequence]; i < cuSeqlens[sequence + 1]; i++) {
        if (targets[i] === IGNORED_TARGET) continue;
        const row = 32 - Math.clz32(i - cuSeqlens[sequence]);
        this.#sums[row] = (this.#sums[row] ?? 0) + losses[i];
        this.#counts[row] = (this.#counts[row] ?? 0) + 1;
      }
  }

  rows(): PositionLoss[] {
    return Array.from(this.#counts, (targets, row) => ({
      from: row === 0 ? 1 : 2 ** (row - 1) + 1,
      to: 2 ** row,
      targets: targets ?? 0,
      loss: (this.#sums[row] ?? 0) / (targets ?? 0),
    })).filter(({ targets }) => targets > 0);
  }
}
