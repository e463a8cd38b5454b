/**
 * Which source sample number k of a mixture comes from, and how many samples of each source lie before it: both functions of
 * k, the weights and the seed alone, in constant time.
 *
 * Every source owns an interval of [0, 2^32) as long as its weight. Sample k belongs to the source whose interval contains
 * the k-th point of van der Corput's sequence: the bits of k in reverse order, shifted by the seed. The points fill every
 * interval evenly: among the first k, the number of points in an interval differs from its share by at most log2(k) + 1.
 * Drawing at random would be off by the square root of k, and could not be counted without visiting all k samples.
 */
import { absorb, Purpose } from '../hash.js';

const POINTS = 2 ** 32;

export class MixtureOrder {
  /** Where the interval of a source begins, and as a last entry the end of all. */
  readonly #borders: readonly number[];
  readonly #shift: number;

  /** `weights`: shares of the samples; only their ratios matter. */
  constructor(weights: readonly number[], seed: number) {
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    const borders = [0];
    let sum = 0;
    for (const weight of weights) {
      sum += weight;
      borders.push(Math.round((sum / total) * POINTS));
    }
    this.#borders = borders;
    this.#shift = absorb(absorb(0, Purpose.mixture), seed);
  }

  /** The source of sample k, as an index of `weights`. */
  sourceAt(k: number): number {
    const point = (reverse(k % POINTS) ^ this.#shift) >>> 0;
    let source = 0;
    while (point >= this.#borders[source + 1]) source++;
    return source;
  }

  /** How many of the samples 0 … k - 1 come from a source. */
  count(source: number, k: number): number {
    return this.#below(this.#borders[source + 1], k) - this.#below(this.#borders[source], k);
  }

  /** How many of the points 0 … k - 1 are less than `border`. */
  #below(border: number, k: number): number {
    // Every border is met once in each whole round of the sequence.
    const rounds = Math.floor(k / POINTS);
    let count = rounds * border;
    const rest = k - rounds * POINTS;
    // The points of an aligned stretch of 2^bit samples have all values in their `bit` high bits and one in the low ones.
    let start = 0;
    for (let bit = 31; bit >= 0; bit--) {
      const length = 2 ** bit;
      if (Math.floor(rest / length) % 2 === 0) continue;
      const width = POINTS / length;
      const low = ((reverse(start) ^ this.#shift) >>> 0) % width;
      count += Math.floor(border / width) + Number(low < border % width);
      start += length;
    }
    return count;
  }
}

/** The 32 bits of a number in reverse order. */
function reverse(value: number): number {
  let bits = value | 0;
  bits = ((bits >>> 1) & 0x55555555) | ((bits & 0x55555555) << 1);
  bits = ((bits >>> 2) & 0x33333333) | ((bits & 0x33333333) << 2);
  bits = ((bits >>> 4) & 0x0f0f0f0f) | ((bits & 0x0f0f0f0f) << 4);
  bits = ((bits >>> 8) & 0x00ff00ff) | ((bits & 0x00ff00ff) << 8);
  return ((bits >>> 16) | (bits << 16)) >>> 0;
}
