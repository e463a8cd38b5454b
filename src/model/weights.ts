/** A model's weights as safetensors: what a file holds, and filling a model from it. */
import { UsageError } from '../errors.js';
import { openSafetensors, type SafeDtype, type SafeTensor, type TensorToWrite, toFloat32 } from '../run/safetensors.js';
import type { Tensor } from '../tensor/tensor.js';
import type { LanguageModel } from './language-model.js';

/** The weights as a file holds them, read from the device one by one. */
export function* modelTensors(model: LanguageModel): Generator<TensorToWrite> {
  yield* namedTensors(new Map(model.parameters.map(({ name, value }) => [name, value])));
}

export function* namedTensors(named: ReadonlyMap<string, Tensor>): Generator<TensorToWrite> {
  for (const [name, tensor] of named)
    yield { name, dtype: 'F32', shape: [...tensor.shape], data: () => tensor.readBytes() };
}

/** Tensors by name: a safetensors file, or files of another program seen under the names of a model. */
export interface TensorSource {
  /** For messages. */
  readonly path: string;
  readonly entries: ReadonlyMap<string, { readonly dtype: SafeDtype; readonly shape: readonly number[] }>;
  /** Reads one tensor into memory of its own. */
  read(name: string): SafeTensor;
  /** Bytes `from` to `to` of a tensor, piece by piece; a piece is valid until the next. */
  pieces(name: string, from: number, to: number): Iterable<Uint8Array>;
  close(): void;
}

/** Fills a model's weights from a source. */
export function loadWeights(source: TensorSource, model: LanguageModel): void {
  loadFrom(source, new Map(model.parameters.map(({ name, value }) => [name, value])));
  for (const parameter of model.parameters) parameter.changed();
}

/** Fills the tensors from a file that must hold exactly these, with these shapes. */
export function loadTensors(path: string, into: ReadonlyMap<string, Tensor>): void {
  const file = openSafetensors(path);
  try {
    loadFrom(file, into);
  } finally {
    file.close();
  }
}

function loadFrom(source: TensorSource, into: ReadonlyMap<string, Tensor>): void {
  const { path, entries } = source;
  for (const name of entries.keys())
    if (!into.has(name))
      throw new UsageError(`${path}: holds ${name}, which this model does not have; check the config`);
  for (const [name, tensor] of into) {
    const entry = entries.get(name);
    if (!entry) throw new UsageError(`${path}: has no ${name}, which this model needs; check the config`);
    const values = entry.shape.join() === tensor.shape.join() ? toFloat32(source.read(name)) : null;
    if (!values)
      throw new UsageError(
        `${path}: ${name} is ${entry.dtype} [${entry.shape.join(', ')}], this model needs F32, BF16 or F16 [${tensor.shape.join(', ')}]`,
      );
    tensor.writeBytes(new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
  }
}
