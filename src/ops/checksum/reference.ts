/** The checksum of `op.ts` with big integers, one word after the other. */

const MASK = 2n ** 64n - 1n;
/** 2^64 divided by the golden ratio, odd. */
export const GOLDEN = 0x9e3779b97f4a7c15n;

/** The output function of the SplitMix64 generator: a bijection of 64-bit words in which every input bit matters. */
export function mix(word: bigint): bigint {
  let x = word & MASK;
  x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return x ^ (x >> 31n);
}

/** Sum of mix(word i + (i + 1) * GOLDEN) modulo 2^64 over little-endian words, the last filled with zeros, plus the length. */
export function checksumReference(bytes: Uint8Array): bigint {
  const words = Math.ceil(bytes.length / 8);
  const padded = new Uint8Array(8 * words);
  padded.set(bytes);
  const view = new DataView(padded.buffer);
  let sum = BigInt(bytes.length);
  for (let i = 0; i < words; i++) sum += mix(view.getBigUint64(8 * i, true) + BigInt(i + 1) * GOLDEN);
  return sum & MASK;
}
