import { describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { Parameter } from '../../tensor/parameter.js';
import { Tape } from '../../tensor/tape.js';
import { DTYPE_BYTES, Tensor } from '../../tensor/tensor.js';
import { cpu, devices, rounded, tolerance } from '../../testing/devices.js';
import { finiteDifferences, randomValues, relativeError } from '../../testing/numbers.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { castInto } from '../cast/op.js';
import { linearBackward, linearForward } from '../linear/reference.js';
import { crossEntropy, crossEntropyLosses, IGNORED, linearCrossEntropy, linearCrossEntropyLosses } from './op.js';
import { crossEntropyBackward, crossEntropyForward } from './reference.js';

const wide = (count: number, seed: number) => randomValues(count, seed).map((v) => Math.fround(v * 6));

/** Targets in the vocabulary, every fifth one ignored. */
const randomTargets = (count: number, vocab: number, seed: number) =>
  Int32Array.from(randomValues(count, seed), (v, i) => (i % 5 === 4 ? IGNORED : Math.floor(((v + 1) / 2) * vocab)));

describe('crossentropy reference', () => {
  it('has a gradient equal to finite differences', () => {
    const [logits, targets] = [wide(15, 1), [2, IGNORED, 0]];
    const slopes = finiteDifferences(() => 3 * crossEntropyForward(logits, targets, 5).loss, logits);
    expect(relativeError(crossEntropyBackward(logits, targets, 5, 3), slopes)).toBeLessThan(1e-8);
  });
});

describe.each(devices())('crossEntropy on $name', ({ device, dtype }) => {
  it.each([
    [1, 1],
    [3, 5],
    [17, 16],
    [40, 1000],
    [3, 40001],
    [5, 50304],
    [0, 8],
  ])('equals the reference for %i tokens, vocabulary %i', (tokens, vocab) => {
    const [logits, targets] = [rounded(wide(tokens * vocab, 1), dtype), randomTargets(tokens, vocab, 2)];
    const tape = new Tape(device());
    const tLogits = tape.watch(tape.from(logits, [tokens, vocab], dtype));
    const tTargets = tape.from(targets, [tokens], 'i32');
    const losses = crossEntropyLosses(device(), tLogits, tTargets);
    const loss = crossEntropy(tape, tLogits, tTargets);
    const expected = crossEntropyForward(logits, targets, vocab);
    expect(loss.shape).toEqual([1]);
    expect(relativeError(loss.read(), [expected.loss])).toBeLessThan(tolerance('f32'));
    expect(relativeError(losses.read(), expected.losses)).toBeLessThan(tolerance('f32'));
    tape.backward(loss, [0.75]);
    const slopes = crossEntropyBackward(logits, targets, vocab, 0.75);
    expect(relativeError(tape.gradient(tLogits)!.read(), slopes)).toBeLessThan(tolerance(dtype));
    losses.free();
    tape.end();
  });

  it('is exact for large logits and small losses', () => {
    // 12 apart, as far from zero as the dtype has both numbers exactly.
    const far = dtype === 'f32' ? 1e4 : 128;
    const logits = Float64Array.from([far, far - 12, -1e4, -1e30, 20, 3e38, 0, -3e38]);
    const tape = new Tape(device());
    const targets = tape.from([0, 1], [2], 'i32');
    const losses = crossEntropyLosses(device(), tape.from(logits, [2, 4], dtype), targets);
    const [small, large] = losses.read();
    expect(Math.abs(small / Math.log1p(Math.exp(-12)) - 1)).toBeLessThan(1e-2);
    expect(large).toBe(0);
    losses.free();
    tape.end();
  });

  it('gives loss 0 and gradient 0 when every target is ignored', () => {
    const tape = new Tape(device());
    const logits = tape.watch(tape.from(randomValues(10, 1), [2, 5], dtype));
    const loss = crossEntropy(tape, logits, tape.from([IGNORED, IGNORED], [2], 'i32'));
    expect(loss.item()).toBe(0);
    tape.backward(loss);
    expect(tape.gradient(logits)!.read()).toEqual(new Float32Array(10));
    tape.end();
  });

  it('adds to existing gradients, ignored rows included', () => {
    const logits = rounded(wide(21, 1), dtype);
    const [first, second] = [Int32Array.of(6, IGNORED, 0), Int32Array.of(IGNORED, 3, 5)];
    const tape = new Tape(device());
    const tLogits = tape.watch(tape.from(logits, [3, 7], dtype));
    const a = crossEntropy(tape, tLogits, tape.from(first, [3], 'i32'));
    const b = crossEntropy(tape, tLogits, tape.from(second, [3], 'i32'));
    tape.backward([a, b], [[1], [2]]);
    const other = crossEntropyBackward(logits, second, 7, 2);
    const expected = crossEntropyBackward(logits, first, 7, 1).map((v, i) => v + other[i]);
    expect(relativeError(tape.gradient(tLogits)!.read(), expected)).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it('propagates NaN to the loss and to its own row, and from an ignored row nowhere', () => {
    const logits = [1, 2, 3, Number.NaN, 1, 2, Number.NaN, 1, 2];
    const tape = new Tape(device());
    const tLogits = tape.watch(tape.from(logits, [3, 3], dtype));
    const loss = crossEntropy(tape, tLogits, tape.from([0, 1, IGNORED], [3], 'i32'));
    expect(loss.item()).toBeNaN();
    tape.backward(loss);
    const slopes = tape.gradient(tLogits)!.read();
    expect(Array.from(slopes, Number.isNaN)).toEqual([false, false, false, true, true, true, false, false, false]);
    tape.end();
  });

  it('takes -inf for tokens that cannot come', () => {
    const never = Number.NEGATIVE_INFINITY;
    const tape = new Tape(device());
    const logits = tape.watch(tape.from([never, 1, 1], [1, 3], dtype));
    const loss = crossEntropy(tape, logits, tape.from([2], [1], 'i32'));
    expect(loss.item()).toBeCloseTo(Math.log(2), 6);
    tape.backward(loss);
    expect(relativeError(tape.gradient(logits)!.read(), [0, 0.5, -0.5])).toBeLessThan(1e-6);
    const surprised = crossEntropy(tape, logits, tape.from([0], [1], 'i32'));
    expect(surprised.item()).toBe(Number.POSITIVE_INFINITY);
    tape.end();
  });

  it('names the target outside the vocabulary, where the host may ask, and the tensor that does not fit', () => {
    const tape = new Tape(device());
    const logits = tape.watch(tape.zeros([3, 5], dtype));
    const run = (ids: number[]) => crossEntropy(tape, logits, tape.from(ids, [ids.length], 'i32'));
    if (device().kind === 'cpu') {
      expect(() => run([0, IGNORED, 5])).toThrow(UsageError);
      expect(() => run([0, IGNORED, 5])).toThrow('crossEntropy: token 2 has target 5, outside the vocabulary of 5');
      expect(() => run([0, -1, 9])).toThrow('crossEntropy: token 1 has target -1, outside the vocabulary of 5');
    } else {
      const loss = run([0, IGNORED, 5]);
      expect(loss.item()).toBeNaN();
      tape.backward(loss, [1]);
      const isNan = Array.from(tape.gradient(logits)!.read(), Number.isNaN);
      expect(isNan).toEqual([...Array(10).fill(false), ...Array(5).fill(true)]);
    }
    expect(() => run([0])).toThrow('crossEntropy: targets must have shape [3], not [1]');
    tape.end();
    expect(device().pool.bytesInUse).toBe(0);
  });
});

describe.each(devices())('linearCrossEntropy on $name', ({ device, dtype }) => {
  const reference = (x: Float64Array, weight: Float64Array, targets: Int32Array, dim: number, dLoss: number) => {
    const [tokens, vocab] = [targets.length, weight.length / dim];
    const logits = linearForward(x, weight, tokens, vocab, dim);
    const dLogits = crossEntropyBackward(logits, targets, vocab, dLoss);
    return {
      ...crossEntropyForward(logits, targets, vocab),
      ...linearBackward(x, weight, dLogits, tokens, vocab, dim),
    };
  };

  it.each([
    [1, 1, 1, 1],
    [7, 5, 11, 3],
    [100, 24, 70, 32],
    [64, 16, 33, 64],
    [64, 16, 33, undefined],
    [7, 8, 1096, 3],
    [6, 8, 20480, undefined],
    [5, 8, 50304, undefined],
    [0, 4, 9, undefined],
  ])('equals the reference for %i tokens of %i, vocabulary %i, chunks of %s', (tokens, dim, vocab, chunk) => {
    // The chunk's logits are held in the dtype: in bf16 large ones are themselves off by more than the limit.
    const inputs = dtype === 'f32' ? wide(tokens * dim, 1) : randomValues(tokens * dim, 1);
    const [x, weight] = [inputs, randomValues(vocab * dim, 2)].map((v) => rounded(v, dtype));
    const targets = randomTargets(tokens, vocab, 3);
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [tokens, dim], dtype));
    const tw = tape.watch(tape.from(weight, [vocab, dim], dtype));
    const tTargets = tape.from(targets, [tokens], 'i32');
    const options = chunk === undefined ? {} : { chunk };
    const expected = reference(x, weight, targets, dim, 0.75);
    const losses = linearCrossEntropyLosses(device(), tx, tw, tTargets, options);
    expect(relativeError(losses.read(), expected.losses)).toBeLessThan(tolerance(dtype));
    losses.free();
    const loss = linearCrossEntropy(tape, tx, tw, tTargets, options);
    expect(relativeError(loss.read(), [expected.loss])).toBeLessThan(tolerance(dtype));
    tape.backward(loss, [0.75]);
    expect(relativeError(tape.gradient(tx)!.read(), expected.dx)).toBeLessThan(tolerance(dtype));
    expect(relativeError(tape.gradient(tw)!.read(), expected.dw)).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it('adds to existing gradients', () => {
    const [x, weight] = [randomValues(30, 1), randomValues(42, 2)].map((v) => rounded(v, dtype));
    const targets = randomTargets(5, 7, 3);
    const head = new Parameter(device(), 'head', [7, 6]);
    head.value.write(weight);
    const operand = head.as(dtype, (from, into) => castInto(device(), from, into));
    const tape = new Tape(device());
    const tx = tape.watch(tape.from(x, [5, 6], dtype));
    const ids = tape.from(targets, [5], 'i32');
    const losses = [1, 2].map(() => linearCrossEntropy(tape, tx, operand, ids, { chunk: 2 }));
    tape.backward(losses, [1, 2]);
    const expected = reference(x, weight, targets, 6, 3);
    expect(relativeError(tape.gradient(tx)!.read(), expected.dx)).toBeLessThan(tolerance(dtype));
    expect(relativeError(head.gradient!.read(), expected.dw)).toBeLessThan(tolerance(dtype));
    tape.end();
    head.free();
  });

  it('gives loss 0 and gradients 0 when every target is ignored', () => {
    const tape = new Tape(device());
    const x = tape.watch(tape.from(randomValues(6, 1), [2, 3], dtype));
    const weight = tape.watch(tape.from(randomValues(12, 2), [4, 3], dtype));
    const loss = linearCrossEntropy(tape, x, weight, tape.from([IGNORED, IGNORED], [2], 'i32'), { chunk: 1 });
    expect(loss.item()).toBe(0);
    tape.backward(loss);
    expect(Math.max(...tape.gradient(x)!.read().map(Math.abs), ...tape.gradient(weight)!.read().map(Math.abs))).toBe(0);
    tape.end();
  });

  it('never holds the logits of more than a chunk, and without gradients nothing else', () => {
    const { pool } = device();
    const [tokens, dim, vocab] = [1024, 8, 4096];
    const x = Tensor.from(device(), randomValues(tokens * dim, 1), [tokens, dim], dtype);
    const weight = Tensor.from(device(), randomValues(vocab * dim, 2), [vocab, dim], dtype);
    const ids = Tensor.from(device(), randomTargets(tokens, vocab, 3), [tokens], 'i32');
    const peak = (record: boolean) => {
      const before = pool.bytesInUse;
      pool.resetPeak();
      const tape = new Tape(device(), { record });
      if (record) [x, weight].forEach((input) => void tape.watch(input));
      const loss = linearCrossEntropy(tape, x, weight, ids, { chunk: 32 });
      const value = loss.item();
      if (record) tape.backward(loss);
      tape.end();
      expect(pool.bytesInUse).toBe(before);
      return { value, bytes: pool.peakBytesInUse - before };
    };
    const logits = 32 * vocab * DTYPE_BYTES[dtype];
    const [trained, evaluated] = [peak(true), peak(false)];
    expect(trained.bytes).toBeLessThan(1.3 * (logits + (vocab + tokens) * dim * 4) + 8192);
    expect(evaluated.bytes).toBeLessThan(1.3 * logits + 8192);
    expect(Math.abs(trained.value / evaluated.value - 1)).toBeLessThan(1e-6);
    for (const tensor of [x, weight, ids]) tensor.free();
  });

  it('names what does not fit', () => {
    const tape = new Tape(device());
    const run = (chunk: number, dim = 3, id = 0) =>
      linearCrossEntropy(tape, tape.zeros([2, 3]), tape.zeros([4, dim]), tape.from([0, id], [2], 'i32'), { chunk });
    expect(() => run(0)).toThrow('linearCrossEntropy: chunk must be a whole number from 1, not 0');
    expect(() => run(1, 5)).toThrow('linearCrossEntropy: weight must have shape [*, 3], not [4, 5]');
    if (device().kind === 'cpu')
      expect(() => run(1, 3, 4)).toThrow('linearCrossEntropy: token 1 has target 4, outside the vocabulary of 4');
    else expect(run(1, 3, 4).item()).toBeNaN();
    tape.end();
    expect(device().pool.bytesInUse).toBe(0);
  });

  it('propagates NaN to the loss, to the gradient of its own token and to that of the weight', () => {
    const tape = new Tape(device());
    const x = tape.watch(tape.from([1, 2, Number.NaN, 4], [2, 2], dtype));
    const weight = tape.watch(tape.from([1, 2, 3, 4, 5, 6], [3, 2], dtype));
    const loss = linearCrossEntropy(tape, x, weight, tape.from([0, 1], [2], 'i32'));
    expect(loss.item()).toBeNaN();
    tape.backward(loss);
    expect(Array.from(tape.gradient(x)!.read(), Number.isNaN)).toEqual([false, false, true, true]);
    expect(Array.from(tape.gradient(weight)!.read()).every(Number.isNaN)).toBe(true);
    tape.end();
  });
});

it('gives the same numbers for any number of threads', () => {
  expectSameForAnyThreadCount(() => {
    const tape = new Tape(cpu());
    const x = tape.watch(tape.from(wide(200 * 16, 1), [200, 16]));
    const weight = tape.watch(tape.from(randomValues(300 * 16, 2), [300, 16]));
    const ids = tape.from(randomTargets(200, 300, 3), [200], 'i32');
    const logits = tape.watch(tape.from(wide(200 * 300, 4), [200, 300]));
    const [fused, plain] = [linearCrossEntropy(tape, x, weight, ids, { chunk: 64 }), crossEntropy(tape, logits, ids)];
    const losses = [fused.readBytes(), plain.readBytes()];
    tape.backward([fused, plain], [[1], [1]]);
    const slopes = [x, weight, logits].map((tensor) => tape.gradient(tensor)!.readBytes());
    tape.end();
    return [...losses, ...slopes];
  });
});
