import { afterEach, describe, expect, it } from 'vitest';
import type { Device } from '../../device/device.js';
import { STEP_SCALARS } from '../../tensor/optimizer.js';
import { Parameter } from '../../tensor/parameter.js';
import { Tensor } from '../../tensor/tensor.js';
import { cpu, devices, rounded, type TestDevice } from '../../testing/devices.js';
import { EmulatedCuda } from '../../testing/emulated-cuda.js';
import { randomValues, relativeError } from '../../testing/numbers.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { adamwStep } from '../adamw/reference.js';
import { castInto } from '../cast/op.js';
import { clipFactor, GradientNorms } from '../gradnorm/op.js';
import { Muon, type MuonOptions } from './op.js';
import { ITERATIONS, muonStep, NORM_EPSILON, orthogonalizeReference, QUINTIC } from './reference.js';

const SETTINGS = { betas: [0.9, 0.95], epsilon: 1e-8 } as const;

/** The rows of `vectors`, made orthonormal one after another. */
function orthonormal(count: number, size: number, seed: number): Float64Array[] {
  const rows: Float64Array[] = [];
  const values = randomValues(count * size, seed);
  for (let r = 0; r < count; r++) {
    let row = values.slice(r * size, (r + 1) * size);
    for (const other of rows) {
      const along = row.reduce((sum, x, i) => sum + x * other[i], 0);
      row = row.map((x, i) => x - along * other[i]);
    }
    const length = Math.sqrt(row.reduce((sum, x) => sum + x * x, 0));
    rows.push(row.map((x) => x / length));
  }
  return rows;
}

describe('muon reference', () => {
  // X = sum of s u vᵀ: an odd polynomial of X is the sum of p(s) u vᵀ. No matrix product is needed to know the result.
  it.each([
    [5, 9],
    [9, 5],
    [6, 6],
  ])('maps the singular values of a %i x %i matrix, which come to lie near 1', (rows, columns) => {
    const rank = Math.min(rows, columns);
    const [u, v] = [orthonormal(rank, rows, 1), orthonormal(rank, columns, 2)];
    const singular = Float64Array.from({ length: rank }, (_, i) => 10 * 0.5 ** i);
    const sumOf = (values: Float64Array) =>
      Float64Array.from({ length: rows * columns }, (_, at) => {
        const [i, j] = [Math.floor(at / columns), at % columns];
        return values.reduce((sum, s, k) => sum + s * u[k][i] * v[k][j], 0);
      });
    const norm = Math.sqrt(singular.reduce((sum, s) => sum + s * s, 0));
    let mapped = singular.map((s) => s / (norm + NORM_EPSILON));
    for (let i = 0; i < ITERATIONS; i++)
      mapped = mapped.map((s) => QUINTIC[0] * s + QUINTIC[1] * s ** 3 + QUINTIC[2] * s ** 5);
    for (const s of mapped) expect(Math.abs(s - 1)).toBeLessThan(0.35);
    expect(relativeError(orthogonalizeReference(sumOf(singular), rows, columns), sumOf(mapped))).toBeLessThan(1e-12);
  });

  it('moves by 0.2 sqrt(max(rows, columns)) times an almost orthogonal matrix, so by an RMS of about 0.2', () => {
    const [rows, columns] = [8, 32];
    const [value, average] = [new Float64Array(rows * columns), new Float64Array(rows * columns)];
    const settings = { learningRate: 1, momentum: 0.95, weightDecay: 0, gradientScale: 1 };
    muonStep(value, randomValues(rows * columns, 3), average, rows, columns, settings);
    const rms = Math.sqrt(value.reduce((sum, x) => sum + x * x, 0) / value.length);
    expect(rms).toBeGreaterThan(0.16);
    expect(rms).toBeLessThan(0.24);
  });

  it('decays the weight and takes the gradient times its factor', () => {
    const step = (gradient: Float64Array, gradientScale: number, weightDecay: number) => {
      const [value, average] = [Float64Array.of(1, 2, 3, 4), new Float64Array(4)];
      muonStep(value, gradient, average, 2, 2, { learningRate: 0.1, momentum: 0.9, weightDecay, gradientScale });
      return { value, average };
    };
    const gradient = Float64Array.of(1, -2, 0.5, 1);
    expect([...step(gradient, 0.5, 0).average]).toEqual([...gradient].map((g) => (1 - 0.9) * g * 0.5));
    const [plain, decayed] = [step(gradient, 1, 0).value, step(gradient, 1, 0.5).value];
    for (let i = 0; i < 4; i++) expect(plain[i] - decayed[i]).toBeCloseTo(0.1 * 0.5 * (i + 1), 12);
    expect([...step(new Float64Array(4), 1, 0).value]).toEqual([1, 2, 3, 4]);
  });
});

/** CUDA kernels are tested without a GPU too: one device per process, and small shapes. */
let emulated: EmulatedCuda | null = null;
function emulatedDevice(): Device {
  emulated ??= new EmulatedCuda();
  return emulated;
}
const tested: TestDevice[] = [
  ...devices(),
  { name: 'emulated CUDA', device: emulatedDevice, dtype: 'f32' },
  { name: 'emulated CUDA in bf16', device: emulatedDevice, dtype: 'bf16' },
];

/** Matrices of a fused projection, tall ones, wide ones, and one of more than a piece; then parameters that are none. */
const MATRICES: readonly (readonly [name: string, rows: readonly number[], columns: number])[] = [
  ['qkv', [24, 8, 8], 20],
  ['up', [40], 12],
  ['down', [12], 40],
  ['wide', [9], 1900],
  ['down2', [12], 40],
];
const VECTORS = { gain: 20, bias: 3 };

interface Reference {
  readonly name: string;
  readonly values: Float64Array;
  readonly gradient: (step: number) => Float64Array;
  update(gradient: Float64Array, step: number, learningRate: number, gradientScale: number): void;
}

function references(momentum: number, weightDecay: number, ratio: number): Reference[] {
  const matrices = MATRICES.map(([name, parts, columns], index): Reference => {
    const size = columns * parts.reduce((sum, rows) => sum + rows, 0);
    const [values, average] = [randomValues(size, index + 1), new Float64Array(size)];
    return {
      name,
      values,
      gradient: (step) => randomValues(size, 100 * step + index),
      update(gradient, _, learningRate, gradientScale) {
        const settings = { learningRate: learningRate * ratio, momentum, weightDecay, gradientScale };
        let first = 0;
        for (const rows of parts) {
          const own = (all: Float64Array) => all.subarray(first, first + rows * columns);
          muonStep(own(values), own(gradient), own(average), rows, columns, settings);
          first += rows * columns;
        }
      },
    };
  });
  const vectors = Object.entries(VECTORS).map(([name, size], index): Reference => {
    const values = randomValues(size, 50 + index);
    const [m, v] = [new Float64Array(size), new Float64Array(size)];
    return {
      name,
      values,
      gradient: (step) => randomValues(size, 100 * step + 50 + index),
      update: (gradient, step, learningRate, gradientScale) =>
        adamwStep(values, gradient, m, v, step, { ...SETTINGS, learningRate, gradientScale, weightDecay }),
    };
  });
  return [...matrices, ...vectors];
}

function setGradient(parameter: Parameter, values: ArrayLike<number>): void {
  const slot = parameter.value.storage.leaf!;
  slot.gradient.write(values);
  slot.filled = true;
}

describe.each(tested)('Muon on $name', ({ device, dtype }) => {
  const owned: { free(): void }[] = [];
  const own = <T extends { free(): void }>(thing: T): T => {
    owned.push(thing);
    return thing;
  };
  afterEach(() => {
    for (const thing of owned.splice(0)) thing.free();
    expect(device().pool.bytesInUse).toBe(0);
  });

  function createParameters(): Parameter[] {
    const matrices = MATRICES.map(([name, parts, columns]) => {
      const shape = [parts.reduce((sum, rows) => sum + rows, 0), columns];
      return own(new Parameter(device(), name, shape, parts));
    });
    const vectors = Object.entries(VECTORS).map(([name, size]) => own(new Parameter(device(), name, [size])));
    return [...matrices, ...vectors];
  }

  function createMuon(parameters: readonly Parameter[], weightDecay: number, options: MuonOptions = {}): Muon {
    const trained = parameters.map((parameter) => ({ parameter, weightDecay }));
    return own(new Muon(device(), trained, { ...SETTINGS, dtype, ...options }));
  }

  // Small singular values grow by 3.4 to the fifth, and their errors with them. In bf16 the error of an update is about 1 %
  // of the update.
  const limit = dtype === 'f32' ? 2e-4 : 2e-2;

  /** Errors of weights are taken relative to how far they have moved. */
  function expectMoved(
    parameters: readonly Parameter[],
    expected: readonly Reference[],
    from: readonly Float64Array[],
  ) {
    parameters.forEach(({ name, value }, k) => {
      const moved = (values: ArrayLike<number>) => Float64Array.from(values, (x, i) => x - from[k][i]);
      const own = name in VECTORS ? 1e-3 : limit;
      expect(relativeError(moved(value.read()), moved(expected[k].values)), name).toBeLessThan(own);
    });
  }

  it('follows the reference for some steps, AdamW for what is no matrix', () => {
    const expected = references(0.9, 0.1, 0.5);
    const parameters = createParameters();
    parameters.forEach(({ value }, k) => {
      value.write(expected[k].values);
    });
    const start = expected.map(({ values }) => values.slice());
    const optimizer = createMuon(parameters, 0.1, { momentum: 0.9, learningRateRatio: 0.5 });
    for (let step = 1; step <= 3; step++) {
      const [learningRate, gradientScale] = [0.02 / step, 1 / step];
      expected.forEach((reference, k) => {
        const gradient = reference.gradient(step);
        setGradient(parameters[k], gradient);
        reference.update(gradient, step, learningRate, gradientScale);
      });
      optimizer.step({ learningRate, gradientScale });
      expect(parameters.every(({ gradient }) => gradient === null)).toBe(true);
    }
    expect(optimizer.steps).toBe(3);
    expectMoved(parameters, expected, start);
  });

  it('follows the reference with its numbers on the device, clipping included, and changes nothing at NaN', () => {
    const expected = references(0.95, 0, 1);
    const parameters = createParameters();
    parameters.forEach(({ value }, k) => {
      value.write(expected[k].values);
    });
    const start = expected.map(({ values }) => values.slice());
    const optimizer = createMuon(parameters, 0);
    const norms = own(new GradientNorms(device()));
    const launch = (learningRate: number) => {
      const numbers = optimizer.nextStep({ learningRate, maxNorm: 20 });
      const scalars = Tensor.from(device(), numbers, [STEP_SCALARS]);
      optimizer.stepOnDevice(scalars, norms.launch(parameters.map(({ gradient }) => gradient!)));
      scalars.free();
    };
    for (let step = 1; step <= 2; step++) {
      const gradients = expected.map(({ gradient }) => gradient(step));
      parameters.forEach((parameter, k) => {
        setGradient(parameter, gradients[k]);
      });
      launch(0.01);
      const norm = Math.sqrt(gradients.flatMap((list) => [...list]).reduce((sum, x) => sum + x * x, 0));
      expect(norm).toBeGreaterThan(20);
      expected.forEach((reference, k) => {
        reference.update(gradients[k], step, 0.01, clipFactor(norm, 20));
      });
    }
    expectMoved(parameters, expected, start);
    const bytes = () =>
      [...parameters.map(({ value }) => value), ...optimizer.state.values()].map((t) => t.readBytes());
    const before = bytes();
    setGradient(parameters[1], new Float32Array(480).fill(Number.NaN));
    launch(0.01);
    expect(bytes()).toEqual(before);
  });

  it('continues bitwise from its state, whose names say which optimizer it is of', () => {
    const run = (
      from: { values: Uint8Array[]; state: Map<string, Uint8Array>; steps: number } | null,
      steps: number,
    ) => {
      const parameters = createParameters();
      const optimizer = createMuon(parameters, 0.1);
      parameters.forEach(({ value }, k) => {
        if (from) value.writeBytes(from.values[k]);
        else value.write(randomValues(value.size, k));
      });
      if (from) for (const [name, tensor] of optimizer.state) tensor.writeBytes(from.state.get(name)!);
      if (from) optimizer.steps = from.steps;
      while (optimizer.steps < steps) {
        parameters.forEach((parameter, k) => {
          setGradient(parameter, randomValues(parameter.value.size, 10 * optimizer.steps + k));
        });
        optimizer.step({ learningRate: 0.01 });
      }
      const state = new Map([...optimizer.state].map(([name, tensor]) => [name, tensor.readBytes()]));
      return { values: parameters.map(({ value }) => value.readBytes()), state, steps: optimizer.steps };
    };
    const whole = run(null, 4);
    expect(run(run(null, 2), 4)).toEqual(whole);
    const matrices = MATRICES.map(([name]) => `${name}.momentum`);
    expect([...whole.state.keys()]).toEqual([...matrices, 'gain.m', 'gain.v', 'bias.m', 'bias.v']);
  });

  it('leaves parameters without gradient alone, and keeps gradients on request', () => {
    const parameters = createParameters();
    for (const { value } of parameters) value.write(new Float32Array(value.size).fill(1));
    const optimizer = createMuon(parameters, 1);
    setGradient(parameters[2], randomValues(480, 1));
    optimizer.step({ learningRate: 0.1, keepGradients: true });
    expect(parameters[2].gradient).not.toBeNull();
    const changed = parameters.filter(({ value }) => value.read().some((x) => x !== 1)).map(({ name }) => name);
    expect(changed).toEqual(['down']);
  });

  if (dtype === 'bf16')
    it('writes the rounded copy that products are computed with', () => {
      const parameters = createParameters();
      for (const { value } of parameters) value.write(randomValues(value.size, 3));
      const copies = parameters.map((one) => one.as('bf16', (from, into) => castInto(device(), from, into)));
      const optimizer = createMuon(parameters, 0.1);
      for (const parameter of parameters) setGradient(parameter, randomValues(parameter.value.size, 4));
      optimizer.step({ learningRate: 0.1 });
      parameters.forEach(({ value }, k) => {
        expect(relativeError(copies[k].read(), rounded(Float64Array.from(value.read()), 'bf16'))).toBe(0);
      });
    });
});

describe('Muon', () => {
  it('refuses settings that cannot work', () => {
    const parameter = new Parameter(cpu(), 'w', [2, 3], [2]);
    const trained = [{ parameter, weightDecay: 0 }];
    expect(() => new Muon(cpu(), [...trained, ...trained])).toThrow('Muon: two parameters are named w');
    expect(() => new Muon(cpu(), trained, { momentum: 1 })).toThrow('Muon: momentum must be from 0 to below 1, not 1');
    expect(() => new Muon(cpu(), trained, { learningRateRatio: 0 })).toThrow('learningRateRatio must be above 0');
    expect(() => new Muon(cpu(), trained, { dtype: 'bf16' })).toThrow('the CPU computes in f32');
    const optimizer = new Muon(cpu(), trained);
    expect(() => optimizer.step({ learningRate: Number.NaN })).toThrow('Muon: learningRate must be a finite number');
    expect(optimizer.steps).toBe(0);
    expect(() => new Parameter(cpu(), 'w', [4, 3], [3])).toThrow('w: matrices of 3 rows are not those of [4, 3]');
    optimizer.free();
    parameter.free();
  });

  it('gives the same bytes for any number of threads', () => {
    expectSameForAnyThreadCount(() => {
      const parameter = new Parameter(cpu(), 'w', [96, 200], [64, 32]);
      parameter.value.write(randomValues(96 * 200, 1));
      const optimizer = new Muon(cpu(), [{ parameter, weightDecay: 0.1 }]);
      setGradient(parameter, randomValues(96 * 200, 2));
      optimizer.step({ learningRate: 0.1 });
      const bytes = parameter.value.readBytes();
      optimizer.free();
      parameter.free();
      return [bytes];
    });
  });
});
