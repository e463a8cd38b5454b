/**
 * The optimizer's state in files: whole tensors by one rank, or the part of every rank in a file of its own. Whoever reads
 * takes what it needs from either, so a run goes on with another number of ranks, with ZeRO or without.
 */
import { join } from 'node:path';
import { UsageError } from '../errors.js';
import type { AdamW } from '../ops/adamw/op.js';
import { openSafetensors, type SafetensorsFile, type TensorToWrite } from '../run/safetensors.js';
import type { Parameter } from '../tensor/parameter.js';
import type { Tensor } from '../tensor/tensor.js';
import type { ParameterPart } from './data-parallel.js';

/** What an optimizer holds: parameters, or parts of them. */
export type Held = Parameter | ParameterPart;

const F32_BYTES = 4;
/** `<parameter>.m.at<first number>`: a part, as a row. */
const PART_NAME = /^(.+\.[mv])\.at(\d+)$/;

/** The parts of this rank; their names say where in its tensor each begins. */
export function* shardTensors(optimizer: AdamW, held: readonly Held[]): Generator<TensorToWrite> {
  for (const { name, tensor, from } of heldTensors(optimizer, held))
    yield { name: `${name}.at${from}`, dtype: 'F32', shape: [tensor.size], data: () => tensor.readBytes() };
}

/** Fills the optimizer from the files of a checkpoint. `parameters` is the whole model: files that do not fit it are refused. */
export function loadOptimizer(
  folder: string,
  names: readonly string[],
  optimizer: AdamW,
  held: readonly Held[],
  parameters: readonly Parameter[],
): void {
  const files = names.map((name) => ({ path: join(folder, name), file: openSafetensors(join(folder, name)) }));
  try {
    const pieces = collectPieces(files, sizesOf(parameters));
    for (const { name, tensor, from } of heldTensors(optimizer, held)) {
      const bytes = new Uint8Array(tensor.bytes);
      const missing = fill(bytes, from, from + tensor.size, pieces.get(name) ?? []);
      if (missing > 0)
        throw new UsageError(
          `${folder}: lacks ${missing} numbers of ${name}, which this model needs; check the config`,
        );
      tensor.writeBytes(bytes);
    }
  } finally {
    for (const { file } of files) file.close();
  }
}

/** Numbers `from` to `to` of a tensor, and the file they are in. */
interface Piece {
  readonly from: number;
  readonly to: number;
  read(): Uint8Array;
}

function* heldTensors(
  optimizer: AdamW,
  held: readonly Held[],
): Generator<{ name: string; tensor: Tensor; from: number }> {
  const { state } = optimizer;
  for (const one of held)
    for (const moment of ['m', 'v']) {
      const name = `${one.name}.${moment}`;
      yield { name, tensor: state.get(name)!, from: 'from' in one ? one.from : 0 };
    }
}

function sizesOf(parameters: readonly Parameter[]): Map<string, Parameter> {
  return new Map(parameters.flatMap((one) => [[`${one.name}.m`, one] as const, [`${one.name}.v`, one] as const]));
}

function collectPieces(
  files: readonly { path: string; file: SafetensorsFile }[],
  expected: ReadonlyMap<string, Parameter>,
): Map<string, Piece[]> {
  const pieces = new Map<string, Piece[]>();
  for (const { path, file } of files)
    for (const [entryName, { dtype, shape }] of file.entries) {
      const part = PART_NAME.exec(entryName);
      const [name, from] = part ? [part[1], Number(part[2])] : [entryName, 0];
      const value = expected.get(name)?.value;
      if (!value) throw new UsageError(`${path}: holds ${entryName}, which this model does not have; check the config`);
      const size = shape.reduce((product, length) => product * length, 1);
      const fits = part ? shape.length === 1 && from + size <= value.size : shape.join() === value.shape.join();
      if (dtype !== 'F32' || !fits)
        throw new UsageError(
          `${path}: ${entryName} is ${dtype} [${shape.join(', ')}], this model needs F32 [${value.shape.join(', ')}]`,
        );
      const list = pieces.get(name) ?? [];
      pieces.set(name, list);
      list.push({ from, to: from + size, read: () => file.read(entryName).data });
    }
  return pieces;
}

/** Copies what the pieces have of the numbers `from` to `to`; returns how many nobody has. */
function fill(into: Uint8Array, from: number, to: number, pieces: readonly Piece[]): number {
  let missing = to - from;
  for (const piece of pieces) {
    const [first, last] = [Math.max(from, piece.from), Math.min(to, piece.to)];
    if (last <= first) continue;
    const bytes = piece.read().subarray((first - piece.from) * F32_BYTES, (last - piece.from) * F32_BYTES);
    into.set(bytes, (first - from) * F32_BYTES);
    missing -= last - first;
  }
  return missing;
}
