import { describe, expect, it } from 'vitest';
import { Tape } from '../../../tensor/tape.js';
import { cpu, devices, type Precision, rounded, tolerance } from '../../../testing/devices.js';
import { readGolden } from '../../../testing/golden.js';
import { randomValues, relativeError } from '../../../testing/numbers.js';
import { eachThreadCount } from '../../../testing/threads.js';
import { combine } from './op.js';
import { type Branches, combineBackward, combineForward } from './reference.js';

function branchesOf(size: number, seed: number, dtype: Precision = 'f32'): Branches<Float64Array> {
  const random = (stream: number) => rounded(randomValues(size, stream), dtype);
  return [random(seed), random(seed + 1), random(seed + 2)];
}

describe.each(devices())('combine on $name', ({ device, dtype }) => {
  const random = (count: number, seed: number) => rounded(randomValues(count, seed), dtype);

  it.each([
    [1, 1, 1],
    [3, 2, 5],
    [50, 6, 16],
    [33, 12, 64],
    [0, 4, 8],
    [7, 1, 20],
  ])('equals the reference for %i tokens, %i heads of %i', (tokens, heads, size) => {
    const gates = randomValues(tokens * heads * 3, 1);
    const branches = branchesOf(tokens * heads * size, 2, dtype);
    const dOut = random(tokens * heads * size, 5);
    const tape = new Tape(device());
    const tg = tape.watch(tape.from(gates, [tokens, heads, 3]));
    const tb = branches.map((values) => tape.watch(tape.from(values, [tokens, heads, size], dtype)));
    const out = combine(tape, tg, tb[0], tb[1], tb[2]);
    const limit = tolerance(dtype);
    expect(relativeError(out.read(), combineForward(gates, branches))).toBeLessThan(limit);
    tape.backward(out, dOut);
    const { dGates, dBranches } = combineBackward(gates, branches, dOut);
    expect(relativeError(tape.gradient(tg)!.read(), dGates)).toBeLessThan(limit);
    tb.forEach((branch, b) => {
      expect(relativeError(tape.gradient(branch)!.read(), dBranches[b])).toBeLessThan(limit);
    });
    tape.end();
  });

  it('equals the golden case', () => {
    const { inputs, outputs, dOut, gradients, layout } = readGolden();
    const shape = [layout.starts[1], layout.heads.heads, layout.heads.dv];
    const tape = new Tape(device());
    const gates = tape.watch(tape.from(inputs.gates, [shape[0], shape[1], 3]));
    const [cmp, sel, win] = [outputs.oCmp, outputs.oSel, outputs.oWin].map((values) => tape.from(values, shape, dtype));
    const out = combine(tape, gates, cmp, sel, win);
    expect(relativeError(out.read(), outputs.out)).toBeLessThan(tolerance(dtype));
    tape.backward(out, dOut);
    expect(relativeError(tape.gradient(gates)!.read(), gradients.dGates)).toBeLessThan(tolerance(dtype));
    tape.end();
  });

  it('adds to existing gradients', () => {
    const [gates, branches] = [randomValues(4 * 2 * 3, 1), branchesOf(4 * 2 * 7, 2, dtype)];
    const tape = new Tape(device());
    const tg = tape.watch(tape.from(gates, [4, 2, 3]));
    const tb = branches.map((values) => tape.watch(tape.from(values, [4, 2, 7], dtype)));
    const [first, second] = [combine(tape, tg, tb[0], tb[1], tb[2]), combine(tape, tg, tb[0], tb[1], tb[2])];
    tape.backward([first, second], [random(56, 6), random(56, 7)]);
    const dOut = random(56, 6).map((value, i) => value + random(56, 7)[i]);
    const { dGates, dBranches } = combineBackward(gates, branches, dOut);
    expect(relativeError(tape.gradient(tg)!.read(), dGates)).toBeLessThan(tolerance(dtype));
    tb.forEach((branch, b) => {
      expect(relativeError(tape.gradient(branch)!.read(), dBranches[b])).toBeLessThan(tolerance(dtype));
    });
    tape.end();
  });

  it('names the tensor whose shape does not fit', () => {
    const tape = new Tape(device());
    const [gates, good, bad] = [tape.zeros([2, 4, 3]), tape.zeros([2, 4, 5]), tape.zeros([2, 4, 6])];
    expect(() => combine(tape, good, good, good, good)).toThrow('combine: gates must have shape [*, *, 3]');
    expect(() => combine(tape, gates, tape.zeros([3, 4, 5]), good, good)).toThrow('combine: cmp must have shape');
    expect(() => combine(tape, gates, good, bad, good)).toThrow('combine: sel must have shape [2, 4, 5]');
    expect(() => combine(tape, gates, good, good, bad)).toThrow('combine: win must have shape [2, 4, 5]');
    tape.end();
  });
});

describe('combine on the CPU', () => {
  it('does not depend on the thread count', () => {
    const runs = eachThreadCount(() => {
      const tape = new Tape(cpu());
      const gates = tape.watch(tape.from(randomValues(900 * 3, 1), [300, 3, 3]));
      const [a, b, c] = branchesOf(900 * 20, 2).map((values) => tape.watch(tape.from(values, [300, 3, 20])));
      const out = combine(tape, gates, a, b, c);
      const values = out.read();
      tape.backward(out, randomValues(900 * 20, 5));
      const gradients = [gates, a, b, c].map((tensor) => tape.gradient(tensor)!.read());
      tape.end();
      return { values, gradients };
    });
    for (const run of runs) expect(run).toEqual(runs[0]);
  });
});
