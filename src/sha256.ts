/**
 * SHA-256 in JavaScript, for modules that also run in a browser, whose own is asynchronous. For short texts: Node's is ten
 * times faster.
 */
import { utf8 } from './bytes.js';

const ROUNDS = 64;

/** The first 32 bits of the fraction of the `power`-th root of the first `count` primes. */
function fractions(count: number, power: number): Uint32Array {
  const words: number[] = [];
  for (let candidate = 2; words.length < count; candidate++) {
    let isPrime = true;
    for (let divisor = 2; divisor * divisor <= candidate; divisor++) isPrime &&= candidate % divisor !== 0;
    if (isPrime) words.push((candidate ** (1 / power) % 1) * 2 ** 32);
  }
  return Uint32Array.from(words);
}

const CONSTANTS = fractions(ROUNDS, 3);
const START = fractions(8, 2);

const rotated = (word: number, bits: number) => (word >>> bits) | (word << (32 - bits));

/** The digest of a text in hex digits. */
export function sha256(text: string): string {
  const content = utf8(text);
  const padded = new Uint8Array(Math.ceil((content.length + 9) / 64) * 64);
  padded.set(content);
  padded[content.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setBigUint64(padded.length - 8, BigInt(content.length) * 8n);
  const state = Uint32Array.from(START);
  const words = new Uint32Array(ROUNDS);
  for (let at = 0; at < padded.length; at += 64) {
    for (let i = 0; i < 16; i++) words[i] = view.getUint32(at + 4 * i);
    for (let i = 16; i < ROUNDS; i++) {
      const [early, late] = [words[i - 15], words[i - 2]];
      const low = rotated(early, 7) ^ rotated(early, 18) ^ (early >>> 3);
      const high = rotated(late, 17) ^ rotated(late, 19) ^ (late >>> 10);
      words[i] = words[i - 16] + low + words[i - 7] + high;
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < ROUNDS; i++) {
      const one = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25);
      const first = (h + one + ((e & f) ^ (~e & g)) + CONSTANTS[i] + words[i]) | 0;
      const second = ((rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + first) | 0, c, b, a, (first + second) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((word, i) => {
      state[i] += word;
    });
  }
  return Array.from(state, (word) => word.toString(16).padStart(8, '0')).join('');
}
