/**
 * Logits and selections of a device in bf16 against float64, token by token. How far they may be apart is no constant: where
 * scores are large or terms almost cancel, rounding moves a token more. So every token is computed a second time with
 * numbers rounded where the device stores them, and the device may be off by a few times what that does.
 */
import { isSelection } from '../../ops/attention/select/reference.js';
import { relativeError } from '../../testing/numbers.js';
import {
  type Replayed,
  type ReplayWeights,
  StepReplay,
  type TokenSelection,
  toBf16,
  unrounded,
} from './step-replay.js';

/** A device rounds other sums than the replay: its errors are as large, not the same. At most 2 times as large were seen. */
const LIMIT = 3;
/** Limit of the mean over a sequence: one more rounding of every number. 1.2 was seen. */
const MEAN_LIMIT = Math.SQRT2;

/** By how much, in logarithms, the worst block taken scores less than the best that was left; 0 for a right selection. */
export function selectionMargin(score: ArrayLike<number>, selected: readonly number[]): number {
  if (!isSelection(score, selected, 1)) return Number.POSITIVE_INFINITY; // forced blocks, order or number are wrong
  const candidates = candidatesOf(score);
  const scoresOf = (isTaken: boolean) =>
    candidates.filter((j) => selected.includes(j) === isTaken).map((j) => score[j]);
  const [taken, left] = [scoresOf(true), scoresOf(false)];
  if (left.length === 0 || taken.length === 0) return 0;
  return Math.max(0, Math.log(Math.max(...left) / Math.min(...taken)));
}

/** Blocks that are not forced. */
function candidatesOf(score: ArrayLike<number>): number[] {
  return Array.from({ length: Math.max(0, score.length - 3) }, (_, i) => i + 1);
}

/** Root of the mean square of what was added. */
class Typical {
  #squares = 0;
  #count = 0;

  add(value: number): void {
    this.#squares += value ** 2;
    this.#count += 1;
  }

  get value(): number {
    return this.#count === 0 ? 0 : Math.sqrt(this.#squares / this.#count);
  }

  copy(): Typical {
    const copy = new Typical();
    copy.#squares = this.#squares;
    copy.#count = this.#count;
    return copy;
  }
}

/** The findings, the largest of each. */
export interface Findings {
  error: number;
  /** Relative to what rounding does. */
  ratio: number;
  margin: number;
  marginRatio: number;
}

export class Comparison {
  readonly findings: Findings = { error: 0, ratio: 0, margin: 0, marginRatio: 0 };
  readonly #weights: ReplayWeights;
  #exact: StepReplay;
  #rounded: StepReplay;
  /**
   * The effect of rounding so far, on logits and to the scores of each layer: no token's limit is below the usual one.
   */
  #errors = new Typical();
  #shifts: Typical[];
  #logarithms = 0;
  #compared = 0;

  constructor(weights: ReplayWeights) {
    this.#weights = weights;
    this.#exact = new StepReplay(weights, unrounded);
    this.#rounded = new StepReplay(weights, toBf16);
    this.#shifts = Array.from({ length: weights.model.shape.nLayers }, () => new Typical());
  }

  /** A second sequence that goes on from here. */
  fork(): Comparison {
    const copy = new Comparison(this.#weights);
    copy.#exact = this.#exact.fork();
    copy.#rounded = this.#rounded.fork();
    copy.#errors = this.#errors.copy();
    copy.#shifts = this.#shifts.map((shift) => shift.copy());
    return copy;
  }

  /** Reads a token; throws where the device's selection, or its logits if they are given, cannot come from rounding. */
  next(token: number, selection: TokenSelection, where: string, logits: ArrayLike<number> | null): void {
    const exact = this.#exact.next(token, selection);
    const rounded = this.#rounded.next(token, selection);
    this.#compareScores(exact, rounded, selection, where);
    const effect = relativeError(rounded.logits, exact.logits);
    this.#errors.add(effect);
    if (!logits) return;
    const error = relativeError(logits, exact.logits);
    const ratio = error / Math.max(effect, this.#errors.value);
    if (!(ratio < LIMIT))
      throw new Error(`${where}: logits are off by ${error}, ${ratio} times what rounding to bf16 does`);
    this.#logarithms += Math.log(error / effect);
    this.#compared += 1;
    this.#keep({ error, ratio });
  }

  /** After the last token: errors must be as large as those of rounding on the whole, too. */
  finish(where: string): void {
    const mean = this.#compared === 0 ? 0 : Math.exp(this.#logarithms / this.#compared);
    if (!(mean < MEAN_LIMIT))
      throw new Error(`${where}: errors are ${mean} times those of rounding to bf16 in the mean`);
  }

  #compareScores(exact: Replayed, rounded: Replayed, selection: TokenSelection, where: string): void {
    selection.forEach((groups, layer) => {
      groups.forEach((blocks, group) => {
        const score = exact.scores[layer][group];
        const margin = selectionMargin(score, blocks);
        // How far rounding moves two blocks apart.
        const shifts = candidatesOf(score).map((j) => Math.log(rounded.scores[layer][group][j] / score[j]));
        const effect = shifts.length === 0 ? 0 : Math.max(...shifts) - Math.min(...shifts);
        if (score.length > blocks.length) this.#shifts[layer].add(effect);
        const ratio = margin === 0 ? 0 : margin / Math.max(effect, this.#shifts[layer].value);
        if (!(ratio < LIMIT))
          throw new Error(
            `${where}, layer ${layer}, group ${group}: blocks ${blocks.join()} include one that scores less by ${margin}, ` +
              `${ratio} times what rounding to bf16 does`,
          );
        this.#keep({ margin, marginRatio: ratio });
      });
    });
  }

  #keep(found: Partial<Findings>): void {
    for (const [name, value] of Object.entries(found) as [keyof Findings, number][])
      this.findings[name] = Math.max(this.findings[name], value);
  }
}
