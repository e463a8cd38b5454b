/** Rotary positions: a fused projection becomes one contiguous tensor per part, rotated if the part requests it. */
import { type Device, defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import { dispose } from '../../tensor/dispose.js';
import type { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import type { FusedColumns } from '../common/fused-columns.js';
import type { Sequences } from '../common/sequences.js';
import { expectFloats, expectShape } from '../common/shapes.js';
import { launchers } from './cuda.js';
import { type RotaryShape, rotaryAngles } from './frequencies.js';

/** Parts of one call of a kernel: their tensors, and their shapes as `shapeOf` writes them. */
const PARTS = 8;
const tensors = ['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr'] as const;
const shapes = ['i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64'] as const;
// first column, sequences, tokens, width; frequencies, scale, amplitude, stride, start
const positions = ['i64', 'i64', 'i64', 'i64', 'ptr', 'f32', 'f32', 'i64', 'i64'] as const;
export const signatures = {
  rope_split: ['ptr', 'ptr', 'ptr', ...tensors, ...shapes, ...positions],
  rope_merge: ['ptr', 'ptr', 'ptr', ...tensors, ...shapes, ...positions, 'i64', 'ptr'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** `heads * size` columns of the fused projection. */
export interface HeadPart {
  readonly heads: number;
  readonly size: number;
  readonly rotate: boolean;
}

/** The frequencies of heads of one size on a device. The creator frees it after the backward pass. */
export class RotaryTable implements Disposable {
  /** Size of the heads. */
  readonly size: number;
  /** f32 [size / 2] */
  readonly frequencies: Tensor;
  /** Positions are divided by it. */
  readonly scale: number;
  /** Cosines and sines are multiplied by it: the attention factor of YaRN, else 1. */
  readonly amplitude: number;
  #isFreed = false;

  constructor(device: Device, shape: RotaryShape) {
    const { frequencies, scale, amplitude } = rotaryAngles(shape);
    this.size = shape.size;
    this.scale = scale;
    this.amplitude = amplitude;
    this.frequencies = Tensor.from(device, frequencies, [frequencies.length]);
  }

  /** Frees the frequencies. */
  free(): void {
    this.frequencies.free();
    this.#isFreed = true;
  }

  /** `free`, for `using`. */
  [dispose](): void {
    if (!this.#isFreed) this.free();
  }
}

/** Options of rotary positions. */
export interface RotaryOptions {
  readonly table: RotaryTable;
  /** Positions from one row to the next: the stride d for compressed keys, else 1. */
  readonly stride?: number;
  /** Position of the first row of every sequence, or an i32 tensor [sequences] with one for each (decode). */
  readonly start?: number | Tensor;
}

/**
 * `fused` [T, sum of heads*size] -> one [T, heads, size] for each part, in the order of the columns. Columns after the
 * heads belong to `behind`: one backward rule writes the gradients of all columns, and nothing is summed. `options` is
 * null if no part is rotated.
 */
export function splitHeads(
  tape: Tape,
  fused: Tensor,
  parts: readonly HeadPart[],
  sequences: Sequences,
  options: RotaryOptions | null,
  behind: FusedColumns | null = null,
): Tensor[] {
  const width = parts.reduce((total, { heads, size }) => total + heads * size, 0) + (behind?.columns ?? 0);
  expectFloats('splitHeads: fused', fused, [sequences.total, width]);
  const rotary = rotaryArguments(parts, sequences, options);
  const kernel = tape.device.kernels(kernels);
  const { offsets, count, total } = sequences;
  const outputs = parts.map(({ heads, size }) => tape.empty([total, heads, size], fused.dtype));
  const calls = callsFor(parts);
  for (const { first, column, shapes } of calls)
    kernel.rope_split(
      ...[fused, offsets, rotary.starts, ...eight(outputs, first, null), ...shapes],
      ...[column, count, total, width, ...rotary.numbers],
    );
  const { inputs: others = [], outputs: besides = [], saved = [] } = behind ?? {};
  tape.record([fused, ...others], [...outputs, ...besides], saved, () => {
    const dFused = tape.gradientTarget(fused);
    if (!dFused) return;
    const wanted = dFused.accumulate ? null : (behind?.largest ?? null); // of a sum it is not known
    const largest = wanted?.scale ?? null;
    const gradients = outputs.map((output) => tape.gradient(output));
    for (const { first, column, shapes } of calls)
      kernel.rope_merge(
        ...[dFused.gradient, offsets, rotary.starts, ...eight(gradients, first, null), ...shapes],
        ...[column, count, total, width, ...rotary.numbers, Number(dFused.accumulate), largest],
      );
    behind?.backward(dFused, largest);
    if (wanted) wanted.isKnown = true;
  });
  return outputs;
}

type Eight<T> = [T, T, T, T, T, T, T, T];

/** Eight values from `first` on, `missing` where there are none. */
function eight<T>(values: readonly T[], first: number, missing: T): Eight<T> {
  return Array.from({ length: PARTS }, (_, i) => values[first + i] ?? missing) as Eight<T>;
}

/** The parts in groups that one call takes: a kernel does all of a group in one pass over the tokens. */
function callsFor(parts: readonly HeadPart[]) {
  const calls: { first: number; column: number; shapes: Eight<number> }[] = [];
  let column = 0;
  for (let first = 0; first < parts.length; first += PARTS) {
    calls.push({ first, column, shapes: eight(parts.map(shapeOf), first, 0) });
    for (const { heads, size } of parts.slice(first, first + PARTS)) column += heads * size;
  }
  return calls;
}

function shapeOf({ heads, size, rotate }: HeadPart): number {
  if (heads >= 2 ** 20 || size >= 2 ** 20) throw new UsageError(`${heads} heads of ${size} are too many to split`);
  return heads + size * 2 ** 20 + Number(rotate) * 2 ** 40;
}

/** `x` [T, heads, size], all of it rotated. */
export function rotate(tape: Tape, x: Tensor, sequences: Sequences, options: RotaryOptions): Tensor {
  const [tokens, heads, size] = expectFloats('rotate: x', x, [sequences.total, -1, -1]);
  return splitHeads(tape, x.reshape([tokens, heads * size]), [{ heads, size, rotate: true }], sequences, options)[0];
}

/** Frequencies, scale, amplitude, stride and start, as the kernels take them. */
type RotaryNumbers = readonly [Tensor | null, number, number, number, number];

function rotaryArguments(
  parts: readonly HeadPart[],
  sequences: Sequences,
  options: RotaryOptions | null,
): { readonly starts: Tensor | null; readonly numbers: RotaryNumbers } {
  const odd = parts.find(({ size, rotate }) => rotate && size !== options?.table.size);
  if (odd)
    throw new UsageError(
      `rotated heads of ${odd.size} need a table of that size, not ${options?.table.size ?? 'none'}`,
    );
  if (!options) return { starts: null, numbers: [null, 1, 1, 1, 0] };
  const { table, stride = 1, start = 0 } = options;
  for (const [name, value] of [['stride', stride] as const, ['start', start] as const])
    if (typeof value === 'number' && (!Number.isSafeInteger(value) || value < 0))
      throw new UsageError(`${name} must be a whole number from 0, not ${value}`);
  if (typeof start !== 'number') expectShape('start', start, [sequences.count], 'i32');
  const [starts, first] = typeof start === 'number' ? [null, start] : [start, 0];
  return { starts, numbers: [table.frequencies, table.scale, table.amplitude, stride, first] };
}
