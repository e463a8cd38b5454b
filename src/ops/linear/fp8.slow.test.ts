import { describe, expect, it } from 'vitest';
import { cudaAbsence } from '../../device/cuda/cuda.js';
import type { MatrixProduct } from '../../device/cuda/runtime.js';
import type { Device } from '../../device/device.js';
import { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { cpu, cuda, reportNoGpu, rounded } from '../../testing/devices.js';
import { EmulatedCuda } from '../../testing/emulated-cuda.js';
import { randomValues, relativeError } from '../../testing/numbers.js';
import { RecordingCuda } from '../../testing/recording-cuda.js';
import { gateColumns } from '../attention/gate/op.js';
import type { LargestMagnitude } from '../common/fused-columns.js';
import { Sequences } from '../common/sequences.js';
import { fp8Rmsnorm } from '../rmsnorm/op.js';
import { rmsnormBackward, rmsnormForward } from '../rmsnorm/reference.js';
import { RotaryTable, splitHeads } from '../rope/op.js';
import { Fp8Layer, Fp8Matrix, fp8Refusal, INVERSE, largestOfGradient, layerPays, normedLayerPays } from './fp8.js';
import { feedForwardPays, fp8FeedForward } from './fp8-mlp.js';
import {
  type Fp8Format,
  fp8Linear,
  fp8Scale,
  fp8Value,
  normBound,
  quantised,
  roundToFp8,
  siluBound,
} from './fp8-reference.js';
import { linear, stackedLinear } from './op.js';
import { linearBackward, linearForward } from './reference.js';

const EPSILON = 1e-5;
const FORMATS: readonly Fp8Format[] = ['e4m3', 'e5m2'];

describe.each(FORMATS)('%s', (format) => {
  const values = Array.from({ length: 128 }, (_, code) => fp8Value(code, format)).filter(Number.isFinite);

  it('has the numbers of the standard', () => {
    expect(values).toHaveLength(format === 'e4m3' ? 127 : 124);
    expect(values.slice(0, 2)).toEqual([0, format === 'e4m3' ? 2 ** -9 : 2 ** -16]);
    expect(values.at(-1)).toBe(format === 'e4m3' ? 448 : 57_344);
    expect(values).toEqual([...values].sort((a, b) => a - b));
    expect(fp8Value(0x85, format)).toBe(-values[5]);
    expect(fp8Value(0x7f, format)).toBeNaN();
    expect(fp8Value(0x7c, 'e5m2')).toBe(Number.POSITIVE_INFINITY);
  });

  it('rounds to the nearest number, ties to even codes, and no further than the largest', () => {
    values.forEach((value, code) => {
      expect(roundToFp8(value, format)).toBe(value);
      if (code === 0) return;
      const [below, middle] = [values[code - 1], (values[code - 1] + value) / 2];
      expect(roundToFp8(-middle, format)).toBe(-(code % 2 === 0 ? value : below));
      expect(roundToFp8(middle * (1 + 1e-9), format)).toBe(value);
      expect(roundToFp8(middle * (1 - 1e-9), format)).toBe(below);
    });
    const largest = values.at(-1)!;
    expect(roundToFp8(1e9, format)).toBe(largest);
    expect(roundToFp8(Number.NEGATIVE_INFINITY, format)).toBe(-largest);
    expect(roundToFp8(Number.NaN, format)).toBeNaN();
  });

  it.each([1, 1.75, 1.7501, 1.999, 3e-39, 1e-20, 7e30])('is scaled by the largest fitting power of two: %d', (most) => {
    const scale = fp8Scale(most, format);
    expect(Math.log2(scale)).toBe(Math.round(Math.log2(scale)));
    expect(most * scale).toBeLessThanOrEqual(values.at(-1)!);
    if (scale < 2 ** 126) expect(2 * most * scale).toBeGreaterThan(values.at(-1)!);
  });
});

/** The emulator, and a GPU that has FP8. */
function fp8Devices(): { name: string; device: () => Device }[] {
  const emulated = new EmulatedCuda();
  const absence = cudaAbsence() ?? fp8Refusal(cuda());
  if (absence !== null) reportNoGpu(absence);
  return [
    { name: 'the emulator', device: () => emulated },
    ...(absence === null ? [{ name: 'cuda', device: cuda }] : []),
  ];
}

/** Values over many orders of magnitude, so that some are subnormal in either format. */
const spread = (count: number, seed: number) =>
  rounded(
    randomValues(count, seed).map((value, i) => value * 10 ** (-(i % 9) / 1.5)),
    'bf16',
  );

const DEVICES = fp8Devices();

describe.each(DEVICES)('FP8 on $name', ({ device }) => {
  const codesOf = (memory: Tensor | null) => [...memory!.readBytes()];

  const SIZES = [
    [16, 16],
    [144, 400],
    [272, 128],
    [128, 16],
  ];
  it.each(FORMATS.flatMap((format) => SIZES.map(([rows, columns]) => [format, rows, columns] as const)))(
    'converts to %s in both layouts: %i x %i',
    (format, rows, columns) => {
      const values = spread(rows * columns, rows + columns);
      const x = Tensor.from(device(), values, [rows, columns], 'bf16');
      const both = new Fp8Matrix(device(), x, format, { straight: true, transposed: true });
      const [most, inverse] = [both.scale.item(0), both.scale.item(INVERSE)];
      expect(both.inverse.pointer % 16n).toBe(0n);
      expect(most).toBe(Math.max(...values.map(Math.abs)));
      expect(1 / inverse).toBe(fp8Scale(most, format));
      const expected = quantised(values, format);
      const straight = codesOf(both.straight);
      expect(straight.map((code) => fp8Value(code, format) * inverse)).toEqual([...expected]);
      const turned = straight.map((_, i) => straight[(i % rows) * columns + Math.floor(i / rows)]);
      expect(codesOf(both.transposed)).toEqual(turned);
      // One layout alone, with the scale that is known.
      const alone = new Fp8Matrix(device(), x, format, { transposed: true }, both.scale);
      expect(alone.straight).toBeNull();
      expect(codesOf(alone.transposed)).toEqual(turned);
      alone.transposed!.free();
      both.free();
      x.free();
    },
  );

  it.each([
    ['zeros', 0, 2 ** -126],
    ['an infinity', Number.NEGATIVE_INFINITY, Number.NaN],
    ['a NaN', Number.NaN, Number.NaN],
  ])('shows %s', (_, value, inverse) => {
    const values = new Float64Array(256).fill(value === 0 ? 0 : 1);
    values[77] = value;
    const x = Tensor.from(device(), values, [16, 16], 'bf16');
    const matrix = new Fp8Matrix(device(), x, 'e5m2', { straight: true });
    expect(matrix.scale.item(INVERSE)).toBe(inverse);
    matrix.free();
    x.free();
  });

  it.each([
    [32, 48, 64],
    [144, 32, 160],
  ])('computes a layer and its gradients: %i rows, %i outputs, %i inputs', (rows, outputs, inputs) => {
    const sizes = [rows, outputs, inputs] as const;
    const [x, w] = [spread(rows * inputs, 1), spread(outputs * inputs, 2)];
    const [r, dy] = [spread(rows * outputs, 3), spread(rows * outputs, 4)];
    const before = device().pool.bytesInUse;
    const tape = new Tape(device());
    const tx = tape.from(x, [rows, inputs], 'bf16');
    const tw = tape.from(w, [outputs, inputs], 'bf16');
    const residual = tape.from(r, [rows, outputs], 'bf16');
    const y = tape.empty([rows, outputs], 'bf16');
    const layer = new Fp8Layer(tape, tx, tw, y, residual);
    const dx = tape.empty([rows, inputs], 'bf16');
    const dw = tape.from(new Float64Array(outputs * inputs).fill(1), [outputs, inputs]);
    layer.backward(
      tape.from(dy, [rows, outputs], 'bf16'),
      { gradient: dx, accumulate: false },
      { gradient: dw, accumulate: true },
    );
    const expected = fp8Linear(x, w, dy, sizes);
    // Rounding to bf16 is 2^-9 at most; the tensor cores' own sums of the forward product keep about 14 bits.
    expect(
      relativeError(
        y.read(),
        expected.y.map((value, i) => value + r[i]),
      ),
    ).toBeLessThan(3e-3);
    expect(relativeError(dx.read(), expected.dx)).toBeLessThan(3e-3);
    expect(
      relativeError(
        dw.read(),
        expected.dw.map((value) => value + 1),
      ),
    ).toBeLessThan(1e-4);
    layer.drop(tape);
    tape.end();
    expect(device().pool.bytesInUse).toBe(before);
  });
});

/** silu(u), and what a gradient of it is multiplied by. */
const silu = (u: number) => u / (1 + Math.exp(-u));
const slope = (u: number) => (1 / (1 + Math.exp(-u))) * (1 + u * (1 - 1 / (1 + Math.exp(-u))));

describe.each(DEVICES)('the bound of a slope on $name', ({ device }) => {
  it('is never exceeded, also where all signs agree, and NaN where a matrix is not finite', () => {
    const [rows, outputs, inputs] = [16, 32, 16];
    const tape = new Tape(device());
    const scaleFor = (dy: number) => {
      const weight = tape.from(new Float64Array(outputs * inputs).fill(-0.47), [outputs, inputs], 'bf16');
      const x = tape.from(new Float64Array(rows * inputs).fill(1), [rows, inputs], 'bf16');
      const layer = new Fp8Layer(tape, x, weight, tape.empty([rows, outputs], 'bf16'), null);
      const values = tape.from(new Float64Array(rows * outputs).fill(dy), [rows, outputs], 'bf16');
      const dy8 = new Fp8Matrix(device(), values, 'e5m2', { straight: true });
      const scale = tape.own(layer.slopeScale(dy8));
      const dx = tape.empty([rows, inputs], 'bf16');
      layer.backward(dy8, { gradient: dx, accumulate: false }, null);
      layer.drop(tape);
      return [scale.item(0), 1.1 * Math.max(...dx.read().map(Math.abs))];
    };
    const [bound, largest] = scaleFor(1.13e-3); // rounded up in both formats
    expect(largest).toBeGreaterThan(1.1 * outputs * 1.13e-3 * 0.47);
    expect(bound).toBeGreaterThan(largest);
    expect(bound).toBeLessThan(2 * largest);
    expect(scaleFor(Number.NaN)[0]).toBeNaN();
    tape.end();
  });
});

describe.each(DEVICES)('a norm in FP8 on $name', ({ device }) => {
  it.each([
    [144, 80],
    [80, 768],
    [48, 1040],
    [16, 2064], // longer than registers hold, so rounded to bf16 before
  ])('has the codes of %i normalised rows of %i in both layouts, with the scale of a bound', (rows, dim) => {
    const [x, weight] = [spread(rows * dim, 1), randomValues(dim, 2)];
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [rows, dim], 'bf16'));
    const codes = fp8Rmsnorm(tape, tx, tape.from(weight, [dim]), EPSILON).codes;
    expect(codes.scale.item(0)).toBeCloseTo(normBound(weight), 5);
    const inverse = codes.scale.item(INVERSE);
    expect(1 / inverse).toBe(fp8Scale(normBound(weight), 'e4m3'));
    const straight = [...codes.straight!.readBytes()];
    const values = Float64Array.from(straight, (code) => fp8Value(code, 'e4m3') * inverse);
    // A row's rms in f32 puts a few numbers on the other side of a tie.
    const normed = rmsnormForward(x, weight, EPSILON);
    const expected = quantised(dim > 2048 ? rounded(normed, 'bf16') : normed, 'e4m3', normBound(weight));
    expect(relativeError(values, expected)).toBeLessThan(3e-3);
    expect([...codes.transposed!.readBytes()]).toEqual(
      straight.map((_, i) => straight[(i % rows) * dim + Math.floor(i / rows)]),
    );
    codes.free();
    tape.end();
  });

  it('reaches its bound where one number is all of a row, and shows what is not finite', () => {
    const [rows, dim] = [16, 64];
    for (const value of [1e4, Number.POSITIVE_INFINITY, Number.NaN]) {
      const x = new Float64Array(rows * dim);
      x[3 * dim + 5] = value;
      const tape = new Tape(device(), { record: false });
      const weight = tape.from(new Float64Array(dim).fill(-1.5), [dim]);
      const codes = fp8Rmsnorm(tape, tape.from(x, [rows, dim], 'bf16'), weight, EPSILON).codes;
      const code = codes.straight!.readBytes()[3 * dim + 5];
      const found = fp8Value(code, 'e4m3') * codes.scale.item(INVERSE);
      if (Number.isFinite(value)) expect(found).toBe(-12);
      else expect(found).toBeNaN();
      expect(codes.transposed).toBeNull();
      codes.free();
      tape.end();
    }
  });

  it('is the input of a stacked layer, and gives the gradients of all', () => {
    const [rows, outputs, inputs] = [32, 48, 64];
    const [x, w, dy] = [spread(rows * inputs, 1), spread(outputs * inputs, 2), spread(rows * outputs, 3)];
    const weight = randomValues(inputs, 4);
    const before = device().pool.bytesInUse;
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [rows, inputs], 'bf16'));
    const tn = tape.watch(tape.from(weight, [inputs]));
    const part = tape.watch(tape.from(w, [outputs, inputs]));
    const stacked = tape.from(w, [outputs, inputs], 'bf16');
    const y = stackedLinear(tape, fp8Rmsnorm(tape, tx, tn, EPSILON), stacked, [part]);
    const x8 = quantised(rmsnormForward(x, weight, EPSILON), 'e4m3', normBound(weight));
    const [w8, dy8] = [quantised(w, 'e4m3'), quantised(dy, 'e5m2')];
    expect(relativeError(y.read(), linearForward(x8, w8, rows, outputs, inputs))).toBeLessThan(5e-3);
    tape.backward(y, dy);
    const gradients = linearBackward(x8, w8, dy8, rows, outputs, inputs);
    const normed = rmsnormBackward(x, weight, EPSILON, gradients.dx);
    expect(relativeError(tape.gradient(part)!.read(), gradients.dw)).toBeLessThan(5e-3);
    expect(relativeError(tape.gradient(tx)!.read(), normed.dx)).toBeLessThan(5e-3);
    expect(relativeError(tape.gradient(tn)!.read(), normed.dWeight)).toBeLessThan(5e-3);
    tape.end();
    expect(device().pool.bytesInUse).toBe(before);
  });
});

describe.each(DEVICES)('the largest magnitude of a gradient on $name', ({ device }) => {
  const [rows, inputs, size] = [48, 64, 16];
  const parts = [
    { heads: 2, size, rotate: true },
    { heads: 1, size, rotate: false },
  ];
  const [first, logits, width] = [3 * size, 6, 64];
  const [x, w] = [spread(rows * inputs, 1), rounded(randomValues(width * inputs, 2), 'bf16')];

  /** Passes gradients back to a projection `fused` [rows, width] that heads and gates are read from. */
  function passBack(tape: Tape, fused: Tensor, largestIn: string, largest: LargestMagnitude | null): void {
    const dHeads = parts.map((part, i) => rounded(randomValues(rows * part.heads * size, 3 + i), 'bf16'));
    const dGates = randomValues(rows * logits, 5).map((value) => value * (largestIn === 'gates' ? 1e3 : 1e-3));
    if (largestIn === 'infinity') dHeads[1][7] = Number.NEGATIVE_INFINITY;
    const sequences = new Sequences(device(), [30, 18]);
    const table = new RotaryTable(device(), { size, theta: 100 });
    const gate = { kind: 'softmax', temperature: 1 } as const;
    const columns = gateColumns(tape, fused, first, tape.zeros([logits]), gate, largest);
    const heads = splitHeads(tape, fused, parts, sequences, { table }, columns);
    tape.backward([...heads, columns.gates], [...dHeads, dGates]);
    table.free();
    sequences.free();
  }

  it.each(['heads', 'gates', 'infinity'])('is found by what writes it: %s', (largestIn) => {
    const tape = new Tape(device());
    const fused = tape.watch(tape.from(randomValues(rows * width, 7), [rows, width], 'bf16'));
    const largest = { scale: tape.zeros([8]), isKnown: false };
    passBack(tape, fused, largestIn, largest);
    const most = Math.max(...tape.gradient(fused)!.read().map(Math.abs));
    expect(largest.isKnown).toBe(true);
    if (largestIn === 'infinity') expect([largest.scale.read()[0], most]).toEqual([Infinity, Infinity]);
    else expect(Math.abs(largest.scale.read()[0] / most - 1)).toBeLessThan(2 ** -8); // `most` is rounded
    tape.end();
  });

  it('is not known of a sum', () => {
    const tape = new Tape(device());
    const fused = tape.watch(tape.from(randomValues(rows * width, 7), [rows, width], 'bf16'));
    const part = { heads: 1, size: width, rotate: false };
    const sequences = new Sequences(device(), [rows]);
    const largest = { scale: tape.zeros([8]), isKnown: false };
    const behind = { columns: 0, inputs: [], outputs: [], saved: [], largest, backward: () => {} };
    const outputs = [behind, null].flatMap((columns) => splitHeads(tape, fused, [part], sequences, null, columns));
    tape.backward(outputs, [x, x]);
    expect([largest.isKnown, largest.scale.read()[0]]).toEqual([false, 0]);
    tape.end();
    sequences.free();
  });

  it('is the scale of the layer, with the same gradients', () => {
    const before = device().pool.bytesInUse;
    const gradients = [true, false].map((isTold) => {
      const tape = new Tape(device());
      const tx = tape.watch(tape.from(x, [rows, inputs], 'bf16'));
      const part = tape.watch(tape.from(w, [width, inputs]));
      const normed = fp8Rmsnorm(tape, tx, tape.watch(tape.from(randomValues(inputs, 6), [inputs])), EPSILON);
      const largest = isTold ? largestOfGradient(tape, normed) : null;
      const fused = stackedLinear(tape, normed, tape.from(w, [width, inputs], 'bf16'), [part], largest);
      passBack(tape, fused, 'heads', largest);
      expect(largest?.isKnown).toBe(isTold || undefined);
      const bits = [tx, part].map((tensor) => tape.gradient(tensor)!.read());
      tape.end();
      return bits;
    });
    expect(gradients[0]).toEqual(gradients[1]);
    expect(device().pool.bytesInUse).toBe(before);
  });
});

describe.each(DEVICES)('a feed-forward layer in FP8 on $name', ({ device }) => {
  it.each([false, true])('computes its result and all gradients (checkpointed: %s)', (isCheckpointed) => {
    const [rows, hidden, dim] = [144, 80, 48];
    const [x, r, dy] = [1, 2, 3].map((seed) => spread(rows * dim, seed));
    const [up, down] = [4, 5].map((seed) => rounded(randomValues(hidden * dim, seed), 'bf16'));
    const norm = randomValues(dim, 6);
    const before = device().pool.bytesInUse;
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [rows, dim], 'bf16'));
    const tr = tape.watch(tape.from(r, [rows, dim], 'bf16'));
    const tn = tape.watch(tape.from(norm, [dim]));
    const weights = {
      up: tape.watch(tape.from(up, [hidden, dim], 'bf16')),
      down: tape.watch(tape.from(down, [dim, hidden], 'bf16')),
    };
    const layer = (inner: Tape) =>
      fp8FeedForward(inner, fp8Rmsnorm(inner, tx, tn, EPSILON), weights, tr, inner.computesResult);
    const y = isCheckpointed ? tape.checkpoint([tx, tr], layer) : layer(tape);
    const bound = normBound(norm);
    const x8 = quantised(rmsnormForward(x, norm, EPSILON), 'e4m3', bound);
    const [up8, down8] = [up, down].map((values) => quantised(values, 'e4m3'));
    const inner = rounded(linearForward(x8, up8, rows, hidden, dim), 'bf16');
    expect(siluBound(bound, up, dim)).toBeGreaterThan(Math.max(...inner.map((value) => Math.abs(silu(value)))));
    const active = quantised(inner.map(silu), 'e4m3', siluBound(bound, up, dim));
    const expected = linearForward(active, down8, rows, dim, hidden).map((value, i) => value + r[i]);
    // A rounding of the inner result to the other side of a tie changes a code: 6 % of one number of many.
    expect(relativeError(y.read(), expected)).toBeLessThan(8e-3);
    tape.backward(y, dy);
    const outer = linearBackward(active, down8, quantised(dy, 'e5m2'), rows, dim, hidden);
    const dInner = rounded(outer.dx, 'bf16').map((value, i) => value * slope(inner[i]));
    const gradients = linearBackward(x8, up8, quantised(dInner, 'e5m2'), rows, hidden, dim);
    expect(relativeError(tape.gradient(weights.down)!.read(), outer.dw)).toBeLessThan(8e-3);
    expect(relativeError(tape.gradient(weights.up)!.read(), gradients.dw)).toBeLessThan(1.5e-2);
    const normed = rmsnormBackward(x, norm, EPSILON, gradients.dx);
    expect(relativeError(tape.gradient(tx)!.read(), normed.dx)).toBeLessThan(1.5e-2);
    expect(relativeError(tape.gradient(tn)!.read(), normed.dWeight)).toBeLessThan(1.5e-2);
    expect([...tape.gradient(tr)!.read()]).toEqual([...dy]);
    tape.end();
    expect(device().pool.bytesInUse).toBe(before);
  });
});

/** Notes the products, computes nothing. */
class Products extends RecordingCuda {
  readonly products: MatrixProduct[] = [];

  constructor(architecture?: number) {
    super(() => 0, architecture);
  }

  override matrixProduct(product: MatrixProduct): void {
    for (const { pointer } of [product.a, product.b, product.d]) void pointer; // throws when it was freed
    this.products.push(product);
  }
}

describe('runtime.fp8', () => {
  it('takes the layers whose products save more than the conversions cost', () => {
    expect(layerPays(65_536, 8192, 2048)).toBe(true);
    expect(layerPays(65_536, 2048, 2048)).toBe(true);
    expect(layerPays(65_536, 768, 768)).toBe(false);
    expect(normedLayerPays(65_536, 1584, 768)).toBe(true);
    expect(normedLayerPays(65_536, 1576, 768)).toBe(false); // not a multiple of 16
    expect(normedLayerPays(65_536, 512, 512)).toBe(false);
    expect(feedForwardPays(65_536, 3072, 768)).toBe(true);
    expect(feedForwardPays(65_536, 1024, 256)).toBe(false);
    expect(feedForwardPays(65_528, 3072, 768)).toBe(false); // not a multiple of 16
    expect(layerPays(65_536, 8184, 2048)).toBe(false); // not a multiple of 16
    expect(layerPays(64, 8192, 2048)).toBe(false); // the weight's conversion is not worth it
  });

  /** The dtypes of the products of a layer that pays, forward and backward. */
  function products(device: Products, options: { fp8?: boolean; checkpointed?: boolean }): string[] {
    const [rows, size] = [16_384, 2048];
    const tape = new Tape(device, { fp8: options.fp8 ?? true });
    const x = tape.watch(tape.empty([rows, size], 'bf16'));
    const [w, stacked] = [0, 1].map(() => tape.watch(tape.empty([size, size], 'bf16')));
    const parts = [tape.watch(tape.empty([size, size]))];
    const layers = (inner: Tape) => stackedLinear(inner, linear(inner, x, w, null, x), stacked, parts);
    const y = options.checkpointed ? tape.checkpoint([x], layers) : layers(tape);
    tape.backward(y, tape.empty([rows, size], 'bf16'));
    tape.end();
    expect(device.pool.bytesInUse).toBe(0);
    return device.products.map(({ a, b, fp8 }) => `${a.dtype} ${b.dtype}${fp8?.fast ? ' fast' : ''}`);
  }

  const FORWARD = ['e4m3 e4m3 fast', 'e4m3 e4m3 fast'];
  /** The sums of a weight's gradient are long, those of an input's gradient have a term for every output. */
  const BACKWARD = ['e5m2 e4m3 fast', 'e5m2 e4m3', 'e5m2 e4m3 fast', 'e5m2 e4m3'];

  it('is used in the forward and in the backward pass', () => {
    expect(products(new Products(), {})).toEqual([...FORWARD, ...BACKWARD]);
  });

  it('is used in both runs of a checkpointed block', () => {
    expect(products(new Products(), { checkpointed: true })).toEqual([...FORWARD, ...FORWARD, ...BACKWARD]);
  });

  it('changes no product when it is off, or when the GPU has no FP8', () => {
    for (const [device, options] of [
      [new Products(), { fp8: false }],
      [new Products(80), {}],
    ] as const) {
      expect(products(device, options)).toEqual([]); // bf16 products are launched by the layer's own kernels
      expect(device.launches.filter(({ kernel }) => kernel.startsWith('linear_'))).toHaveLength(6);
    }
  });

  it('says which devices have no FP8', () => {
    expect(fp8Refusal(cpu())).toBe('the CPU has no FP8 products');
    expect(fp8Refusal(new Products(80))).toContain('compute capability 8: FP8 products need 8.9');
    expect(fp8Refusal(new Products(90))).toBeNull();
  });
});
