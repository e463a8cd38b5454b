/**
 * Stateless hashing for everything random in the data path: split, shuffle, synthetic tokens.
 * A value depends only on its inputs, so any position can be computed without those before it.
 */

/** Murmur3's 32-bit finaliser: a bijection in which every input bit reaches every output bit. */
export function mix32(value: number): number {
  let bits = value | 0;
  bits = Math.imul(bits ^ (bits >>> 16), 0x85ebca6b);
  bits = Math.imul(bits ^ (bits >>> 13), 0xc2b2ae35);
  return (bits ^ (bits >>> 16)) >>> 0;
}

/** Folds a non-negative integer of up to 53 bits into a 32-bit hash state. The order of the calls matters. */
export function absorb(state: number, value: number): number {
  const high = Math.floor(value / 2 ** 32);
  // The odd constant keeps (state 0, value 0) from being a fixed point of the finaliser.
  return mix32(mix32((state + 0x9e3779b9) ^ (value >>> 0)) ^ high);
}

/** Domain separation: two uses of one seed must not see related numbers. */
export const Purpose = {
  split: 1,
  shuffle: 2,
  syntheticTrain: 3,
  syntheticValidation: 4,
  units: 5,
  block: 6,
  needleTrain: 8,
  needleValidation: 9,
  needleEvaluation: 10,
  storiesTrain: 11,
  storiesValidation: 12,
  storiesEvaluation: 13,
  chatValidation: 14,
  longEvaluation: 15,
  mixture: 16,
} as const;

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
