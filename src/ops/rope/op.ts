/** Rotary positions: a fused projection becomes one contiguous tensor per part, rotated where the part asks for it. */
import { defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import type { Tape } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';
import type { Sequences } from '../sequences.js';
import { expectShape } from '../shapes.js';

const layout = ['i64', 'i64', 'i64', 'i64', 'i64', 'i64'] as const; // sequences, tokens, width, column, heads, size
const rotation = ['i64', 'f64', 'f32', 'i64', 'i64'] as const; // rotate, theta, scale, stride, start
const kernels = defineKernels(import.meta.url, {
  rope_split: ['ptr', 'ptr', 'ptr', 'ptr', ...layout, ...rotation],
  rope_merge: ['ptr', 'ptr', 'ptr', 'ptr', ...layout, ...rotation, 'i64'],
});

/** `heads * size` columns of the fused projection. */
export interface HeadPart {
  readonly heads: number;
  readonly size: number;
  readonly rotate: boolean;
}

export interface RotaryOptions {
  readonly theta: number;
  /** Positions are divided by it. */
  readonly scale: number;
  /** Positions from one row to the next: the stride d for compressed keys, else 1. */
  readonly stride?: number;
  /** Position of the first row of every sequence, or an i32 tensor [sequences] with one for each (decode). */
  readonly start?: number | Tensor;
}

/** `fused` [T, sum of heads*size] -> one [T, heads, size] for each part, in the order of the columns. */
export function splitHeads(
  tape: Tape,
  fused: Tensor,
  parts: readonly HeadPart[],
  sequences: Sequences,
  options: RotaryOptions,
): Tensor[] {
  const width = parts.reduce((total, { heads, size }) => total + heads * size, 0);
  expectShape('splitHeads: fused', fused, [sequences.total, width]);
  const rotary = rotaryArguments(parts, sequences, options);
  const kernel = tape.device.kernels(kernels);
  const { offsets, count, total } = sequences;
  const columns = parts.map((_, p) => parts.slice(0, p).reduce((sum, { heads, size }) => sum + heads * size, 0));
  const outputs = parts.map(({ heads, size, rotate }, p) => {
    const output = tape.empty([total, heads, size]);
    kernel.rope_split(
      fused,
      output,
      offsets,
      rotary.starts,
      count,
      total,
      width,
      columns[p],
      heads,
      size,
      Number(rotate),
      ...rotary.numbers,
    );
    return output;
  });
  tape.record([fused], outputs, [], () => {
    const dFused = tape.gradientTarget(fused);
    if (!dFused) return;
    parts.forEach(({ heads, size, rotate }, p) => {
      kernel.rope_merge(
        tape.gradient(outputs[p]),
        dFused.gradient,
        offsets,
        rotary.starts,
        count,
        total,
        width,
        columns[p],
        heads,
        size,
        Number(rotate),
        ...rotary.numbers,
        Number(dFused.accumulate),
      );
    });
  });
  return outputs;
}

/** `x` [T, heads, size], all of it rotated. */
export function rotate(tape: Tape, x: Tensor, sequences: Sequences, options: RotaryOptions): Tensor {
  const [tokens, heads, size] = expectShape('rotate: x', x, [sequences.total, -1, -1]);
  return splitHeads(tape, x.reshape([tokens, heads * size]), [{ heads, size, rotate: true }], sequences, options)[0];
}

function rotaryArguments(parts: readonly HeadPart[], sequences: Sequences, options: RotaryOptions) {
  const { theta, scale, stride = 1, start = 0 } = options;
  for (const { size, rotate } of parts)
    if (rotate && size % 2 !== 0) throw new UsageError(`a rotated head must have an even size, not ${size}`);
  if (!(theta > 0 && Number.isFinite(theta))) throw new UsageError(`theta must be above 0, not ${theta}`);
  if (!(scale > 0 && Number.isFinite(scale))) throw new UsageError(`scale must be above 0, not ${scale}`);
  for (const [name, value] of [['stride', stride] as const, ['start', start] as const])
    if (typeof value === 'number' && (!Number.isSafeInteger(value) || value < 0))
      throw new UsageError(`${name} must be a whole number from 0, not ${value}`);
  if (typeof start !== 'number') expectShape('start', start, [sequences.count], 'i32');
  const [starts, first] = typeof start === 'number' ? [null, start] : [start, 0];
  return { starts, numbers: [theta, scale, stride, first] as const };
}
