/** Compares an operation and its gradients with a float64 reference, once and with gradients that are added. */
import { expect } from 'vitest';
import { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import { devices, type Precision, rounded, type TestDevice, tolerance } from './devices.js';
import { EmulatedCuda } from './emulated-cuda.js';
import { randomValues, relativeError } from './numbers.js';

/** The devices of this machine, and CUDA kernels on the thread emulator. */
export function devicesAndEmulator(): TestDevice[] {
  const gpu = new EmulatedCuda();
  const emulated = (dtype: Precision) => ({ name: `emulated GPU in ${dtype}`, device: () => gpu, dtype });
  return [...devices(), emulated('f32'), emulated('bf16')];
}

export interface Operand {
  readonly shape: readonly number[];
  /** Default: uniform in [-1, 1). */
  readonly values?: Float64Array;
}

export interface Expected {
  readonly y: Float64Array;
  readonly gradients: readonly Float64Array[];
}

export function expectOperation(
  { device, dtype }: TestDevice,
  operands: readonly Operand[],
  run: (tape: Tape, ...inputs: Tensor[]) => Tensor,
  reference: (dy: Float64Array, ...inputs: Float64Array[]) => Expected,
): void {
  const size = (shape: readonly number[]) => shape.reduce((product, count) => product * count, 1);
  const values = operands.map(({ shape, values: given }, i) =>
    rounded(given ?? randomValues(size(shape), i + 1), dtype),
  );
  for (const times of [1, 2]) {
    const tape = new Tape(device());
    const inputs = operands.map(({ shape }, i) => tape.watch(tape.from(values[i], shape, dtype)));
    const results = Array.from({ length: times }, () => run(tape, ...inputs));
    const slopes = results.map((y, i) => rounded(randomValues(y.size, 50 + i), y.dtype as Precision));
    const total = slopes[0].map((_, i) => slopes.reduce((sum, slope) => sum + slope[i], 0));
    const expected = reference(total, ...values);
    const limit = tolerance(dtype);
    expect(relativeError(results[0].read(), expected.y)).toBeLessThan(limit);
    tape.backward(results, slopes);
    inputs.forEach((input, i) => {
      expect(relativeError(tape.gradient(input)!.read(), expected.gradients[i]), `gradient ${i}`).toBeLessThan(limit);
    });
    tape.end();
  }
}
