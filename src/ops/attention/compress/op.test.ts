import { describe, expect, it } from 'vitest';
import type { Device } from '../../../device/device.js';
import { Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import { starts as offsetsOf } from '../../../testing/attention.js';
import { cpu, devices, type Precision, rounded, tolerance } from '../../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../../testing/numbers.js';
import { eachThreadCount } from '../../../testing/threads.js';
import { Sequences } from '../../common/sequences.js';
import { type Blocks, compressAverage, compressConv, compressMlp, unfold } from './op.js';
import * as reference from './reference.js';

const SHAPE: reference.CompressShape = { groups: 2, size: 3, l: 4, d: 2 };

/**
 * Lengths, groups, size, l, d: no block at all, one exactly, empty sequences, no overlap, stride 1, odd widths, many.
 */
const CASES: [number[], number, number, number, number][] = [
  [[1], 1, 1, 4, 2],
  [[4], 2, 3, 4, 2],
  [[0, 3, 9, 0, 4, 17], 2, 5, 4, 2],
  [[30, 13], 1, 16, 8, 8],
  [[21], 2, 7, 6, 1],
  [[700, 1, 400], 2, 24, 16, 4],
  [[1500], 1, 8, 8, 4],
  [[], 2, 4, 4, 2],
  [[333, 70], 2, 64, 32, 16],
];

function withBlocks<T>(device: Device, lengths: number[], l: number, d: number, body: (blocks: Blocks) => T): T {
  const tokens = new Sequences(device, lengths);
  try {
    return body({ tokens, l, d });
  } finally {
    tokens.free();
  }
}

describe('compress reference', () => {
  const starts = offsetsOf([7, 3, 4]);

  it('places blocks inside their sequences', () => {
    expect(reference.blockStarts(offsetsOf([7, 3, 0, 4, 8]), SHAPE)).toEqual([0, 2, 10, 14, 16, 18]);
  });

  it('averages each block', () => {
    const one = { groups: 1, size: 1, l: 4, d: 2 };
    const x = Float64Array.of(1, 2, 3, 4, 5, 6, 7);
    expect([...reference.convForward(x, reference.averageWeight(one), [0, 7], one)]).toEqual([2.5, 4.5]);
  });

  it('has conv gradients equal to finite differences', () => {
    const [x, weight, dy] = [randomValues(14 * 6, 1), randomValues(4 * 6, 2), randomValues(3 * 6, 3)];
    const { dx, dWeight } = reference.convBackward(x, weight, starts, SHAPE, dy);
    const value = () => dot(reference.convForward(x, weight, starts, SHAPE), dy);
    expect(relativeError(dx, finiteDifferences(value, x))).toBeLessThan(1e-8);
    expect(relativeError(dWeight, finiteDifferences(value, weight))).toBeLessThan(1e-8);
  });

  it('has unfold gradients equal to finite differences', () => {
    const [x, position, dOut] = [randomValues(14 * 6, 1), randomValues(4 * 6, 2), randomValues(3 * 6 * 4, 3)];
    const { dx, dPosition } = reference.unfoldBackward(dOut, starts, SHAPE);
    const value = () => dot(reference.unfoldForward(x, position, starts, SHAPE), dOut);
    expect(relativeError(dx, finiteDifferences(value, x))).toBeLessThan(1e-8);
    expect(relativeError(dPosition, finiteDifferences(value, position))).toBeLessThan(1e-8);
  });
});

describe.each(devices())('compress on $name', ({ device, dtype }) => {
  const random = (count: number, seed: number) => rounded(randomValues(count, seed), dtype);

  it.each(CASES)('avg equals the reference for %j, groups %i, size %i, l %i, d %i', (lengths, groups, size, l, d) => {
    withBlocks(device(), lengths, l, d, (blocks) => {
      const shape = { groups, size, l, d };
      const [tokens, count] = [blocks.tokens.total, blocks.tokens.compressed(blocks).total];
      const x = random(tokens * groups * size, 1);
      const dy = random(count * groups * size, 2);
      const tape = new Tape(device());
      const tx = tape.watch(tape.from(x, [tokens, groups, size], dtype));
      const y = compressAverage(tape, tx, blocks);
      const [starts, weight] = [blocks.tokens.starts, reference.averageWeight(shape)];
      const limit = tolerance(dtype);
      expect(y.shape).toEqual([count, groups, size]);
      expect(relativeError(y.read(), reference.convForward(x, weight, starts, shape))).toBeLessThan(limit);
      tape.backward(y, dy);
      const { dx } = reference.convBackward(x, weight, starts, shape, dy);
      expect(relativeError(tape.gradient(tx)!.read(), dx)).toBeLessThan(limit);
      tape.end();
    });
  });

  it.each(CASES)('conv equals the reference for %j, groups %i, size %i, l %i, d %i', (lengths, groups, size, l, d) => {
    withBlocks(device(), lengths, l, d, (blocks) => {
      const shape = { groups, size, l, d };
      const [tokens, count] = [blocks.tokens.total, blocks.tokens.compressed(blocks).total];
      const [x, weight] = [random(tokens * groups * size, 1), randomValues(l * groups * size, 2)];
      const dy = random(count * groups * size, 3);
      const tape = new Tape(device());
      const tx = tape.watch(tape.from(x, [tokens, groups, size], dtype));
      const tw = tape.watch(tape.from(weight, [l, groups, size]));
      const y = compressConv(tape, tx, tw, blocks);
      const { starts } = blocks.tokens;
      const limit = tolerance(dtype);
      expect(relativeError(y.read(), reference.convForward(x, weight, starts, shape))).toBeLessThan(limit);
      tape.backward(y, dy);
      const expected = reference.convBackward(x, weight, starts, shape, dy);
      expect(relativeError(tape.gradient(tx)!.read(), expected.dx)).toBeLessThan(limit);
      expect(relativeError(tape.gradient(tw)!.read(), expected.dWeight)).toBeLessThan(limit);
      tape.end();
    });
  });

  it.each(CASES)(
    'unfold equals the reference for %j, groups %i, size %i, l %i, d %i',
    (lengths, groups, size, l, d) => {
      withBlocks(device(), lengths, l, d, (blocks) => {
        const shape = { groups, size, l, d };
        const [tokens, count] = [blocks.tokens.total, blocks.tokens.compressed(blocks).total];
        const [x, position] = [random(tokens * groups * size, 1), randomValues(l * groups * size, 2)];
        const dOut = random(count * groups * size * l, 3);
        const tape = new Tape(device());
        const tx = tape.watch(tape.from(x, [tokens, groups, size], dtype));
        const tp = tape.watch(tape.from(position, [l, groups, size]));
        const out = unfold(tape, tx, tp, blocks);
        const { starts } = blocks.tokens;
        const limit = tolerance(dtype);
        expect(out.shape).toEqual([count * groups, l * size]);
        expect(relativeError(out.read(), reference.unfoldForward(x, position, starts, shape))).toBeLessThan(limit);
        tape.backward(out, dOut);
        const expected = reference.unfoldBackward(dOut, starts, shape);
        expect(relativeError(tape.gradient(tx)!.read(), expected.dx)).toBeLessThan(limit);
        expect(relativeError(tape.gradient(tp)!.read(), expected.dPosition)).toBeLessThan(limit);
        tape.end();
      });
    },
  );

  it('mlp equals the reference, and its gradients the finite differences', () => {
    withBlocks(device(), [7, 3, 4], SHAPE.l, SHAPE.d, (blocks) => {
      const hidden = 5;
      const values = {
        x: random(14 * 6, 1),
        position: randomValues(4 * 6, 2),
        w1: random(hidden * 12, 3),
        w2: random(3 * hidden, 4),
      };
      const dy = random(3 * 6, 5);
      const tape = new Tape(device());
      const watch = (data: Float64Array, shape: number[], held: Precision = dtype) =>
        tape.watch(tape.from(data, shape, held));
      const tensors: Record<keyof typeof values, Tensor> = {
        x: watch(values.x, [14, 2, 3]),
        position: watch(values.position, [4, 2, 3], 'f32'),
        w1: watch(values.w1, [hidden, 12]),
        w2: watch(values.w2, [3, hidden]),
      };
      const y = compressMlp(tape, tensors.x, tensors, blocks);
      expect(y.shape).toEqual([3, 2, 3]);
      const forward = () => reference.mlpForward(values.x, values, blocks.tokens.starts, SHAPE);
      expect(relativeError(y.read(), forward())).toBeLessThan(tolerance(dtype));
      tape.backward(y, dy);
      for (const name of ['x', 'position', 'w1', 'w2'] as const) {
        const expected = finiteDifferences(() => dot(forward(), dy), values[name]);
        expect(relativeError(tape.gradient(tensors[name])!.read(), expected), name).toBeLessThan(tolerance(dtype));
      }
      tape.end();
    });
  });

  it('gives avg from a conv that starts at 1/l', () => {
    withBlocks(device(), [40], 8, 4, (blocks) => {
      const tape = new Tape(device());
      const x = tape.from(randomValues(40 * 6, 1), [40, 2, 3], dtype);
      const weight = tape.from(new Float64Array(8 * 6).fill(1 / 8), [8, 2, 3]);
      expect(compressConv(tape, x, weight, blocks).read()).toEqual(compressAverage(tape, x, blocks).read());
      tape.end();
    });
  });

  it('adds to existing gradients', () => {
    withBlocks(device(), [11], SHAPE.l, SHAPE.d, (blocks) => {
      const [x, weight] = [random(66, 1), randomValues(24, 2)];
      const tape = new Tape(device());
      const tx = tape.watch(tape.from(x, [11, 2, 3], dtype));
      const tw = tape.watch(tape.from(weight, [4, 2, 3]));
      const conv = compressConv(tape, tx, tw, blocks);
      const again = compressConv(tape, tx, tw, blocks);
      const unfolded = unfold(tape, tx, tw, blocks);
      const [a, b, c] = [random(24, 3), random(24, 4), random(96, 5)];
      tape.backward([conv, again, unfolded], [a, b, c]);
      const { starts } = blocks.tokens;
      const sum = a.map((value, i) => value + b[i]);
      const first = reference.convBackward(x, weight, starts, SHAPE, sum);
      const second = reference.unfoldBackward(c, starts, SHAPE);
      const dx = first.dx.map((value, i) => value + second.dx[i]);
      const dw = first.dWeight.map((value, i) => value + second.dPosition[i]);
      expect(relativeError(tape.gradient(tx)!.read(), dx)).toBeLessThan(tolerance(dtype));
      expect(relativeError(tape.gradient(tw)!.read(), dw)).toBeLessThan(tolerance(dtype));
      tape.end();
    });
  });

  it('gives tokens in no block a gradient of zero', () => {
    withBlocks(device(), [3, 7], SHAPE.l, SHAPE.d, (blocks) => {
      const tape = new Tape(device());
      const x = tape.watch(tape.from(randomValues(60, 1), [10, 2, 3], dtype));
      const y = compressAverage(tape, x, blocks);
      tape.backward(y, randomValues(12, 2));
      const gradient = tape.gradient(x)!.read();
      expect(gradient.subarray(0, 18)).toEqual(new Float32Array(18)); // the sequence of 3 is shorter than a block
      expect(gradient.subarray(54)).toEqual(new Float32Array(6)); // the last token is in no finished block
      tape.end();
    });
  });

  it('names what does not fit', () => {
    withBlocks(device(), [9], 4, 2, (blocks) => {
      const tape = new Tape(device());
      const x = tape.zeros([9, 2, 3]);
      expect(() => compressAverage(tape, tape.zeros([8, 2, 3]), blocks)).toThrow('compress: x must have shape');
      expect(() => compressConv(tape, x, tape.zeros([3, 2, 3]), blocks)).toThrow('compress: weight must have shape');
      expect(() => unfold(tape, x, tape.zeros([4, 2, 2]), blocks)).toThrow('compress: position must have shape');
      const mlp = { position: tape.zeros([4, 2, 3]), w1: tape.zeros([5, 12]), w2: tape.zeros([3, 4]) };
      expect(() => compressMlp(tape, x, mlp, blocks)).toThrow('compress: w2 must have shape [3, 5]');
      tape.end();
    });
  });
});

describe('compress on the CPU', () => {
  it('does not depend on the thread count', () => {
    withBlocks(cpu(), [900, 333], 8, 4, (blocks) => {
      const runs = eachThreadCount(() => {
        const tape = new Tape(cpu());
        const x = tape.watch(tape.from(randomValues(1233 * 10, 1), [1233, 2, 5]));
        const weight = tape.watch(tape.from(randomValues(80, 2), [8, 2, 5]));
        const [y, unfolded] = [compressConv(tape, x, weight, blocks), unfold(tape, x, weight, blocks)];
        const values = y.read();
        tape.backward([y, unfolded], [randomValues(y.size, 3), randomValues(unfolded.size, 4)]);
        const gradients = [tape.gradient(x)!.read(), tape.gradient(weight)!.read()];
        tape.end();
        return { values, gradients };
      });
      for (const run of runs) expect(run).toEqual(runs[0]);
    });
  });
});
