/**
 * A dense model as a sparse one. Keys and values are copied to the three branches, and the gate lets only the selected
 * branch through: as long as that selects all blocks, the sparse model computes what the dense model computes.
 */
import { basename, join, resolve } from 'node:path';
import { stringify } from 'yaml';
import { parseConfig } from '../config/parse.js';
import type { Config, NsaConfig } from '../config/schema.js';
import { isBuiltInTokenizer } from '../data/tokenizers/built-in.js';
import { UsageError } from '../errors.js';
import { writeFileAtomic } from '../files.js';
import { parameterCount } from '../model/memory.js';
import { writeModelConfig } from '../model/model-config.js';
import { modelShape, projectionPairs } from '../model/shape.js';
import { closedGateBias } from '../model/sparse-start.js';
import { runPaths } from '../run/paths.js';
import { writeSafetensors } from '../run/safetensors.js';
import { dtypeBytes } from '../run/safetensors-format.js';
import type { TensorToWrite } from '../run/tensor-source.js';
import { trefoilVersion } from '../run/version.js';
import type { ExportedModel } from './export-hf.js';
import { copyTokenizer, writeFolder } from './folder.js';
import { bytesOf, HF_FILES } from './hf-folder.js';
import type { OnProgress } from './import-hf.js';

/** The dense model: what `locateModel` finds. */
export interface DenseModel extends ExportedModel {
  readonly step: number;
}

export interface ConvertOptions {
  /** Keys of section `nsa`. Others are those of the dense model's config, which has defaults if it was imported. */
  readonly nsa?: Partial<NsaConfig>;
  readonly onProgress?: OnProgress;
}

/** Report of a conversion. */
export interface ConvertReport {
  readonly parameters: number;
  readonly bytes: number;
  readonly nsa: NsaConfig;
  /** Sequences of up to this many tokens have the logits of the dense model. */
  readonly exactTokens: number;
  /** Names of the files of the tokenizer that were copied. */
  readonly companions: readonly string[];
}

/** A config for `trefoil train` that continues from the converted model. */
export const TRAIN_CONFIG = 'train.yaml';

/**
 * Keys that the copied weights decide: keys are rotated in all branches, before they are averaged, and the gate is closed
 * by its logits.
 */
const FIXED = { phi: 'avg', rope: 'all', cmp_rope: 'before', gate: 'softmax', gate_temp: 1 } as const;

/** Writes `dense` as a sparse model to the new folder `out`, which appears only when it is complete. */
export function convertToSparse(dense: DenseModel, out: string, options: ConvertOptions = {}): ConvertReport {
  const { path, endTokens, origin, step } = dense;
  if (dense.shape.attention !== 'dense')
    throw new UsageError(`${path}: has sparse attention already (model.attention nsa); give a dense model`);
  const config = sparseConfig(dense, options.nsa ?? {});
  const shape = modelShape(config, dense.shape.vocabSize);
  const tensors = sparseTensors(dense, projectionPairs(shape));
  const total = tensors.reduce((sum, tensor) => sum + bytesOf(tensor), 0);
  const { tokenizer } = config.data;
  return writeFolder(out, (aside) => {
    const { model: file, modelConfig } = runPaths(aside);
    const onWrite = (done: number) => options.onProgress?.(Math.min(done, total), total);
    const digest = writeSafetensors(file, tensors, { format: 'trefoil' }, { fsync: true, onWrite });
    const isBuiltIn = isBuiltInTokenizer(tokenizer);
    const companions = isBuiltIn ? [] : copyTokenizer(tokenizer, aside);
    const { model, nsa } = config;
    writeModelConfig(modelConfig, {
      trefoil_version: trefoilVersion(),
      step,
      tokenizer: isBuiltIn ? tokenizer : HF_FILES.tokenizer,
      vocab_size: shape.vocabSize,
      model,
      nsa,
      ...(!origin && { seq_len: dense.config.train.seq_len }),
      end_tokens: [...endTokens],
      ...(origin && { origin }),
      weights: { file: basename(file), ...digest },
    });
    const from = resolve(out);
    const training = {
      model: { ...model, vocab_size: shape.vocabSize },
      nsa,
      data: { tokenizer: isBuiltIn ? tokenizer : join(from, HF_FILES.tokenizer) },
      train: { init_from: from },
    };
    writeFileAtomic(join(aside, TRAIN_CONFIG), stringify(training));
    return {
      parameters: parameterCount(shape),
      bytes: digest.bytes,
      nsa,
      companions,
      exactTokens: nsa.n_sel * nsa.l_sel,
    };
  });
}

function sparseConfig({ config }: DenseModel, asked: Partial<NsaConfig>): Config {
  for (const [key, value] of Object.entries(FIXED)) {
    const given = asked[key as keyof NsaConfig];
    if (given !== undefined && given !== value)
      throw new UsageError(`nsa.${key}: ${given} is not possible; the copied weights need ${value}`);
  }
  const { model, nsa, data } = config;
  const debug = { force_branch: 'none', force_uniform_gate: false, stopgrad_gates: false } as const;
  return parseConfig({
    model: { ...model, attention: 'nsa' },
    nsa: { ...nsa, ...debug, ...asked, ...FIXED },
    data: { tokenizer: data.tokenizer },
  });
}

/** The tensors of the dense model, its keys and values `pairs` times, and a gate in every layer. */
function sparseTensors({ shape, weights }: DenseModel, pairs: number): TensorToWrite[] {
  const { nHeads, nKvGroups, dK, dV, dim } = shape;
  const [queries, rest] = [nHeads * dK, nKvGroups * (dK + dV)];
  const tensors: TensorToWrite[] = [];
  for (const [name, { dtype, shape: extents }] of weights.entries) {
    const isProjection = /\.attention\.qkv(_bias)?$/.test(name);
    // A row of the weight is `dim` numbers, one of the bias is a number.
    const rowBytes = extents.slice(1).reduce((product, extent) => product * extent, dtypeBytes(dtype));
    const end = extents[0] * rowBytes;
    const pieces = (from = 0) => weights.pieces(name, from, end);
    const tensor = isProjection
      ? {
          shape: [queries + pairs * rest, ...extents.slice(1)],
          data: () => inOrder(pieces, [0, ...new Array<number>(pairs - 1).fill(queries * rowBytes)]),
        }
      : { shape: extents, data: () => pieces() };
    tensors.push({ name, dtype, ...tensor });
    if (!name.endsWith('.attention.qkv')) continue;
    const gate = name.replace(/qkv$/, 'gate');
    const bias = closedGateBias(nHeads);
    tensors.push(
      { name: `${gate}.weight`, dtype: 'F32', shape: [3 * nHeads, dim], data: () => new Uint8Array(12 * nHeads * dim) },
      { name: `${gate}.bias`, dtype: 'F32', shape: [3 * nHeads], data: () => new Uint8Array(bias.buffer) },
    );
  }
  return tensors;
}

/** The pieces from each of the offsets to the end. */
function* inOrder(pieces: (from: number) => Iterable<Uint8Array>, offsets: readonly number[]): Generator<Uint8Array> {
  for (const from of offsets) yield* pieces(from);
}
