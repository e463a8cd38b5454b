/** Runs the attention core on a device, arrays in and arrays out: used by the checks and by `attend`. */
import type { Device } from '../device/device.js';
import { nativeSparseAttention, type SparseInputs, type SparseOptions } from '../ops/attention/nsa.js';
import type { NsaInputs } from '../ops/attention/reference.js';
import { Sequences } from '../ops/common/sequences.js';
import { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import { type CaseShapes, INPUT_NAMES, type InputName, inputShapes } from './cases.js';

export const OUTPUT_NAMES = ['out', 'oCmp', 'oSel', 'oWin'] as const;
type OutputName = (typeof OUTPUT_NAMES)[number];

export interface CoreResult {
  readonly outputs: Record<OutputName, Float32Array>;
  /** [T, G, n_sel], ascending, -1 at the end. */
  readonly selected: Int32Array;
  /** Gradients of sum(out * dOut) by the name of the input; null without `dOut`. */
  readonly gradients: Record<InputName, Float32Array> | null;
}

/** `dtype` is that of queries, keys and values; the caller rounds `inputs` and `dOut` to it. */
export function runCore(
  device: Device,
  inputs: NsaInputs,
  shapes: CaseShapes,
  dOut: ArrayLike<number> | null,
  options: SparseOptions = {},
  dtype: 'f32' | 'bf16' = 'f32',
): CoreResult {
  return withSequences(device, shapes.lengths, (tokens, tape) => {
    const sizes = inputShapes(shapes);
    const tensors = record(INPUT_NAMES, (name) =>
      tape.from(inputs[name], sizes[name], name === 'gates' ? 'f32' : dtype),
    ) satisfies SparseInputs;
    if (dOut) for (const name of INPUT_NAMES) tape.watch(tensors[name]);
    const results = nativeSparseAttention(tape, tensors, tokens, shapes.sparse, options);
    const outputs = record(OUTPUT_NAMES, (name) => results[name].read() as Float32Array);
    const selected = results.selected.read() as Int32Array;
    if (!dOut) return { outputs, selected, gradients: null };
    tape.backward(results.out, dOut);
    return { outputs, selected, gradients: record(INPUT_NAMES, (name) => gradientOf(tape, tensors[name])) };
  });
}

/** Runs `body` with a tape and packed sequences and frees them, also when it throws. */
export function withSequences<T>(
  device: Device,
  lengths: readonly number[],
  body: (tokens: Sequences, tape: Tape) => T,
): T {
  const tokens = new Sequences(device, lengths);
  const tape = new Tape(device);
  try {
    return body(tokens, tape);
  } finally {
    tape.end();
    tokens.free();
  }
}

/** The gradient, or zeros if the tensor has none. */
export function gradientOf(tape: Tape, tensor: Tensor): Float32Array {
  return (tape.gradient(tensor)?.read() as Float32Array | undefined) ?? new Float32Array(tensor.size);
}

export function record<K extends string, V>(names: readonly K[], make: (name: K) => V): Record<K, V> {
  return Object.fromEntries(names.map((name) => [name, make(name)])) as Record<K, V>;
}
