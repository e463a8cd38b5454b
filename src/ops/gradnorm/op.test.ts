import { describe, expect, it } from 'vitest';
import { Tensor } from '../../tensor/tensor.js';
import { cpu, devices } from '../../testing/devices.js';
import { randomValues } from '../../testing/numbers.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { clipFactor, GradientNorms, gradientNorm } from './op.js';
import { gradientNormReference } from './reference.js';

describe('clipFactor', () => {
  it.each([
    [2, 1, 0.5],
    [1, 1, 1],
    [0.5, 1, 1],
    [0, 1, 1],
    [5, 0, 0],
    [5, Number.POSITIVE_INFINITY, 1],
    [Number.NaN, 1, Number.NaN],
    [Number.POSITIVE_INFINITY, 1, Number.NaN],
  ])('for norm %f and limit %f is %f', (norm, limit, factor) => {
    expect(clipFactor(norm, limit)).toBe(factor);
  });
});

describe.each(devices())('gradientNorm on $name', ({ device }) => {
  const normOf = (lists: readonly ArrayLike<number>[]) => {
    const tensors = lists.map((values) => Tensor.from(device(), values, [values.length]));
    const result = gradientNorm(device(), tensors);
    for (const tensor of tensors) tensor.free();
    expect(device().pool.bytesInUse).toBe(0);
    return result;
  };

  it.each([[[]], [[0]], [[1]], [[5, 0, 17]], [[16384, 16385, 3]], [[100_001]], [[3, 600_000, 0, 16384, 40]]])(
    'equals the reference for gradients of %j numbers',
    (sizes) => {
      const lists = sizes.map((size, i) => randomValues(size, i + 1));
      const [result, expected] = [normOf(lists), gradientNormReference(lists)];
      const close = (actual: number, wanted: number) =>
        expect(Math.abs(actual - wanted)).toBeLessThanOrEqual(1e-13 * wanted);
      close(result.norm, expected.norm);
      expect(result.each.length).toBe(sizes.length);
      result.each.forEach((norm, i) => {
        close(norm, expected.each[i]);
      });
      expect(result.nonFinite).toBe(0);
    },
  );

  it('neither overflows nor underflows', () => {
    expect(normOf([Float32Array.of(3e38, 3e38)]).norm).toBeCloseTo(
      Math.hypot(Math.fround(3e38), Math.fround(3e38)),
      -26,
    );
    expect(normOf([Float32Array.of(3e-30, 4e-30)]).norm / 5e-30).toBeCloseTo(1, 6);
  });

  it('counts what is not finite and shows it in the norm', () => {
    const values = randomValues(20_000, 1);
    [0, 15, 16, 16384, 19_999].forEach((i) => {
      values[i] = Number.NaN;
    });
    const spoilt = normOf([randomValues(10, 2), values]);
    expect(spoilt.nonFinite).toBe(5);
    expect(spoilt.norm).toBeNaN();
    expect(Number.isFinite(spoilt.each[0])).toBe(true);
    const infinite = normOf([[1, Number.NEGATIVE_INFINITY, Number.POSITIVE_INFINITY]]);
    expect([infinite.nonFinite, infinite.norm]).toEqual([2, Number.POSITIVE_INFINITY]);
  });

  it('leaves the sums on the device, for other gradients too', () => {
    const lists = [randomValues(20_000, 1), randomValues(5, 2), Float64Array.of(3, 4)];
    const tensors = lists.map((values) => Tensor.from(device(), values, [values.length]));
    const norms = new GradientNorms(device());
    const sums = norms.launch(tensors.slice(0, 2)).read();
    expect(sums.length).toBe(6);
    expect(Math.sqrt(sums[4])).toBeCloseTo(gradientNormReference(lists.slice(0, 2)).norm, 10);
    norms.launch(tensors.slice(2));
    expect(norms.read()).toEqual({ norm: 5, each: [5], nonFinite: 0 });
    tensors[2].write([Number.NaN, 4]);
    norms.launch(tensors.slice(2));
    expect(norms.read().nonFinite).toBe(1);
    norms.free();
    for (const tensor of tensors) tensor.free();
    expect(device().pool.bytesInUse).toBe(0);
  });

  it('names the gradient of another type', () => {
    const ids = Tensor.zeros(device(), [2], 'i32');
    expect(() => gradientNorm(device(), [ids])).toThrow('gradientNorm: gradient 0 must be f32, not i32');
    ids.free();
  });
});

it('gives the same number for any number of threads', () => {
  const gradient = Tensor.from(cpu(), randomValues(500_009, 1), [500_009]);
  expectSameForAnyThreadCount(() => [new Uint8Array(Float64Array.of(gradientNorm(cpu(), [gradient]).norm).buffer)]);
  gradient.free();
});
