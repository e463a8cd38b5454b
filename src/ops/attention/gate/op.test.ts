import { describe, expect, it } from 'vitest';
import { Tape } from '../../../tensor/tape.js';
import { cpu, devices, rounded, tolerance } from '../../../testing/devices.js';
import { dot, finiteDifferences, randomValues, relativeError } from '../../../testing/numbers.js';
import { eachThreadCount } from '../../../testing/threads.js';
import { Sequences } from '../../common/sequences.js';
import { rotaryAngles } from '../../rope/frequencies.js';
import { RotaryTable, splitHeads } from '../../rope/op.js';
import { splitBackward, splitForward } from '../../rope/reference.js';
import { type GateOptions, gate, gateColumns, gateStatistics, gateSums, summarizeGates } from './op.js';
import { gateBackward, gateForward, gateStatisticsReference } from './reference.js';

const KINDS: GateOptions[] = [
  { kind: 'softmax', temperature: 1 },
  { kind: 'softmax', temperature: 0.25 },
  { kind: 'sigmoid', temperature: 1 },
  { kind: 'sigmoid', temperature: 3 },
];
const SOFTMAX = KINDS[0];

describe('gate reference', () => {
  it.each(KINDS)('has gradients equal to finite differences for %o', (options) => {
    const [logits, dGates] = [randomValues(12, 1), randomValues(12, 2)];
    const value = () => dot(gateForward(logits, options), dGates);
    const dLogits = gateBackward(logits, options, dGates);
    expect(relativeError(dLogits, finiteDifferences(value, logits))).toBeLessThan(1e-8);
  });

  it('starts uniform: a third each from zero logits', () => {
    expect(relativeError(gateForward(new Float64Array(3), SOFTMAX), [1 / 3, 1 / 3, 1 / 3])).toBeLessThan(1e-15);
  });

  it('knows uniform, collapsed and in between', () => {
    const third = Float64Array.of(1, 1, 1);
    expect(gateStatisticsReference([third])).toMatchObject({ collapseFraction: 0, max: 1 / 3 });
    expect(gateStatisticsReference([third]).entropyMean).toBeCloseTo(Math.log(3), 14);
    const mixed = gateStatisticsReference([third, Float64Array.of(0, 0.5, 0, 0.99, 0.005, 0.005, 0, 0, 0)]);
    expect(mixed.collapseFraction).toBe(0.5);
    expect(mixed.entropyMin).toBe(0);
    expect(mixed.shares[1]).toBeCloseTo((1 / 3 + 1 + 0.005 + 1 / 3) / 4, 14);
  });
});

describe.each(devices())('gate on $name', ({ device, dtype }) => {
  const random = (count: number, seed: number) => rounded(randomValues(count, seed), dtype);

  describe.each(KINDS)('%o', (options) => {
    it.each([
      [1, 1],
      [5, 3],
      [100, 12],
      [257, 16],
      [0, 4],
    ])('equals the reference for %i tokens and %i heads', (tokens, heads) => {
      const logits = random(tokens * heads * 3, 1).map((value) => 4 * value);
      const dGates = randomValues(tokens * heads * 3, 2);
      const tape = new Tape(device());
      const x = tape.watch(tape.from(logits, [tokens, heads * 3], dtype));
      const gates = gate(tape, x, options);
      expect(gates.shape).toEqual([tokens, heads, 3]);
      expect(gates.dtype).toBe('f32');
      expect(relativeError(gates.read(), gateForward(logits, options))).toBeLessThan(tolerance('f32'));
      tape.backward(gates, dGates);
      const expected = gateBackward(logits, options, dGates);
      expect(relativeError(tape.gradient(x)!.read(), expected)).toBeLessThan(tolerance(dtype));
      tape.end();
    });

    it.each([
      [1, 1, 0],
      [70, 12, 4],
      [300, 5, 1],
      [3, 300, 3], // more heads than a block has threads
      [0, 4, 4],
    ])('is columns behind the heads: %i tokens, %i heads, %i columns to fill up', (tokens, heads, behind) => {
      const parts = [
        { heads: 2, size: 4, rotate: true },
        { heads: 1, size: 3, rotate: false },
      ];
      const [first, logits, rotary] = [11, 3 * heads, { size: 4, theta: 10000 }];
      const width = first + logits + behind;
      const values = random(tokens * width, 1);
      const bias = randomValues(logits, 2);
      const at = (t: number, c: number) => t * width + first + c;
      const ownLogits = Float64Array.from(
        { length: tokens * logits },
        (_, i) => values[at(Math.floor(i / logits), i % logits)] + bias[i % logits],
      );
      const projected = Float64Array.from(
        { length: tokens * first },
        (_, i) => values[Math.floor(i / first) * width + (i % first)],
      );
      const dGates = randomValues(tokens * logits, 3);
      const dHeads = parts.map((part, i) => random(tokens * part.heads * part.size, 4 + i));
      const sequences = new Sequences(device(), [tokens]);
      const tape = new Tape(device());
      const [table, angles] = [new RotaryTable(device(), rotary), rotaryAngles(rotary)];
      const fused = tape.watch(tape.from(values, [tokens, width], dtype));
      const tb = tape.watch(tape.from(bias, [logits]));
      // Twice, so that both ways of writing the gradient are taken.
      const runs = [0, 1].map(() => {
        const columns = gateColumns(tape, fused, first, tb, options);
        return { heads: splitHeads(tape, fused, parts, sequences, { table }, columns), gates: columns.gates };
      });
      const positions = Array.from({ length: tokens }, (_, i) => i);
      for (const run of runs) {
        expect(relativeError(run.gates.read(), gateForward(ownLogits, options))).toBeLessThan(tolerance('f32'));
        splitForward(projected, parts, positions, angles).forEach((part, i) => {
          expect(relativeError(run.heads[i].read(), part)).toBeLessThan(tolerance(dtype));
        });
      }
      tape.backward(
        runs.flatMap(({ gates, heads }) => [gates, ...heads]),
        runs.flatMap(() => [dGates, ...dHeads]),
      );
      const dLogits = gateBackward(ownLogits, options, dGates);
      const dProjected = splitBackward(dHeads, parts, positions, angles);
      const expected = new Float64Array(tokens * width);
      const dBias = new Float64Array(logits);
      for (let t = 0; t < tokens; t++) {
        for (let c = 0; c < first; c++) expected[t * width + c] = 2 * dProjected[t * first + c];
        for (let c = 0; c < logits; c++) {
          expected[at(t, c)] = 2 * dLogits[t * logits + c];
          dBias[c] += expected[at(t, c)];
        }
      }
      const actual = tape.gradient(fused)!.read();
      expect(relativeError(actual, expected)).toBeLessThan(tolerance(dtype));
      // Padding has a gradient of zero, not what the memory held before.
      expect(actual.every((value, i) => i % width < first + logits || value === 0)).toBe(true);
      expect(relativeError(tape.gradient(tb)!.read(), dBias)).toBeLessThan(tolerance('f32'));
      tape.end();
      table.free();
      sequences.free();
    });

    it('has columns of zero gradient when nothing used the gates', () => {
      const tape = new Tape(device());
      const sequences = new Sequences(device(), [9]);
      const fused = tape.watch(tape.from(random(9 * 12, 1), [9, 12], dtype));
      const columns = gateColumns(tape, fused, 2, tape.zeros([9]), options);
      const part = { heads: 1, size: 2, rotate: false };
      const [head] = splitHeads(tape, fused, [part], sequences, null, columns);
      tape.backward(head, new Float64Array(18).fill(1));
      const expected = Float32Array.from({ length: 9 * 12 }, (_, i) => Number(i % 12 < 2));
      expect(Float32Array.from(tape.gradient(fused)!.read())).toEqual(expected);
      tape.end();
      sequences.free();
    });

    it('stays finite for huge logits', () => {
      const tape = new Tape(device());
      const values = gate(tape, tape.from([1e4, -1e4, 0, -1e30, -1e30, -1e30], [1, 6], dtype), options).read();
      expect(values.every((value) => value >= 0 && value <= 1)).toBe(true);
      tape.end();
    });

    it('adds to an existing gradient', () => {
      const tape = new Tape(device());
      const logits = random(60, 1);
      const x = tape.watch(tape.from(logits, [4, 15], dtype));
      const [first, second] = [gate(tape, x, options), gate(tape, x, options)];
      tape.backward([first, second], [randomValues(60, 3), randomValues(60, 4)]);
      const dGates = randomValues(60, 3).map((value, i) => value + randomValues(60, 4)[i]);
      const expected = gateBackward(logits, options, dGates);
      expect(relativeError(tape.gradient(x)!.read(), expected)).toBeLessThan(tolerance(dtype));
      tape.end();
    });

    it('keeps a NaN inside its head', () => {
      const tape = new Tape(device());
      const values = gate(tape, tape.from([0, Number.NaN, 0, 1, 2, 3], [1, 6], dtype), options).read();
      expect([...values.slice(0, 3)].some(Number.isNaN)).toBe(true);
      expect([...values.slice(3)].every(Number.isFinite)).toBe(true);
      tape.end();
    });
  });

  it.each<[string, Partial<GateOptions>, number[]]>([
    ['cmp', { force: 'cmp' }, [1, 0, 0]],
    ['sel', { force: 'sel' }, [0, 1, 0]],
    ['win', { force: 'win' }, [0, 0, 1]],
    ['uniform', { uniform: true }, [1, 1, 1].map((one) => Math.fround(one / 3))],
  ])('can be forced to %s, with a gradient of zero', (_, override, row) => {
    const tape = new Tape(device());
    const x = tape.watch(tape.from(randomValues(18, 1), [2, 9], dtype));
    const gates = gate(tape, x, { ...SOFTMAX, ...override });
    expect([...gates.read()]).toEqual(Array.from({ length: 6 }, () => row).flat());
    tape.backward(gates, randomValues(18, 2));
    expect(tape.gradient(x)!.read()).toEqual(new Float32Array(18));
    tape.end();
  });

  it('stops the gradient, and leaves an existing one', () => {
    const tape = new Tape(device());
    const logits = random(18, 1);
    const x = tape.watch(tape.from(logits, [2, 9], dtype));
    const [stopped, trained] = [gate(tape, x, { ...SOFTMAX, stopGradient: true }), gate(tape, x, SOFTMAX)];
    expect(stopped.read()).toEqual(trained.read());
    tape.backward([stopped, trained], [randomValues(18, 2), randomValues(18, 3)]);
    const expected = gateBackward(logits, SOFTMAX, randomValues(18, 3));
    expect(relativeError(tape.gradient(x)!.read(), expected)).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it('names what does not fit', () => {
    const tape = new Tape(device());
    expect(() => gate(tape, tape.zeros([2, 4]), SOFTMAX)).toThrow('3 columns per head, not 4');
    const fused = tape.zeros([2, 8]);
    expect(() => gateColumns(tape, fused, 3, tape.zeros([6]), SOFTMAX)).toThrow('6 columns from 3 on');
    expect(() => gateColumns(tape, fused, 3, tape.zeros([4]), SOFTMAX)).toThrow('3 columns per head, not 4');
    expect(() => gate(tape, tape.zeros([6]), SOFTMAX)).toThrow('gate: logits must have shape [*, *], not [6]');
    expect(() => gate(tape, tape.zeros([2, 3]), { kind: 'softmax', temperature: 0 })).toThrow('above 0, not 0');
    const misspelt = { kind: 'relu' as 'softmax', temperature: 1 };
    expect(() => gate(tape, tape.zeros([2, 3]), misspelt)).toThrow(
      "the gate's kind must be softmax or sigmoid, not relu",
    );
    expect(() => gate(tape, tape.zeros([2, 3]), { ...SOFTMAX, force: 'cmp', uniform: true })).toThrow('not both');
    tape.end();
  });

  it('has statistics equal to the reference', () => {
    // Three layers, from nearly uniform to collapsed, and sigmoid gates that do not add up to 1.
    const layers = [0.5, 3, 40].map((size, i) =>
      gateForward(
        randomValues(3 * (i === 1 ? 5000 : 70), i + 1).map((value) => size * value),
        KINDS[i === 1 ? 2 : 0],
      ).map(Math.fround),
    );
    const tape = new Tape(device());
    const tensors = layers.map((layer) => tape.from(layer, [layer.length / 6, 2, 3]));
    const actual = gateStatistics(device(), tensors);
    const expected = gateStatisticsReference(layers);
    expect(actual.collapseFraction).toBeGreaterThan(0);
    for (const name of ['entropyMean', 'entropyMin', 'maxMean', 'max', 'collapseFraction'] as const)
      expect(actual[name], name).toBeCloseTo(expected[name], 6);
    expect(relativeError(actual.shares, expected.shares)).toBeLessThan(1e-6);
    expect(actual.shares.reduce((a, b) => a + b)).toBeCloseTo(1, 12);
    tape.end();
  });

  it('has statistics that show NaN and the absence of rows', () => {
    const tape = new Tape(device());
    const broken = gateStatistics(device(), [tape.from([0.2, 0.3, 0.5, Number.NaN, 0, 1, 1, 0, 0], [3, 1, 3])]);
    expect([broken.entropyMean, broken.entropyMin, broken.max, broken.shares[0]].every(Number.isNaN)).toBe(true);
    expect(gateStatistics(device(), []).entropyMean).toBeNaN();
    expect(gateStatistics(device(), [tape.empty([0, 4, 3])]).entropyMin).toBeNaN();
    expect(gateStatistics(device(), [tape.zeros([2, 4, 3])]).entropyMean).toBeCloseTo(Math.log(3), 6);
    tape.end();
  });
});

describe('gate on the CPU', () => {
  it('does not depend on the thread count', () => {
    const logits = randomValues(3 * 5 * 5000, 1);
    const runs = eachThreadCount(() => {
      const tape = new Tape(cpu());
      const x = tape.watch(tape.from(logits, [5000, 15]));
      const gates = gate(tape, x, SOFTMAX);
      const sums = gateSums(cpu(), gates);
      const statistics = summarizeGates([sums.read()]);
      sums.free();
      tape.backward(gates, logits);
      const gradient = tape.gradient(x)!.read();
      tape.end();
      return { statistics, gradient };
    });
    for (const run of runs) expect(run).toEqual(runs[0]);
  });
});
