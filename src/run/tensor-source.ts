/** Tensors by name, from wherever they are stored, and how a model is filled from them. */
import { UsageError } from '../errors.js';
import type { RowsInFile } from '../ops/linear/packed.js';
import type { Parameter } from '../tensor/parameter.js';
import type { Shape, Tensor } from '../tensor/tensor.js';
import { dtypeBytes, type SafeDtype, type SafeTensor, toFloat32 } from './safetensors-format.js';

/** A tensor for `writeSafetensors`. */
export interface TensorToWrite {
  name: string;
  dtype: SafeDtype;
  shape: readonly number[];
  /**
   * The bytes, or a function that fetches them when their turn comes, whole or in pieces: one tensor or one piece is in
   * host memory at a time. A piece may be overwritten once the next is asked for.
   */
  data: Uint8Array | (() => Uint8Array | Iterable<Uint8Array>);
}

/** The tensors that a source has. */
export interface TensorNames {
  /** For messages. */
  readonly path: string;
  readonly entries: ReadonlyMap<string, { readonly dtype: SafeDtype; readonly shape: readonly number[] }>;
}

/** Tensors by name: a safetensors file, or files of another program seen under the names of a model. */
export interface TensorSource extends TensorNames {
  /** Reads one tensor into memory of its own. */
  read(name: string): SafeTensor;
  /** Bytes `from` to `to` of a tensor, piece by piece; a piece is valid until the next. */
  pieces(name: string, from: number, to: number): Iterable<Uint8Array>;
  /**
   * The rows of a tensor in their files, in order; an empty list if they are all zero, null if its values are in no file. Valid
   * until `close`.
   */
  parts(name: string): readonly RowsInFile[] | null;
  close(): void;
}

/** An object that has weights: a model. */
interface Weighted {
  readonly parameters: readonly Parameter[];
}

/** The weights of a model as a file holds them, read from the device one by one. */
export function modelTensors({ parameters }: Weighted): Generator<TensorToWrite> {
  return namedTensors(parameters.map(({ name, value }) => [name, value]));
}

/** Tensors on a device as a file holds them. */
export function* namedTensors(named: Iterable<readonly [string, Tensor]>): Generator<TensorToWrite> {
  for (const [name, tensor] of named)
    yield { name, dtype: 'F32', shape: [...tensor.shape], data: () => tensor.readBytes() };
}

/** Fills the weights of a model from a source that must hold exactly these, with these shapes. */
export function loadWeights(source: TensorSource, model: Weighted): void {
  expectNoOthers(source, model);
  for (const { name, value } of model.parameters) {
    expectFloatEntry(source, name, value.shape);
    readInto(source, name, value);
  }
  for (const parameter of model.parameters) parameter.changed();
}

/** Throws if a source holds a tensor that is no weight of the model. */
export function expectNoOthers({ path, entries }: TensorNames, { parameters }: Weighted): void {
  const names = new Set(parameters.map(({ name }) => name));
  for (const name of entries.keys())
    if (!names.has(name))
      throw new UsageError(`${path}: holds ${name}, which this model does not have; check the config`);
}

/** The type of a tensor of a source, which must be one of floats and have this shape. */
export function expectFloatEntry({ path, entries }: TensorNames, name: string, shape: Shape): 'F32' | 'BF16' | 'F16' {
  const entry = entries.get(name);
  if (!entry) throw new UsageError(`${path}: has no ${name}, which this model needs; check the config`);
  const { dtype } = entry;
  if ((dtype === 'F32' || dtype === 'BF16' || dtype === 'F16') && entry.shape.join() === shape.join()) return dtype;
  throw new UsageError(
    `${path}: ${name} is ${dtype} [${entry.shape.join(', ')}], this model needs F32, BF16 or F16 [${shape.join(', ')}]`,
  );
}

/** Copies a tensor of floats of a source to the device, widened to f32, piece by piece: copies of whole matrices would add up. */
export function readInto(source: TensorSource, name: string, value: Tensor): void {
  const { dtype } = source.entries.get(name)!;
  let { pointer } = value;
  for (const data of source.pieces(name, 0, value.size * dtypeBytes(dtype))) {
    const { buffer, byteOffset, byteLength } = toFloat32({ dtype, data })!;
    value.device.upload(pointer, new Uint8Array(buffer, byteOffset, byteLength));
    pointer += BigInt(byteLength);
  }
}

/** The error for a file whose end came too early. */
export function changed(path: string): UsageError {
  return new UsageError(`${path}: the file became shorter while it was read; wait for its writer and try again`);
}
