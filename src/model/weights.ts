/** A model's weights as safetensors: what a file holds, and filling a model from it. */
import { UsageError } from '../errors.js';
import { openSafetensors, type TensorToWrite } from '../run/safetensors.js';
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

/** Fills a model's weights from a file. */
export function loadWeights(path: string, model: LanguageModel): void {
  loadTensors(path, new Map(model.parameters.map(({ name, value }) => [name, value])));
  for (const parameter of model.parameters) parameter.changed();
}

/** Fills the tensors from a file that must hold exactly these, with these shapes. */
export function loadTensors(path: string, into: ReadonlyMap<string, Tensor>): void {
  const file = openSafetensors(path);
  try {
    for (const name of file.entries.keys())
      if (!into.has(name))
        throw new UsageError(`${path}: holds ${name}, which this model does not have; check the config`);
    for (const [name, tensor] of into) {
      const entry = file.entries.get(name);
      if (!entry) throw new UsageError(`${path}: has no ${name}, which this model needs; check the config`);
      const fits = entry.dtype === 'F32' && entry.shape.join() === tensor.shape.join();
      if (!fits)
        throw new UsageError(
          `${path}: ${name} is ${entry.dtype} [${entry.shape.join(', ')}], this model needs F32 [${tensor.shape.join(', ')}]`,
        );
      tensor.writeBytes(file.read(name).data);
    }
  } finally {
    file.close();
  }
}
