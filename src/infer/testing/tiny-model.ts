/** A small model with random weights, and the folders that hold one. */

import { type Config, configSchema } from '../../config/schema.js';
import type { Device } from '../../device/device.js';
import { LanguageModel } from '../../model/language-model.js';
import { type ComputeDtype, modelShape } from '../../model/shape.js';
import { saveCheckpoint } from '../../run/checkpoint/save.js';
import { modelTensors } from '../../run/tensor-source.js';
import type { Tape } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';
import { cpu } from '../../testing/devices.js';
import { randomValues } from '../../testing/numbers.js';

type Sections = { model?: object; nsa?: object; data?: object; train?: object };

export function tinyConfig({ model, nsa, data, train }: Sections = {}): Config {
  return configSchema.parse({
    model: { dim: 16, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 4, d_v: 4, mlp_ratio: 2, ...model },
    nsa: { l: 4, d: 2, l_sel: 8, n_sel: 3, w: 6, ...nsa },
    data: { tokenizer: 'byte', ...data },
    train: { steps: 7, ...train },
  });
}

/**
 * Weights ten times as large as training starts with: logits that differ enough to tell tokens apart. But phi conv begins as
 * a mean, and ten times a mean would make scores of compressed keys so large that rounding alone decides on blocks: its
 * weights become different ones of the same size.
 */
export function tinyModel(
  config: Config,
  vocabulary = 256,
  seed = 5,
  { device = cpu(), dtype = 'f32' }: { device?: Device; dtype?: ComputeDtype } = {},
): LanguageModel {
  const model = new LanguageModel(device, modelShape(config, vocabulary), seed, dtype);
  for (const { name, value } of model.parameters) {
    if (name.includes('norm')) continue;
    const isConv = /phi_[kv]\.weight$/.test(name);
    const factors = isConv ? randomValues(value.size, seed).map((x) => 1 + x) : null;
    value.write(value.read().map((weight, i) => (factors ? factors[i] : 10) * weight));
  }
  return model;
}

/** The model, and the number of tokens of each of its passes so far. No pass is repeated without being counted. */
export function countingReads(model: LanguageModel): { model: LanguageModel; lengths: number[] } {
  const lengths: number[] = [];
  const counted = (name: 'logits' | 'hidden') => {
    const pass = model[name].bind(model) as (...given: unknown[]) => unknown;
    return (...given: unknown[]) => {
      lengths.push((given[1] as Tensor).size);
      (given[0] as Tape).from([0], [1]); // a pass that uploads is not recorded
      return pass(...given);
    };
  };
  const get = (target: LanguageModel, name: string | symbol) =>
    name === 'logits' || name === 'hidden' ? counted(name) : Reflect.get(target, name, target);
  return { model: new Proxy(model, { get }), lengths };
}

/** A checkpoint as training writes it, but for what only a resume needs. */
export function saveTinyCheckpoint(run: string, step: number, model: LanguageModel, config: Config): string {
  return saveCheckpoint(run, step, { model: modelTensors(model), optimizer: [] }, { step, config }).path;
}
