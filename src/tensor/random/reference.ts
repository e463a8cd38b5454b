/**
 * The same random numbers in TypeScript, one at a time. Float64 with + - * / and sqrt only, which round the same
 * everywhere; log, sin and cos of the standard library do not, so they are series here and in the kernels.
 */
import type { RandomSource } from './op.js';

type Words = readonly [number, number, number, number];

/** Philox4x32-10: four random 32-bit words for a counter of four words and a key of two. */
export function philox(counter: Words, key: readonly [number, number]): Words {
  let [c0, c1, c2, c3] = counter;
  let [k0, k1] = key;
  for (let round = 0; round < 10; round++) {
    const [high0, low0] = multiply(0xd2511f53, c0);
    const [high1, low1] = multiply(0xcd9e8d57, c2);
    [c0, c1, c2, c3] = [(high1 ^ c1 ^ k0) >>> 0, low1, (high0 ^ c3 ^ k1) >>> 0, low0];
    k0 = (k0 + 0x9e3779b9) >>> 0;
    k1 = (k1 + 0xbb67ae85) >>> 0;
  }
  return [c0, c1, c2, c3];
}

export function uniformReference(source: RandomSource, count: number): Float32Array {
  const { offset = 0 } = source;
  return new Float32Array(count).map((_, i) => {
    const at = offset + i;
    return (block(source, Math.floor(at / 4))[at % 4] >>> 8) * 2 ** -24;
  });
}

/** Box-Muller: a block of four words gives a radius and an angle, and those two values. */
export function normalReference(source: RandomSource, count: number, standardDeviation = 1): Float32Array {
  const { offset = 0 } = source;
  return new Float32Array(count).map((_, i) => {
    const at = offset + i;
    return normalPair(block(source, Math.floor(at / 2)))[at % 2] * standardDeviation;
  });
}

/** floor(r * limit / 2^64) for 64 random bits r. */
export function integersReference(source: RandomSource, count: number, limit: number): Int32Array {
  const { offset = 0 } = source;
  return new Int32Array(count).map((_, i) => {
    const at = offset + i;
    const words = block(source, Math.floor(at / 2));
    const bits = (BigInt(words[(at % 2) * 2]) << 32n) | BigInt(words[(at % 2) * 2 + 1]);
    return Number((bits * BigInt(limit)) >> 64n);
  });
}

/** The words of block `index`: the seed is the key, the stream the upper half of the counter. */
function block({ seed, stream }: RandomSource, index: number): Words {
  return philox([...split(index), ...split(stream)], split(seed));
}

function split(value: number): [number, number] {
  return [value >>> 0, Math.floor(value / 2 ** 32)];
}

/** The product of two 32-bit numbers as [high, low]. */
function multiply(a: number, b: number): [number, number] {
  // By halves of 16 bits: every sum is below 2^53, and numbers are much faster than BigInt.
  const [aHigh, aLow, bHigh, bLow] = [a >>> 16, a & 0xffff, b >>> 16, b & 0xffff];
  const middle = aHigh * bLow + Math.floor((aLow * bLow) / 0x10000);
  const other = aLow * bHigh + (middle % 0x10000);
  return [aHigh * bHigh + Math.floor(middle / 0x10000) + Math.floor(other / 0x10000), Math.imul(a, b) >>> 0];
}

export function normalPair([w0, w1, w2, w3]: Words): [number, number] {
  const unit = ((w0 >>> 5) * 2 ** 26 + (w1 >>> 6) + 1) * 2 ** -53; // (0, 1], 53 bits
  const radius = Math.sqrt(-2 * logarithm(unit));
  // Two bits choose the quadrant, 52 the place in it, counted from its middle: the series see at most pi/4.
  const inside = ((w2 & 0x3fffffff) * 2 ** 22 + (w3 >>> 10)) * 2 ** -52 - 0.5;
  const angle = inside * (Math.PI / 2);
  const [c, s] = [cosine(angle), sine(angle)];
  const turned: readonly (readonly [number, number])[] = [
    [c, s],
    [-s, c],
    [-c, -s],
    [s, -c],
  ];
  const [x, y] = turned[w2 >>> 30];
  return [radius * x, radius * y];
}

/** log(x) = e log 2 + 2 artanh((m-1)/(m+1)) for x = m 2^e, m near 1. For normal numbers above 0. */
function logarithm(x: number): number {
  const bits = new DataView(new ArrayBuffer(8));
  bits.setFloat64(0, x);
  let exponent = (bits.getUint32(0) >>> 20) - 1023;
  bits.setUint32(0, (bits.getUint32(0) & 0xfffff) | 0x3ff00000);
  let mantissa = bits.getFloat64(0);
  if (mantissa > Math.SQRT2) {
    mantissa *= 0.5;
    exponent += 1;
  }
  const t = (mantissa - 1) / (mantissa + 1);
  const t2 = t * t;
  let series = 1 / 23;
  for (let odd = 21; odd >= 1; odd -= 2) series = series * t2 + 1 / odd;
  return exponent * Math.LN2 + 2 * t * series;
}

function cosine(x: number): number {
  const x2 = x * x;
  let series = 1;
  for (let even = 18; even >= 2; even -= 2) series = 1 - series * x2 * (1 / (even * (even - 1)));
  return series;
}

function sine(x: number): number {
  const x2 = x * x;
  let series = 1;
  for (let even = 18; even >= 2; even -= 2) series = 1 - series * x2 * (1 / (even * (even + 1)));
  return x * series;
}
