/**
 * Attention cases as safetensors files, with the tensor names of the golden files: inputs and shapes in, outputs and
 * gradients out. Files are untrusted: every tensor is checked against the shapes before any is read.
 */

import { UsageError } from '../errors.js';
import type { NsaInputs } from '../ops/attention/reference.js';
import { validateShapes } from '../ops/attention/shape.js';
import { openSafetensors, type SafetensorsFile } from '../run/safetensors.js';
import { type SafeDtype, toFloat64 } from '../run/safetensors-format.js';
import type { TensorToWrite } from '../run/tensor-source.js';
import { bytesOf } from '../tensor/tensor.js';
import {
  type CaseShapes,
  FILE_NAMES,
  gradientName,
  INPUT_NAMES,
  type InputName,
  inputShapes,
  outputShape,
} from './cases.js';
import { record } from './core.js';
import { sum } from './numbers.js';

/** An attention case read from a file. */
export interface CaseFile {
  readonly shapes: CaseShapes;
  readonly inputs: NsaInputs;
  /** Gradient of `out`; null if the file has none, then only outputs are computed. */
  readonly dOut: Float64Array | null;
  /** The sizes as the file states them. */
  readonly metadata: Readonly<Record<string, string>>;
}

/** The results of a run; arrays of any float type. */
export interface CaseResult {
  readonly outputs: Record<'out' | 'oCmp' | 'oSel' | 'oWin', ArrayLike<number>>;
  /** Padding (-1) at the end of every row. */
  readonly selected: Int32Array;
  readonly gradients: Record<InputName, ArrayLike<number>> | null;
}

const SIZES = ['S', 'H', 'G', 'd_k', 'd_v', 'l', 'd', 'l_sel', 'n_sel', 'w'] as const;
const FLOATS: readonly SafeDtype[] = ['F32', 'F64', 'BF16', 'F16'];
const INTEGERS: readonly SafeDtype[] = ['I32', 'I64'];

/** Reads an attention case from a safetensors file. */
export function readCase(path: string): CaseFile {
  const file = openSafetensors(path);
  try {
    const size = record(SIZES, (name) => readSize(file, name));
    const heads = { heads: size.H, groups: size.G, dk: size.d_k, dv: size.d_v };
    const sparse = { l: size.l, d: size.d, lSel: size.l_sel, nSel: size.n_sel, w: size.w };
    try {
      validateShapes(heads, sparse);
    } catch (error) {
      throw error instanceof UsageError ? new UsageError(`${path}: the metadata is wrong: ${error.message}`) : error;
    }
    const shapes: CaseShapes = { lengths: readLengths(file, size.S), heads, sparse };
    const expected = inputShapes(shapes);
    for (const name of INPUT_NAMES) expectTensor(file, FILE_NAMES[name], expected[name], FLOATS);
    const hasGradient = file.entries.has('d_out');
    if (hasGradient) expectTensor(file, 'd_out', outputShape(shapes), FLOATS);
    return {
      shapes,
      inputs: record(INPUT_NAMES, (name) => toFloat64(file.read(FILE_NAMES[name]))),
      dOut: hasGradient ? toFloat64(file.read('d_out')) : null,
      metadata: record(SIZES, (name) => String(size[name])),
    };
  } finally {
    file.close();
  }
}

/** The tensors of an output file, in float32; `selected` is int32, padded with -1 at the end of a row. */
export function caseTensors({ shapes }: CaseFile, { outputs, selected, gradients }: CaseResult): TensorToWrite[] {
  const out = outputShape(shapes);
  const { groups } = shapes.heads;
  const { nSel } = shapes.sparse;
  const inputs = inputShapes(shapes);
  const floats = (name: string, shape: readonly number[], values: ArrayLike<number>): TensorToWrite => ({
    name,
    shape,
    dtype: 'F32' as const,
    data: () => bytesOf(Float32Array.from(values)),
  });
  return [
    floats('out', out, outputs.out),
    floats('o_cmp', out, outputs.oCmp),
    floats('o_sel', out, outputs.oSel),
    floats('o_win', out, outputs.oWin),
    {
      name: 'selected',
      shape: [sum(shapes.lengths), groups, nSel],
      dtype: 'I32' as const,
      data: () => bytesOf(selected),
    },
    ...(gradients ? INPUT_NAMES.map((name) => floats(gradientName(name), inputs[name], gradients[name])) : []),
  ];
}

function readSize(file: SafetensorsFile, name: (typeof SIZES)[number]): number {
  const text = file.metadata[name];
  if (text === undefined)
    throw new UsageError(`${file.path}: the metadata has no ${name}; it must state ${SIZES.join(' ')}`);
  const value = Number(text);
  if (!/^\d+$/.test(text) || !Number.isSafeInteger(value))
    throw new UsageError(`${file.path}: the metadata ${name} must be a whole number, not ${JSON.stringify(text)}`);
  return value;
}

/** One sequence of S tokens, unless `cu_seqlens` gives the bounds of several. */
function readLengths(file: SafetensorsFile, tokens: number): number[] {
  const entry = file.entries.get('cu_seqlens');
  if (!entry) return [tokens];
  expectTensor(file, 'cu_seqlens', [Math.max(1, entry.shape[0] ?? 0)], INTEGERS);
  const starts = Array.from(toFloat64(file.read('cu_seqlens')));
  const lengths = starts.slice(1).map((end, i) => end - starts[i]);
  if (starts[0] !== 0 || lengths.some((length) => length < 0) || starts[starts.length - 1] !== tokens)
    throw new UsageError(
      `${file.path}: cu_seqlens must start with 0, never fall and end with S = ${tokens}, not ${startsText(starts)}`,
    );
  return lengths;
}

function startsText(starts: readonly number[]): string {
  return starts.length > 8 ? `[${starts.slice(0, 7).join(', ')}, … ${starts.at(-1)}]` : `[${starts.join(', ')}]`;
}

function expectTensor(
  file: SafetensorsFile,
  name: string,
  shape: readonly number[],
  dtypes: readonly SafeDtype[],
): void {
  const found = file.entry(name);
  if (!dtypes.includes(found.dtype))
    throw new UsageError(`${file.path}: tensor ${name} must be ${dtypes.join(', ')}, not ${found.dtype}`);
  const fits = found.shape.length === shape.length && shape.every((size, i) => size === found.shape[i]);
  if (!fits)
    throw new UsageError(
      `${file.path}: tensor ${name} must have shape [${shape.join(', ')}], not [${found.shape.join(', ')}]`,
    );
}
