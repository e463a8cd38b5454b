/** A Hugging Face folder as a model of this program: the same bytes under other names. */
import { modelFolder } from '../hub/cache.js';
import { parameterCount } from '../model/memory.js';
import { writeModelConfig } from '../model/model-config.js';
import { runPaths } from '../run/paths.js';
import { writeSafetensors } from '../run/safetensors.js';
import type { TensorToWrite } from '../run/tensor-source.js';
import { trefoilVersion } from '../run/version.js';
import { copyCompanions, expectTokenizerFits, writeFolder } from './folder.js';
import { bytesOf, HF_FILES, HfWeights, readHfModel } from './hf-folder.js';

/** Called with the bytes written so far and with all that will be written. */
export type OnProgress = (done: number, total: number) => void;

/** Report of an import. */
export interface ImportReport {
  readonly architecture: string;
  readonly parameters: number;
  readonly bytes: number;
  /** Names of the files of the tokenizer that were copied. */
  readonly companions: readonly string[];
}

/**
 * Writes the model of a folder, or of a name of the hub that is in the cache, to the new folder `out`. Weights keep their type and are copied in pieces of some
 * megabytes. Everything is checked first, and `out` appears only when it is complete.
 */
export function importHf(path: string, out: string, onProgress: OnProgress = () => {}): ImportReport {
  const folder = modelFolder(path);
  const model = readHfModel(folder);
  const { shape, config, endTokens, origin } = model;
  expectTokenizerFits(folder, shape.vocabSize);
  const source = new HfWeights(model);
  try {
    const tensors: TensorToWrite[] = [];
    let total = 0;
    for (const [name, { dtype, shape: extents }] of source.entries) {
      const bytes = bytesOf({ dtype, shape: extents });
      total += bytes;
      tensors.push({ name, dtype, shape: extents, data: () => source.pieces(name, 0, bytes) });
    }
    return writeFolder(out, (aside) => {
      const { model: weights, modelConfig } = runPaths(aside);
      const onWrite = (done: number) => onProgress(Math.min(done, total), total);
      const digest = writeSafetensors(weights, tensors, { format: 'trefoil' }, { fsync: true, onWrite });
      const companions = copyCompanions(folder, aside);
      writeModelConfig(modelConfig, {
        trefoil_version: trefoilVersion(),
        step: 0,
        tokenizer: HF_FILES.tokenizer,
        vocab_size: shape.vocabSize,
        model: config.model,
        nsa: config.nsa,
        end_tokens: [...endTokens],
        origin,
        weights: { file: HF_FILES.weights, ...digest },
      });
      return {
        architecture: origin.architecture,
        parameters: parameterCount(shape),
        bytes: digest.bytes,
        companions,
      };
    });
  } finally {
    source.close();
  }
}
