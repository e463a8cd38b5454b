/** The linear layers between two attentions against float64, on a GPU and on an emulated one. */
import { describe, expect, it } from 'vitest';
import { cudaAbsence } from '../../../../device/cuda/cuda.js';
import type { CudaRuntime } from '../../../../device/cuda/runtime.js';
import type { Device } from '../../../../device/device.js';
import { Tape } from '../../../../tensor/tape.js';
import { cuda, rounded, tolerance } from '../../../../testing/devices.js';
import { EmulatedCuda } from '../../../../testing/emulated-cuda.js';
import { randomValues, relativeError } from '../../../../testing/numbers.js';
import { RecordingCuda } from '../../../../testing/recording-cuda.js';
import { siluForward, swigluForward } from '../../../activation/reference.js';
import { linearForward } from '../../../linear/reference.js';
import { rmsnormForward } from '../../../rmsnorm/reference.js';
import { type LayerSizes, StepBetween } from './between.js';

const EPSILON = 1e-5;
/** The 125M shape. */
const SIZES: LayerSizes = {
  layers: 12,
  dim: 768,
  attended: 768,
  hidden: 3072,
  isGated: false,
  projection: 1536,
  gate: 36,
};
/** No size is a multiple of another, the warps have unequal shares, and blocks have several tiles or none. */
const SMALL: LayerSizes = {
  layers: 3,
  dim: 96,
  attended: 64,
  hidden: 352,
  isGated: false,
  projection: 168,
  gate: 12,
};
const bf16 = (count: number, seed: number, spread = 1) =>
  rounded(
    randomValues(count, seed).map((x) => x * spread),
    'bf16',
  );
const round = (values: Float64Array) => rounded(values, 'bf16');

interface Weights {
  readonly out: Float64Array;
  readonly norm: Float64Array;
  readonly up: Float64Array;
  readonly down: Float64Array;
  readonly nextNorm: Float64Array;
  readonly projection: Float64Array;
  readonly gate: Float64Array;
}

function randomWeights({ dim, attended, hidden, isGated, projection, gate }: LayerSizes, seed: number): Weights {
  const matrix = (rows: number, inputs: number, k: number) => bf16(rows * inputs, 10 * seed + k, 1 / Math.sqrt(inputs));
  return {
    out: matrix(dim, attended, 1),
    norm: randomValues(dim, 10 * seed + 2),
    up: matrix(isGated ? 2 * hidden : hidden, dim, 3),
    down: matrix(dim, hidden, 4),
    nextNorm: randomValues(dim, 10 * seed + 5),
    projection: matrix(projection, dim, 6),
    gate: matrix(gate, dim, 7),
  };
}

/** What between.cu computes, in float64, numbers between layers rounded to bf16. */
function reference(sizes: LayerSizes, weights: Weights, attended: Float64Array, x: Float64Array, batch: number) {
  const { dim, hidden, isGated, projection, gate } = sizes;
  const plus = (a: Float64Array, b: Float64Array) => round(a.map((value, i) => value + b[i]));
  const middle = plus(linearForward(attended, weights.out, batch, dim, sizes.attended), x);
  const normed = rmsnormForward(middle, weights.norm, EPSILON);
  const up = linearForward(normed, weights.up, batch, isGated ? 2 * hidden : hidden, dim);
  const active = round(isGated ? swigluForward(up, hidden) : siluForward(up));
  const after = plus(linearForward(active, weights.down, batch, dim, hidden), middle);
  const next = rmsnormForward(after, weights.nextNorm, EPSILON);
  return {
    after,
    projection: linearForward(next, weights.projection, batch, projection, dim),
    gate: linearForward(next, weights.gate, batch, gate, dim),
  };
}

/** Two steps of all layers: the second finds exchanges that the first has used. */
function check(device: Device & CudaRuntime, sizes: LayerSizes, batch: number, attentionBlocks: number): void {
  const { layers, dim, attended, hidden, isGated, projection, gate } = sizes;
  const tape = new Tape(device, { record: false });
  const between = StepBetween.create(device, sizes, batch, attentionBlocks);
  if (!between) throw new Error('there is no plan');
  const put = (values: Float64Array, shape: number[]) => tape.from(values, shape, 'bf16');
  for (let step = 0; step < 2; step++)
    for (let layer = 0; layer < layers; layer++) {
      const weights = randomWeights(sizes, 1 + step * layers + layer);
      const [input, residual] = [bf16(batch * attended, 100 + layer), bf16(batch * dim, 200 + step, 3)];
      const expected = reference(sizes, weights, input, residual, batch);
      const isLast = layer === layers - 1;
      const x = put(residual, [batch, dim]);
      const tensors = {
        attended: put(input, [batch, attended]),
        x,
        projection: tape.empty([batch, projection], 'bf16'),
        gateLogits: tape.empty([batch, Math.max(1, gate)]),
      };
      const next = {
        norm: tape.from(weights.nextNorm, [dim]),
        projection: put(weights.projection, [projection, dim]),
        gate: gate > 0 ? put(weights.gate, [gate, dim]) : null,
      };
      between.launch(
        layer,
        {
          out: put(weights.out, [dim, attended]),
          norm: tape.from(weights.norm, [dim]),
          up: put(weights.up, [isGated ? 2 * hidden : hidden, dim]),
          down: put(weights.down, [dim, hidden]),
          next: isLast ? null : next,
        },
        tensors,
        EPSILON,
        true,
      );
      const limit = tolerance('bf16');
      expect(relativeError(x.read(), expected.after)).toBeLessThan(limit);
      if (isLast) continue;
      expect(relativeError(tensors.projection.read(), expected.projection)).toBeLessThan(limit);
      if (gate > 0) expect(relativeError(tensors.gateLogits.read(), expected.gate)).toBeLessThan(limit);
    }
  between.free();
  tape.end();
}

describe('linear layers between two attentions', () => {
  const absence = cudaAbsence();
  const cases: readonly [string, LayerSizes, number][] = [
    ['one sequence', SMALL, 1],
    ['three sequences, SwiGLU', { ...SMALL, isGated: true, hidden: 160 }, 3],
    ['eight sequences, no gate', { ...SMALL, gate: 0 }, 8],
    ['13 sequences', { ...SMALL, layers: 2 }, 13],
    ['27 sequences, long rows', { ...SMALL, layers: 2, hidden: 1056 }, 27],
  ];
  for (const [name, sizes, batch] of cases) {
    it(`equal the reference: ${name}`, (context) => {
      if (absence) return context.skip(absence);
      check(cuda(), sizes, batch, 0);
    });
    it(`equal the reference: ${name}, emulated`, () => {
      check(new EmulatedCuda({ multiprocessors: 24 }), sizes, batch, batch > 8 ? 0 : 17);
    });
  }
  it('equal the reference: the 125M shape beside attention', (context) => {
    if (absence) return context.skip(absence);
    check(cuda(), { ...SIZES, layers: 2 }, 1, 16);
  });

  it('takes as many blocks as attention leaves, or all, and only if registers hold the weights', () => {
    const blocksOf = (sizes: LayerSizes, batch: number, attentionBlocks: number) => {
      const device = new RecordingCuda(() => 0);
      const between = StepBetween.create(device, sizes, batch, attentionBlocks);
      if (!between) return null;
      const tape = new Tape(device, { record: false });
      const [matrix, norm] = [tape.empty([1, 1], 'bf16'), tape.empty([1])];
      const tensors = { attended: matrix, x: matrix, projection: matrix, gateLogits: norm };
      between.launch(0, { out: matrix, norm, up: matrix, down: matrix, next: null }, tensors, EPSILON, true);
      return device.launches.at(-1)?.shape.grid;
    };
    expect(blocksOf(SIZES, 1, 16)).toBe(116);
    expect(blocksOf(SIZES, 2, 32)).toBe(100);
    expect(blocksOf(SIZES, 8, 128)).toBe(132);
    expect(blocksOf(SIZES, 32, 128)).toBe(132);
    expect(blocksOf(SIZES, 33, 16)).toBeNull();
    expect(blocksOf({ ...SIZES, layers: 1 }, 1, 16)).toBeNull();
    expect(blocksOf({ ...SIZES, dim: 2048, attended: 2048, hidden: 8192 }, 1, 16)).toBeNull();
    expect(StepBetween.create(new RecordingCuda(() => 0, 89), SIZES, 1, 16)).toBeNull();
  });
});
