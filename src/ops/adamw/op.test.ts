import { afterEach, describe, expect, it } from 'vitest';
import type { Device } from '../../device/device.js';
import { STEP_SCALARS } from '../../tensor/optimizer.js';
import { Parameter } from '../../tensor/parameter.js';
import { Tensor } from '../../tensor/tensor.js';
import { cpu, devices, rounded, tolerance } from '../../testing/devices.js';
import { randomValues, relativeError } from '../../testing/numbers.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { castInto } from '../cast/op.js';
import { clipFactor, GradientNorms } from '../gradnorm/op.js';
import { AdamW } from './op.js';
import { adamwStep } from './reference.js';

function parameterWith(device: Device, name: string, values: ArrayLike<number>): Parameter {
  const parameter = new Parameter(device, name, [values.length]);
  parameter.value.write(values);
  return parameter;
}

/** The numbers of a step where the device finds them. */
function scalarsOf(device: Device, values: Float32Array): Tensor {
  return Tensor.from(device, values, [STEP_SCALARS]);
}

function setGradient(parameter: Parameter, values: ArrayLike<number>): void {
  const slot = parameter.value.storage.leaf!;
  slot.gradient.write(values);
  slot.filled = true;
}

describe('adamw reference', () => {
  it('moves by the learning rate against the sign of the first gradient', () => {
    const [value, m, v] = [Float64Array.of(1, 1, 1), new Float64Array(3), new Float64Array(3)];
    const settings = { learningRate: 0.1, betas: [0.9, 0.999], epsilon: 0, weightDecay: 0, gradientScale: 1 } as const;
    adamwStep(value, Float64Array.of(5, -0.01, 0.3), m, v, 1, settings);
    expect(relativeError(value, [0.9, 1.1, 0.9])).toBeLessThan(1e-12);
  });

  it('equals two steps worked out by hand', () => {
    // The first step: 0.99 of the value, less 0.1 g / (|g| + 0.001).
    const [value, m, v] = [Float64Array.of(1, -2), new Float64Array(2), new Float64Array(2)];
    const settings = {
      learningRate: 0.1,
      betas: [0.9, 0.99],
      epsilon: 1e-3,
      weightDecay: 0.1,
      gradientScale: 1,
    } as const;
    adamwStep(value, Float64Array.of(1, 0.5), m, v, 1, settings);
    expect(relativeError(value, [0.8900999000999, -2.0798003992015968])).toBeLessThan(1e-12);
    adamwStep(value, Float64Array.of(-2, 0.25), m, v, 2, settings);
    expect(relativeError(m, [-0.11, 0.07])).toBeLessThan(1e-12);
    expect(relativeError(v, [0.0499, 0.0031])).toBeLessThan(1e-12);
    const moved = [
      0.8900999000999 * 0.99 - (0.1 * (-0.11 / 0.19)) / (Math.sqrt(0.0499 / 0.0199) + 1e-3),
      -2.0798003992015968 * 0.99 - (0.1 * (0.07 / 0.19)) / (Math.sqrt(0.0031 / 0.0199) + 1e-3),
    ];
    expect(relativeError(value, moved)).toBeLessThan(1e-12);
  });
});

describe.each(devices())('AdamW on $name', ({ device, dtype }) => {
  const owned: { free(): void }[] = [];
  const own = <T extends { free(): void }>(thing: T): T => {
    owned.push(thing);
    return thing;
  };
  afterEach(() => {
    for (const thing of owned.splice(0)) thing.free();
    expect(device().pool.bytesInUse).toBe(0);
  });

  it('clears the gradients it has used, unless it is told to keep them', () => {
    const parameter = own(parameterWith(device(), 'w', [1, 2]));
    const optimizer = own(new AdamW(device(), [{ parameter, weightDecay: 0 }]));
    setGradient(parameter, [1, 1]);
    optimizer.step({ learningRate: 0.1, keepGradients: true });
    expect(parameter.gradient).not.toBeNull();
    optimizer.step({ learningRate: 0.1 });
    expect(parameter.gradient).toBeNull();
  });

  it('refuses a learning rate that is missing or would ruin the weights', () => {
    const parameter = own(parameterWith(device(), 'w', [1, 2]));
    const optimizer = own(new AdamW(device(), [{ parameter, weightDecay: 0 }]));
    for (const learningRate of [Number.NaN, -1, Number.POSITIVE_INFINITY, undefined as unknown as number]) {
      setGradient(parameter, [1, 1]);
      const message = `AdamW: learningRate must be a finite number of at least 0, not ${learningRate}`;
      expect(() => optimizer.step({ learningRate })).toThrow(message);
      expect(() => optimizer.nextStep({ learningRate })).toThrow(message);
    }
    expect([optimizer.steps, ...parameter.value.read()]).toEqual([0, 1, 2]);
  });

  it.each([1, 5, 16, 40001, 0])('follows the reference for ten steps with %i numbers', (count) => {
    const values = randomValues(count, 1);
    const parameter = own(parameterWith(device(), 'w', values));
    const settings = { betas: [0.9, 0.95], epsilon: 1e-8, weightDecay: 0.1 } as const;
    const optimizer = own(new AdamW(device(), [{ parameter, weightDecay: 0.1 }], settings));
    const [m, v] = [new Float64Array(count), new Float64Array(count)];
    for (let step = 1; step <= 10; step++) {
      const gradient = randomValues(count, 10 + step);
      const [learningRate, gradientScale] = [0.01 / step, 1 / step];
      setGradient(parameter, gradient);
      optimizer.step({ learningRate, gradientScale });
      adamwStep(values, gradient, m, v, step, { ...settings, learningRate, gradientScale });
    }
    expect(optimizer.steps).toBe(10);
    expect(relativeError(parameter.value.read(), values)).toBeLessThan(tolerance('f32'));
    expect(relativeError(optimizer.state.get('w.m')!.read(), m)).toBeLessThan(tolerance('f32'));
    expect(relativeError(optimizer.state.get('w.v')!.read(), v)).toBeLessThan(tolerance('f32'));
  });

  it('follows the reference with its numbers on the device, clipping included', () => {
    // One piece and a bit, several pieces, a number alone, nothing.
    const sizes = [20_000, 40_001, 1, 0, 16_384];
    const values = sizes.map((size, i) => randomValues(size, i + 1));
    const parameters = values.map((list, i) => own(parameterWith(device(), `w${i}`, list)));
    const decays = sizes.map((_, i) => (i % 2 === 0 ? 0.1 : 0));
    const trained = parameters.map((parameter, i) => ({ parameter, weightDecay: decays[i] }));
    const settings = { betas: [0.9, 0.95], epsilon: 1e-8 } as const;
    const optimizer = own(new AdamW(device(), trained, settings));
    const norms = own(new GradientNorms(device()));
    const moments = sizes.map((size) => ({ m: new Float64Array(size), v: new Float64Array(size) }));
    for (let step = 1; step <= 5; step++) {
      const gradients = sizes.map((size, i) => randomValues(size, 10 * step + i));
      parameters.forEach((parameter, i) => {
        setGradient(parameter, gradients[i]);
      });
      const [learningRate, maxNorm] = [0.01 / step, step === 1 ? 0 : 50];
      const scalars = scalarsOf(device(), optimizer.nextStep({ learningRate, maxNorm }));
      const sums = norms.launch(parameters.map(({ gradient }) => gradient!));
      optimizer.stepOnDevice(scalars, sums);
      scalars.free();
      const norm = Math.sqrt(gradients.flatMap((list) => [...list]).reduce((sum, value) => sum + value * value, 0));
      const gradientScale = maxNorm > 0 ? clipFactor(norm, maxNorm) : 1;
      values.forEach((list, i) => {
        const { m, v } = moments[i];
        const weightDecay = decays[i];
        adamwStep(list, gradients[i], m, v, step, { ...settings, learningRate, gradientScale, weightDecay });
      });
    }
    expect(optimizer.steps).toBe(5);
    parameters.forEach((parameter, i) => {
      expect(relativeError(parameter.value.read(), values[i])).toBeLessThan(tolerance('f32'));
      const m = optimizer.state.get(`w${i}.m`)!.read();
      expect(relativeError(m, moments[i].m)).toBeLessThan(tolerance('f32'));
    });
  });

  it('changes nothing on the device where a gradient is not finite', () => {
    const parameters = ['a', 'b'].map((name) => own(parameterWith(device(), name, [1, 2, 3])));
    const optimizer = own(
      new AdamW(
        device(),
        parameters.map((parameter) => ({ parameter, weightDecay: 1 })),
      ),
    );
    const norms = own(new GradientNorms(device()));
    const step = (last: number) => {
      setGradient(parameters[0], [1, 1, 1]);
      setGradient(parameters[1], [1, 1, last]);
      const scalars = scalarsOf(device(), optimizer.nextStep({ learningRate: 0.1, maxNorm: 1 }));
      optimizer.stepOnDevice(scalars, norms.launch(parameters.map(({ gradient }) => gradient!)));
      scalars.free();
    };
    for (const bad of [Number.NaN, Number.POSITIVE_INFINITY]) {
      step(bad);
      for (const { value } of parameters) expect([...value.read()]).toEqual([1, 2, 3]);
      expect([...optimizer.state.get('a.m')!.read()]).toEqual([0, 0, 0]);
    }
    step(1);
    expect(parameters.every(({ value }) => value.read()[0] < 1)).toBe(true);
  });

  it('leaves a parameter without gradient alone on the device, and takes one that gets a gradient later', () => {
    const [a, b] = ['a', 'b'].map((name) => own(parameterWith(device(), name, [1, 2])));
    const optimizer = own(
      new AdamW(
        device(),
        [a, b].map((parameter) => ({ parameter, weightDecay: 1 })),
      ),
    );
    const step = () => {
      const scalars = scalarsOf(device(), optimizer.nextStep({ learningRate: 0.1 }));
      optimizer.stepOnDevice(scalars);
      scalars.free();
    };
    setGradient(a, [1, 1]);
    step();
    expect([...b.value.read()]).toEqual([1, 2]);
    expect(relativeError(a.value.read(), [0.8, 1.7])).toBeLessThan(1e-6);
    setGradient(b, [1, 1]);
    step();
    expect(b.value.read()[0]).toBeLessThan(1);
  });

  if (dtype === 'bf16')
    it('writes the rounded copy that products are computed with', () => {
      const parameter = own(parameterWith(device(), 'w', randomValues(1003, 1)));
      const copy = parameter.as('bf16', (from, into) => castInto(device(), from, into));
      const optimizer = own(new AdamW(device(), [{ parameter, weightDecay: 0.1 }]));
      const current = () => rounded(Float64Array.from(parameter.value.read()), 'bf16');
      setGradient(parameter, randomValues(1003, 2));
      optimizer.step({ learningRate: 0.1 });
      expect(relativeError(copy.read(), current())).toBe(0);
      const scalars = scalarsOf(device(), optimizer.nextStep({ learningRate: 0.1 }));
      optimizer.stepOnDevice(scalars);
      scalars.free();
      expect(relativeError(copy.read(), current())).toBe(0);
    });

  it('continues bitwise from its state', () => {
    const run = (from: { value: Uint8Array; state: Map<string, Uint8Array>; steps: number } | null, steps: number) => {
      const parameter = parameterWith(device(), 'w', randomValues(100, 1));
      const optimizer = new AdamW(device(), [{ parameter, weightDecay: 0.1 }]);
      if (from) {
        parameter.value.writeBytes(from.value);
        for (const [name, tensor] of optimizer.state) tensor.writeBytes(from.state.get(name)!);
        optimizer.steps = from.steps;
      }
      while (optimizer.steps < steps) {
        setGradient(parameter, randomValues(100, 10 + optimizer.steps));
        optimizer.step({ learningRate: 0.01 });
      }
      const state = new Map([...optimizer.state].map(([name, tensor]) => [name, tensor.readBytes()]));
      const result = { value: parameter.value.readBytes(), state, steps: optimizer.steps };
      parameter.free();
      optimizer.free();
      return result;
    };
    expect(run(run(null, 3), 6)).toEqual(run(null, 6));
  });

  it('decays each parameter by its own rate, by the right amount when it is tiny', () => {
    const names = ['decayed', 'kept'];
    const parameters = names.map((name) => own(parameterWith(device(), name, randomValues(1000, 1))));
    const trained = parameters.map((parameter, i) => ({ parameter, weightDecay: i === 0 ? 0.1 : 0 }));
    const optimizer = own(new AdamW(device(), trained));
    const before = randomValues(1000, 1);
    for (const parameter of parameters) setGradient(parameter, new Float32Array(1000));
    optimizer.step({ learningRate: 1e-5 });
    const [decayed, kept] = parameters.map((parameter) => parameter.value.read());
    expect(relativeError(kept, before)).toBe(0);
    const total = (values: ArrayLike<number>) => Array.from(values).reduce((sum, value) => sum + Math.abs(value), 0);
    const share = 1 - total(decayed) / total(before);
    expect(Math.abs(share / 1e-6 - 1)).toBeLessThan(0.005);
  });

  it('leaves a parameter without gradient alone', () => {
    const [a, b] = ['a', 'b'].map((name) => own(parameterWith(device(), name, [1, 2])));
    const optimizer = own(
      new AdamW(
        device(),
        [a, b].map((parameter) => ({ parameter, weightDecay: 1 })),
      ),
    );
    setGradient(a, [1, 1]);
    optimizer.step({ learningRate: 0.1 });
    expect([...b.value.read()]).toEqual([1, 2]);
    expect(relativeError(a.value.read(), [0.8, 1.7])).toBeLessThan(1e-6);
  });

  it('lists its state by name, in order', () => {
    const parameters = ['b', 'a'].map((name) => own(parameterWith(device(), name, [0])));
    const optimizer = own(
      new AdamW(
        device(),
        parameters.map((parameter) => ({ parameter, weightDecay: 0 })),
      ),
    );
    expect([...optimizer.state.keys()]).toEqual(['b.m', 'b.v', 'a.m', 'a.v']);
  });

  it('propagates NaN to its own number only', () => {
    const parameter = own(parameterWith(device(), 'w', [1, 2, 3]));
    const optimizer = own(new AdamW(device(), [{ parameter, weightDecay: 0 }]));
    setGradient(parameter, [1, Number.NaN, 1]);
    optimizer.step({ learningRate: 0.1 });
    expect(Array.from(parameter.value.read(), Number.isNaN)).toEqual([false, true, false]);
  });

  it('refuses settings that cannot work', () => {
    const parameter = own(parameterWith(device(), 'w', [1]));
    const entry = { parameter, weightDecay: 0 };
    expect(() => new AdamW(device(), [entry, entry])).toThrow('AdamW: two parameters are named w');
    expect(() => new AdamW(device(), [entry], { betas: [0.9, 1] })).toThrow('AdamW: betas must be from 0 to below 1');
    expect(() => new AdamW(device(), [entry], { epsilon: -1 })).toThrow('AdamW: epsilon must be at least 0');
  });
});

it('gives the same numbers for any number of threads', () => {
  expectSameForAnyThreadCount(() => {
    const parameter = parameterWith(cpu(), 'w', randomValues(100_003, 1));
    const optimizer = new AdamW(cpu(), [{ parameter, weightDecay: 0.1 }]);
    for (const seed of [2, 3]) {
      setGradient(parameter, randomValues(100_003, seed));
      optimizer.step({ learningRate: 0.01 });
    }
    const bytes = [parameter.value, ...optimizer.state.values()].map((tensor) => tensor.readBytes());
    parameter.free();
    optimizer.free();
    return bytes;
  });
});
