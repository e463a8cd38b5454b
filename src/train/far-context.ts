/**
 * The worth of far context: the loss of targets with all of their context, and of the same targets when the context is cut
 * to its end. The difference is 0 for a model that reads no further.
 */
import { type Batch, IGNORED_TARGET } from '../data/batch.js';

/** The gain of targets with more than `from` and at most `to` tokens of context. */
export interface FarRow {
  readonly from: number;
  readonly to: number;
  readonly targets: number;
  readonly gain: number;
}

export interface FarContext {
  /** The cut context has this many tokens, or up to a quarter more. */
  readonly near: number;
  readonly targets: number;
  /** Mean loss with all of the context, in nats. */
  readonly loss: number;
  /** Mean loss of the same targets with the cut context. */
  readonly near_loss: number;
  /** The second less the first: the nats that far context is worth. */
  readonly gain: number;
  /** Standard error of the gain, from its spread over sequences; null for a single one. */
  readonly error: number | null;
  readonly by_position: readonly FarRow[];
}

/** Tokens of a piece beyond the cut context, as a share of it: a smaller one reads more tokens for the same targets. */
const STRIDE = 1 / 4;

type Losses = (batch: Pick<Batch, 'inputs' | 'targets' | 'cuSeqlens'>) => ArrayLike<number>;

/** Sums over batches. `losses` computes those of a packed batch. */
export class FarContextGain {
  readonly #near: number;
  readonly #losses: Losses;
  readonly #rows: { targets: number; gain: number }[] = [];
  readonly #sequences: { targets: number; full: number; cut: number }[] = [];

  constructor(near: number, losses: Losses) {
    this.#near = near;
    this.#losses = losses;
  }

  /** `full`: the loss of every target of the batch. */
  add({ inputs, targets, cuSeqlens }: Batch, full: ArrayLike<number>): void {
    const near = this.#near;
    const stride = Math.max(1, Math.floor(near * STRIDE));
    for (let sequence = 0; sequence + 1 < cuSeqlens.length; sequence++) {
      const [start, end] = [cuSeqlens[sequence], cuSeqlens[sequence + 1]];
      // A piece counts `stride` targets, the first of which has `near` tokens of context.
      const pieces: { from: number; first: number; to: number }[] = [];
      for (let first = start + near; first < end; first += stride)
        pieces.push({ from: first - near + 1, first, to: Math.min(end, first + stride) });
      if (pieces.length === 0) continue;
      const cut = pieces.map(({ from, first, to }) => ({
        inputs: inputs.subarray(from, to),
        targets: targets.slice(from, to).fill(IGNORED_TARGET, 0, first - from),
      }));
      const offsets = [0];
      for (const piece of cut) offsets.push(offsets[offsets.length - 1] + piece.inputs.length);
      const values = this.#losses({
        inputs: Int32Array.from(cut.flatMap((piece) => [...piece.inputs])),
        targets: Int32Array.from(cut.flatMap((piece) => [...piece.targets])),
        cuSeqlens: Int32Array.from(offsets),
      });
      const sum = { targets: 0, full: 0, cut: 0 };
      for (const [i, { from, first, to }] of pieces.entries())
        for (let at = first; at < to; at++) {
          if (targets[at] === IGNORED_TARGET) continue;
          const alone = values[offsets[i] + at - from];
          sum.targets += 1;
          sum.full += full[at];
          sum.cut += alone;
          const row = 32 - Math.clz32(at - start);
          while (this.#rows.length <= row) this.#rows.push({ targets: 0, gain: 0 });
          this.#rows[row].targets += 1;
          this.#rows[row].gain += alone - full[at];
        }
      if (sum.targets > 0) this.#sequences.push(sum);
    }
  }

  /** Null if no sequence is longer than the cut context. */
  result(): FarContext | null {
    const all = this.#sequences;
    const total = (name: 'targets' | 'full' | 'cut') => all.reduce((sum, one) => sum + one[name], 0);
    const targets = total('targets');
    if (targets === 0) return null;
    const [loss, nearLoss] = [total('full') / targets, total('cut') / targets];
    const gain = nearLoss - loss;
    // The standard error of a ratio of sums: each sequence weighs as many targets as it has.
    const squares = all.reduce((sum, one) => sum + (one.cut - one.full - gain * one.targets) ** 2, 0);
    const error = all.length < 2 ? null : Math.sqrt((squares * all.length) / (all.length - 1)) / targets;
    const rows = this.#rows
      .map((row, i) => ({ from: 2 ** (i - 1), to: 2 ** i, ...row }))
      .filter((row) => row.targets > 0);
    return {
      ...{ near: this.#near, targets, loss, near_loss: nearLoss, gain, error },
      by_position: rows.map((row) => ({ ...row, gain: row.gain / row.targets })),
    };
  }
}
