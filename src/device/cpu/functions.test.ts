/** Powers and logarithms of the CPU kernels against float64, over the whole range of a float. */
import { expect, it } from 'vitest';
import { Tensor } from '../../tensor/tensor.js';
import { cpu } from '../../testing/devices.js';
import { defineKernels } from '../device.js';

const kernels = defineKernels(new URL('./testing/functions.ts', import.meta.url).href, {
  own_functions: ['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'i64'],
});

function compute(x: Float32Array) {
  using input = Tensor.from(cpu(), x, [x.length]);
  const outputs = Array.from({ length: 4 }, () => Tensor.empty(cpu(), [x.length], 'f64'));
  const [powers, natural, binary, exponentials] = outputs;
  cpu().kernels(kernels).own_functions(input, powers, natural, binary, exponentials, x.length);
  const [a, b, c, d] = outputs.map((tensor) => tensor.read() as Float64Array);
  for (const tensor of outputs) tensor.free();
  return { powers: a, natural: b, binary: c, exponentials: d };
}

const largest = (x: Float32Array, error: (i: number) => number) =>
  x.reduce((most, _, i) => Math.max(most, error(i)), 0);
const relative = (got: number, expected: number) => Math.abs(got - expected) / Math.abs(expected);

/** Every exponent of a normal float with mantissas spread evenly, and floats next to 1. */
function positiveFloats(): Float32Array {
  const bits = new Uint32Array(254 * 2048 + 4096);
  for (let e = 0; e < 254; e++)
    for (let m = 0; m < 2048; m++) bits[e * 2048 + m] = ((e + 1) * 2 ** 23 + ((m * 4099 + e * 31) % 2 ** 23)) >>> 0;
  for (let i = 0; i < 4096; i++) bits[254 * 2048 + i] = 0x3f800000 - 2048 + i;
  return new Float32Array(bits.buffer);
}

it('2^x and e^x are within 2.2e-7 of float64', () => {
  const x = Float32Array.from({ length: 500_001 }, (_, i) => -126 + (254 * i) / 500_001);
  const { powers } = compute(x);
  expect(largest(x, (i) => relative(powers[i], 2 ** x[i]))).toBeLessThan(2.2e-7);
  const y = Float32Array.from({ length: 200_001 }, (_, i) => -20 + (40 * i) / 200_000);
  const { exponentials } = compute(y);
  // The argument of 2^x is rounded: its error of half a unit in the last place counts in full.
  expect(
    largest(y, (i) => relative(exponentials[i], Math.exp(y[i])) / (2.2e-7 + 1.2e-7 * Math.abs(y[i]))),
  ).toBeLessThan(1);
});

it('natural logarithms are within 1e-15 of float64, also next to 1; those of base 2 are rounded once more', () => {
  const x = positiveFloats().filter((value) => value !== 1);
  const { natural, binary } = compute(x);
  expect(largest(x, (i) => relative(natural[i], Math.log(x[i])))).toBeLessThan(1e-15);
  expect(largest(x, (i) => relative(binary[i], Math.log2(x[i])))).toBeLessThan(6e-8);
});

it('hold at the ends of the range', () => {
  const { powers, natural, binary } = compute(Float32Array.of(-Infinity, -127, -126, 0, 127, 128, 200, Infinity, NaN));
  expect([...powers]).toEqual([0, 0, 2 ** -126, 1, 2 ** 127, Infinity, Infinity, Infinity, NaN]);
  expect([...natural.slice(0, 4), ...natural.slice(7)]).toEqual([NaN, NaN, NaN, -Infinity, Infinity, NaN]);
  expect([...binary.slice(0, 4), ...binary.slice(7)]).toEqual([NaN, NaN, NaN, -Infinity, Infinity, NaN]);
  const powersOf2 = compute(Float32Array.of(2 ** -149, 2 ** -126, 0.5, 1, 8, 2 ** 127));
  expect([...powersOf2.binary]).toEqual([-149, -126, -1, 0, 3, 127]);
});
