import { describe, expect, it } from 'vitest';
import { Parameter } from '../../tensor/parameter.js';
import { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { cpu, devices, rounded, tolerance } from '../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { add } from '../add/op.js';
import { castInto } from '../cast/op.js';
import { linear, matrixProducts, stackedLinear } from './op.js';
import { linearBackward, linearForward } from './reference.js';

describe('linear reference', () => {
  it('has gradients equal to finite differences', () => {
    const [x, w, dy] = [randomValues(6, 1), randomValues(12, 2), randomValues(8, 3)];
    const { dx, dw } = linearBackward(x, w, dy, 2, 4, 3);
    const value = () => dot(linearForward(x, w, 2, 4, 3), dy);
    expect(relativeError(dx, finiteDifferences(value, x))).toBeLessThan(1e-8);
    expect(relativeError(dw, finiteDifferences(value, w))).toBeLessThan(1e-8);
  });
});

const SHAPES = [
  [1, 1, 1],
  [1, 70, 3],
  [7, 64, 16],
  [97, 65, 33],
  [5, 130, 1100],
  [200, 36, 48],
  [100, 7, 600],
  [401, 450, 530], // several blocks of rows, chunks of panels and slabs of depth in all three products
  [300, 36, 96], // few outputs of many rows: one read of x
  [257, 64, 288],
  [600, 2, 32],
  [3, 5, 0],
  [0, 4, 4],
];

describe.each(devices())('linear on $name', ({ device, dtype }) => {
  const random = (count: number, seed: number) => rounded(randomValues(count, seed), dtype);

  it.each(SHAPES)('equals the reference for %i rows, %i outputs, %i inputs', (rows, outputs, inputs) => {
    const [x, w] = [random(rows * inputs, 1), random(outputs * inputs, 2)];
    const [bias, dy] = [randomValues(outputs, 3), random(rows * outputs, 4)];
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [rows, inputs], dtype));
    const tw = tape.watch(tape.from(w, [outputs, inputs], dtype));
    const tb = tape.watch(tape.from(bias, [outputs]));
    const y = linear(tape, tx, tw, tb);
    const expected = linearForward(x, w, rows, outputs, inputs).map((value, i) => value + bias[i % outputs]);
    const limit = tolerance(dtype);
    expect(relativeError(y.read(), expected)).toBeLessThan(limit);
    tape.backward(y, dy);
    const { dx, dw } = linearBackward(x, w, dy, rows, outputs, inputs);
    expect(relativeError(tape.gradient(tx)!.read(), dx)).toBeLessThan(limit);
    expect(relativeError(tape.gradient(tw)!.read(), dw)).toBeLessThan(limit);
    const dBias = new Float64Array(outputs);
    dy.forEach((value, i) => {
      dBias[i % outputs] += value;
    });
    expect(relativeError(tape.gradient(tb)!.read(), dBias)).toBeLessThan(limit);
    tape.end();
  });

  it.each([
    [5, 9, 8],
    [256, 20, 64],
  ])('adds to existing gradients: %i rows, %i outputs, %i inputs', (rows, outputs, inputs) => {
    const tape = new Tape(device());
    const [vx, vw] = [random(rows * inputs, 1), random(outputs * inputs, 2)];
    const dy = random(rows * outputs, 3);
    const x = tape.watch(tape.from(vx, [rows, inputs], dtype));
    const w = tape.watch(tape.from(vw, [outputs, inputs], dtype));
    const [first, second] = [linear(tape, x, w), linear(tape, x, w)];
    tape.backward([first, second], [dy, dy]);
    const { dx, dw } = linearBackward(vx, vw, dy, rows, outputs, inputs);
    expect(
      relativeError(
        tape.gradient(x)!.read(),
        dx.map((v) => 2 * v),
      ),
    ).toBeLessThan(tolerance(dtype));
    expect(
      relativeError(
        tape.gradient(w)!.read(),
        dw.map((v) => 2 * v),
      ),
    ).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it("puts a parameter's gradient in f32, whatever it computes in", () => {
    const [rows, outputs, inputs] = [70, 24, 40];
    const [x, w, dy] = [random(rows * inputs, 1), random(outputs * inputs, 2), random(rows * outputs, 3)];
    const weight = new Parameter(device(), 'w', [outputs, inputs]);
    weight.value.write(w);
    const tape = new Tape(device());
    const operand = weight.as(dtype, (from, into) => castInto(device(), from, into));
    const outputsOf = [1, 2].map(() => linear(tape, tape.from(x, [rows, inputs], dtype), operand));
    tape.backward(
      outputsOf,
      [1, 2].map((factor) => dy.map((value) => value * factor)),
    );
    expect(weight.gradient!.dtype).toBe('f32');
    const expected = linearBackward(x, w, dy, rows, outputs, inputs).dw.map((value) => 3 * value);
    expect(relativeError(weight.gradient!.read(), expected)).toBeLessThan(2e-5);
    tape.end();
    weight.free();
  });

  it.each(SHAPES)('adds a residual for %i rows, %i outputs, %i inputs', (rows, outputs, inputs) => {
    const [x, w] = [random(rows * inputs, 1), random(outputs * inputs, 2)];
    const [r, dy] = [random(rows * outputs, 3), random(rows * outputs, 4)];
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [rows, inputs], dtype));
    const tw = tape.watch(tape.from(w, [outputs, inputs], dtype));
    const residual = tape.watch(tape.from(r, [rows, outputs], dtype));
    const y = linear(tape, tx, tw, null, residual);
    const expected = linearForward(x, w, rows, outputs, inputs).map((value, i) => value + r[i]);
    expect(relativeError(y.read(), expected)).toBeLessThan(tolerance(dtype));
    expect([...residual.read()]).toEqual([...r].map((value) => Math.fround(value)));
    tape.backward(y, dy);
    const { dx, dw } = linearBackward(x, w, dy, rows, outputs, inputs);
    expect(relativeError(tape.gradient(tx)!.read(), dx)).toBeLessThan(tolerance(dtype));
    expect(relativeError(tape.gradient(tw)!.read(), dw)).toBeLessThan(tolerance(dtype));
    expect([...tape.gradient(residual)!.read()]).toEqual([...dy].map((value) => Math.fround(value)));
    tape.end();
  });

  it('takes its own input as the residual, and one that has a gradient already', () => {
    const [x, w] = [random(40, 1), random(64, 2)];
    const [first, second] = [random(40, 3), random(40, 4)];
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [5, 8], dtype));
    const tw = tape.from(w, [8, 8], dtype);
    const [a, b] = [linear(tape, tx, tw, null, tx), linear(tape, tx, tw, null, tx)];
    tape.backward([a, b], [first, second]);
    const dy = first.map((value, i) => value + second[i]);
    const expected = linearBackward(x, w, dy, 5, 8, 8).dx.map((value, i) => value + dy[i]);
    expect(relativeError(tape.gradient(tx)!.read(), expected)).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it.each([
    [300, [24, 10], 40, 64],
    [5, [3, 1, 2], 6, 7],
    [0, [4, 4], 8, 4],
  ])('is several layers in one product: %i rows, outputs %j in %i, %i inputs', (rows, parts, outputs, inputs) => {
    const x = random(rows * inputs, 1);
    const weights = parts.map((own, i) => random(own * inputs, 2 + i));
    const dy = parts.map((own, i) => random(rows * own, 9 + i));
    const parameters = parts.map((own, i) => {
      const parameter = new Parameter(device(), `w${i}`, [own, inputs]);
      parameter.value.write(weights[i]);
      return parameter;
    });
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [rows, inputs], dtype));
    const stacked = new Float64Array(outputs * inputs);
    stacked.set(weights.flatMap((weight) => [...weight]));
    const values = parameters.map(({ value }) => value);
    // Twice: existing gradients are added to.
    const both = [0, 1].map(() => stackedLinear(tape, tx, tape.from(stacked, [outputs, inputs], dtype), values));
    const filled = new Float64Array(rows * outputs);
    const wanted = new Float64Array(rows * outputs);
    let column = 0;
    parts.forEach((own, i) => {
      const y = linearForward(x, weights[i], rows, own, inputs);
      for (let r = 0; r < rows; r++)
        for (let c = 0; c < own; c++) {
          filled[r * outputs + column + c] = dy[i][r * own + c];
          wanted[r * outputs + column + c] = y[r * own + c];
        }
      column += own;
    });
    for (const y of both) expect(relativeError(y.read(), wanted)).toBeLessThan(tolerance(dtype));
    tape.backward(both, [filled, filled]);
    const dx = new Float64Array(rows * inputs);
    parts.forEach((own, i) => {
      const expected = linearBackward(x, weights[i], dy[i], rows, own, inputs);
      expected.dx.forEach((value, at) => {
        dx[at] += 2 * value;
      });
      const dw = expected.dw.map((value) => 2 * value);
      expect(relativeError(parameters[i].gradient!.read(), dw)).toBeLessThan(2e-5);
    });
    expect(relativeError(tape.gradient(tx)!.read(), dx)).toBeLessThan(tolerance(dtype));
    tape.end();
    for (const parameter of parameters) parameter.free();
  });

  it('names the tensor whose shape does not fit', () => {
    const tape = new Tape(device());
    const w = tape.zeros([4, 3]);
    expect(() => stackedLinear(tape, tape.zeros([2, 3]), w, [tape.zeros([5, 3])])).toThrow('5 rows of parts');
    expect(() => stackedLinear(tape, tape.zeros([2, 3]), w, [tape.zeros([2, 4])])).toThrow('a part must have shape');
    expect(() => linear(tape, tape.zeros([2, 5]), w)).toThrow('linear: x must have shape [*, 3], not [2, 5]');
    expect(() => linear(tape, tape.zeros([2, 3]), w, tape.zeros([3]))).toThrow('linear: bias must have shape [4]');
    expect(() => linear(tape, tape.zeros([2, 3]), w, null, tape.zeros([2, 3]))).toThrow(
      'linear: residual must have shape [2, 4], not [2, 3]',
    );
    tape.end();
  });
});

it('gives the same numbers for any number of threads', () => {
  const [rows, outputs, inputs] = [401, 450, 530];
  expectSameForAnyThreadCount(() => {
    const tape = new Tape(cpu());
    const x = tape.watch(tape.from(randomValues(rows * inputs, 1), [rows, inputs]));
    const w = tape.watch(tape.from(randomValues(outputs * inputs, 2), [outputs, inputs]));
    const y = linear(tape, x, w);
    const bytes = [y.readBytes()];
    tape.backward(y, randomValues(rows * outputs, 3));
    bytes.push(tape.gradient(x)!.readBytes(), tape.gradient(w)!.readBytes());
    tape.end();
    return bytes;
  });
});

it('gives on the CPU the bits of a product and a sum', () => {
  const tape = new Tape(cpu(), { record: false });
  const x = tape.from(randomValues(70 * 600, 1), [70, 600]);
  const w = tape.from(randomValues(40 * 600, 2), [40, 600]);
  const r = tape.from(randomValues(70 * 40, 3), [70, 40]);
  expect(linear(tape, x, w, null, r).read()).toEqual(add(tape, r, linear(tape, x, w)).read());
  tape.end();
});

it('gives a row the same numbers whatever rows stand beside it', () => {
  const [rows, outputs, inputs] = [200, 90, 70];
  const values = randomValues(rows * inputs, 1);
  const tape = new Tape(cpu(), { record: false });
  const w = tape.from(randomValues(outputs * inputs, 2), [outputs, inputs]);
  const all = linear(tape, tape.from(values, [rows, inputs]), w).read();
  for (const row of [0, 5, 197]) {
    const alone = linear(tape, tape.from(values.slice(row * inputs, (row + 1) * inputs), [1, inputs]), w).read();
    expect([...alone]).toEqual([...all.subarray(row * outputs, (row + 1) * outputs)]);
  }
  tape.end();
});

describe('few rows on the CPU', () => {
  it.each([
    [64, 48],
    [32, 1100], // several slabs of depth
    [70, 33], // outputs that are no whole vectors
  ])('are bit for bit those of a batch: %i outputs, %i inputs', (outputs, inputs) => {
    const tape = new Tape(cpu(), { record: false });
    const x = tape.from(randomValues(9 * inputs, 1), [9, inputs]);
    const w = tape.from(randomValues(outputs * inputs, 2), [outputs, inputs]);
    const residual = tape.from(randomValues(9 * outputs, 3), [9, outputs]);
    const bias = tape.from(randomValues(outputs, 4), [outputs]);
    const batch = linear(tape, x, w, bias, residual).read();
    for (const rows of [1, 2, 3, 4, 5])
      for (const from of [0, 9 - rows])
        expect(linear(tape, x.rows(from, from + rows), w, bias, residual.rows(from, from + rows)).read()).toEqual(
          batch.slice(from * outputs, (from + rows) * outputs),
        );
    tape.end();
  });
});

describe.each(devices())('matrixProducts on $name', ({ device, dtype }) => {
  it.each([
    [3, 20, 33, 17],
    [1, 130, 64, 600],
    [5, 1, 7, 2],
    [0, 4, 4, 4],
  ])('%i products of [%i, %i] with %i terms, straight and transposed', (count, m, n, k) => {
    const [a, b, c] = [count * m * k, count * k * n, count * m * n].map((size, i) =>
      rounded(randomValues(size, i + 1), dtype),
    );
    for (const [transposeA, transposeB] of [
      [false, false],
      [true, false],
      [false, true],
      [true, true],
    ])
      for (const [alpha, beta] of [
        [1, null],
        [0.5, -3],
        [2, null],
      ] as const) {
        const operands = {
          a: Tensor.from(device(), a, transposeA ? [count, k, m] : [count, m, k], dtype),
          b: Tensor.from(device(), b, transposeB ? [count, n, k] : [count, k, n], dtype),
          c: beta === null ? null : Tensor.from(device(), c, [count, m, n], dtype),
          d: Tensor.empty(device(), [count, m, n], dtype),
        };
        matrixProducts(device(), { ...operands, transposeA, transposeB, alpha, beta: beta ?? 1 });
        const expected = Float64Array.from({ length: count * m * n }, (_, at) => {
          const [which, i, j] = [Math.floor(at / (m * n)), Math.floor(at / n) % m, at % n];
          const [x, y] = [a.subarray(which * m * k), b.subarray(which * k * n)];
          let sum = 0;
          for (let t = 0; t < k; t++)
            sum += x[transposeA ? t * m + i : i * k + t] * y[transposeB ? j * k + t : t * n + j];
          return alpha * sum + (beta ?? 0) * c[at];
        });
        expect(relativeError(operands.d.read(), expected)).toBeLessThan(tolerance(dtype));
        for (const tensor of Object.values(operands)) tensor?.free();
      }
  });

  it('refuses operands that do not fit', () => {
    const [a, d] = [Tensor.empty(device(), [2, 3, 4], dtype), Tensor.empty(device(), [2, 3, 3], dtype)];
    expect(() => matrixProducts(device(), { a, b: a, d })).toThrow('matrixProducts: b');
    a.free();
    d.free();
  });
});
