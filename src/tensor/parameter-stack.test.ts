import { afterEach, describe, expect, it } from 'vitest';
import { cudaAbsence } from '../device/cuda/cuda.js';
import { castInto } from '../ops/cast/op.js';
import { cuda } from '../testing/devices.js';
import { exportedBy, RecordingCuda } from '../testing/recording-cuda.js';
import { Parameter } from './parameter.js';
import { ParameterStack } from './parameter-stack.js';

const SHAPE = {
  heads: { heads: 12, groups: 2, dk: 64, dv: 64 },
  sparse: { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 },
};
const recording = () => new RecordingCuda(exportedBy(SHAPE));
const absence = cudaAbsence();

describe('a stack of parameters', () => {
  it('lays rounded copies one after another, rows filled up to a multiple of 16', () => {
    const device = recording();
    const [first, second] = [new Parameter(device, 'a', [5, 4]), new Parameter(device, 'b', [2, 4])];
    const stack = new ParameterStack(device, [first, second], 'bf16');
    const rounded: string[] = [];
    const operand = () => stack.operand((from) => void rounded.push(`${from.shape}`));
    const memory = operand();
    expect(memory.shape).toEqual([16, 4]);
    expect(memory.storage.leaf).toBeNull();
    expect(first.rounded!.pointer).toBe(memory.pointer);
    expect(second.rounded!.pointer).toBe(memory.pointer + 40n);
    expect(first.rounded!.storage.leaf).not.toBeNull();
    expect(first.rounded!.storage.leaf).not.toBe(second.rounded!.storage.leaf);
    operand();
    expect(rounded).toEqual(['5,4', '2,4']);
    second.changed();
    operand();
    expect(rounded).toEqual(['5,4', '2,4', '2,4']);
    for (const thing of [first, second, stack]) thing.free();
    expect(device.pool.bytesInUse).toBe(0);
  });

  it('takes matrices of one width that no product has used', () => {
    const device = recording();
    const parameters = [
      [2, 4],
      [2, 5],
    ].map((shape, i) => new Parameter(device, `w${i}`, shape));
    expect(() => new ParameterStack(device, parameters, 'bf16')).toThrow('w1 [2, 5] cannot stand above others');
    parameters[0].as('bf16', () => {});
    expect(() => new ParameterStack(device, parameters.slice(0, 1), 'bf16')).toThrow('in use already');
  });
});

describe('a stack of parameters on CUDA', () => {
  const made: { free(): void }[] = [];
  afterEach(() => {
    for (const thing of made.splice(0)) thing.free();
  });

  it('holds the values of all, and zeros', (context) => {
    if (absence) context.skip(absence);
    const device = cuda();
    const [first, second] = [new Parameter(device, 'a', [3, 2]), new Parameter(device, 'b', [1, 2])];
    first.value.write([1, 2, 3, 4, 5, 6]);
    second.value.write([7, 8]);
    const stack = new ParameterStack(device, [first, second], 'bf16');
    made.push(first, second, stack);
    const round = (from: Parameter['value'], into: Parameter['value']) => castInto(device, from, into);
    expect([...stack.operand(round).read()]).toEqual([1, 2, 3, 4, 5, 6, 7, 8, ...new Array(24).fill(0)]);
    second.value.write([9, 10]);
    second.changed();
    expect([...stack.operand(round).read()].slice(6, 8)).toEqual([9, 10]);
  });
});
