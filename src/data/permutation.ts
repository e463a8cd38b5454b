/**
 * A pseudo-random permutation of 0 … size-1 that is computed, not stored: constant memory and time for any size, so a run
 * of any length can be resumed at any sample in constant time.
 *
 * A Feistel network permutes the numbers of 2h bits, where 4^h is the least power of four not below `size`. Results
 * outside the range are permuted again until one falls inside (cycle walking): fewer than four turns on average, and
 * still a bijection, because each number outside has exactly one predecessor.
 */

import { absorb, mix32, Purpose } from './hash.js';

const ROUNDS = 8;

export function createPermutation(size: number, seed: number, epoch: number): (index: number) => number {
  let halfBits = 1;
  while (4 ** halfBits < size) halfBits++;
  const half = 2 ** halfBits;
  const start = absorb(absorb(absorb(0, Purpose.shuffle), seed), epoch);
  const keys = Array.from({ length: ROUNDS }, (_, round) => absorb(start, round));

  const permuteOnce = (value: number): number => {
    let left = Math.floor(value / half);
    let right = value % half;
    for (const key of keys) {
      const mixed = (left ^ (mix32(right ^ key) & (half - 1))) >>> 0;
      left = right;
      right = mixed;
    }
    return left * half + right;
  };

  return (index) => {
    let value = permuteOnce(index);
    while (value >= size) value = permuteOnce(value);
    return value;
  };
}
