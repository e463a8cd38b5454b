/**
 * The hash of a word in a table. Every thread draws a seed: a text could otherwise hold thousands of words of one hash, and
 * each would be compared with all others.
 */
import { randomInt } from 'node:crypto';

const SEED = randomInt(2 ** 32) | 0;

/** The hash of units [from, to). */
export function hashOfUnits(units: Uint16Array, from: number, to: number, seed = SEED): number {
  let hash = seed ^ (to - from);
  for (let index = from; index < to; index++) hash = Math.imul(hash ^ units[index], 0x01000193) ^ (hash >>> 15);
  return hash ^ (hash >>> 13);
}
