/** A model of this program as a folder that transformers loads. What the format cannot express is refused by name. */
import { join } from 'node:path';
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import { writeFileAtomic } from '../files.js';
import type { ModelOrigin } from '../model/saved-model.js';
import { hiddenSize, type ModelShape } from '../model/shape.js';
import { writeSafetensors } from '../run/safetensors.js';
import { dtypeBytes, type SafeDtype, toFloat32 } from '../run/safetensors-format.js';
import type { TensorSource, TensorToWrite } from '../run/tensor-source.js';
import { float32ToBfloat16 } from '../tensor/bfloat16.js';
import { copyTokenizer, writeFolder } from './folder.js';
import { HF_FILES } from './hf-folder.js';
import { type HfPart, hfParameters } from './hf-names.js';
import type { OnProgress } from './import-hf.js';
import { isNsa, nsaArchitecture, nsaConfig } from './nsa-config.js';

/** A model in a folder: what `locateModel` finds. */
export interface ExportedModel {
  /** For messages. */
  readonly path: string;
  readonly shape: ModelShape;
  readonly config: Config;
  readonly weights: TensorSource;
  readonly endTokens: readonly number[];
  readonly origin: ModelOrigin | null;
}

export interface ExportOptions {
  /** Type of the weights; by default each keeps its own. */
  readonly dtype?: 'f32' | 'bf16' | undefined;
  /** Bytes of a file of weights at most. */
  readonly shardBytes?: number | undefined;
  /** `max_position_embeddings`; by default that of the model it was imported from, else the training length. */
  readonly maxPositions?: number | undefined;
  readonly onProgress?: OnProgress;
}

export interface ExportReport {
  readonly architecture: string;
  readonly bytes: number;
  readonly files: number;
  readonly companions: readonly string[];
}

const SHARD_BYTES = 5e9;
const TORCH_DTYPES: Readonly<Partial<Record<SafeDtype, string>>> = { F32: 'float32', BF16: 'bfloat16', F16: 'float16' };

export function exportHf(model: ExportedModel, out: string, options: ExportOptions = {}): ExportReport {
  const { path, shape, config, endTokens, origin } = model;
  const found = architectureOf(shape, origin);
  if ('inexpressible' in found)
    throw new UsageError(
      `${path}: ${found.inexpressible}, which the formats of ${shape.attention === 'nsa' ? 'fla and LlamaNSA' : 'transformers'} cannot express`,
    );
  const { architecture } = found;
  const tensors = hfTensors(model, architecture, options.dtype);
  const shards = intoShards(tensors, options.shardBytes ?? SHARD_BYTES);
  const total = tensors.reduce((sum, { bytes }) => sum + bytes, 0);
  return writeFolder(out, (aside) => {
    let before = 0;
    const files = shards.map((shard, i) => {
      const name =
        shards.length === 1 ? HF_FILES.weights : `model-${number(i + 1)}-of-${number(shards.length)}.safetensors`;
      const onWrite = (done: number) => options.onProgress?.(Math.min(before + done, total), total);
      // transformers refuses files without this.
      writeSafetensors(join(aside, name), shard, { format: 'pt' }, { fsync: true, onWrite });
      before += shard.reduce((sum, { bytes }) => sum + bytes, 0);
      return { name, tensors: shard.map((tensor) => tensor.name) };
    });
    if (files.length > 1) {
      const map = files.flatMap(({ name, tensors: held }) => held.map((tensor) => [tensor, name]));
      writeJson(join(aside, HF_FILES.index), { metadata: { total_size: total }, weight_map: Object.fromEntries(map) });
    }
    const companions = copyTokenizer(config.data.tokenizer, aside);
    const llama = hfConfig(shape, architecture, origin);
    const dtype = TORCH_DTYPES[tensors[0].dtype]; // of the embedding: the file has one for all
    writeJson(join(aside, HF_FILES.config), {
      ...(isNsa(architecture) ? nsaConfig(shape, architecture, llama) : llama),
      max_position_embeddings: options.maxPositions ?? origin?.max_positions ?? config.train.seq_len,
      eos_token_id: endTokens.length === 1 ? endTokens[0] : endTokens.length === 0 ? null : [...endTokens],
      torch_dtype: dtype,
      dtype,
    });
    return { architecture, bytes: total, files: files.length, companions };
  });
}

const number = (index: number) => String(index).padStart(5, '0');

function writeJson(path: string, value: unknown): void {
  writeFileAtomic(path, `${JSON.stringify(value, null, 2)}\n`);
}

/** The first feature that no architecture can express; null if nothing. */
function inexpressibleInAll(shape: ModelShape): string | null {
  if (shape.mlp !== 'swiglu') return `the model has a feed-forward without a gate (model.mlp ${shape.mlp})`;
  if (shape.dK !== shape.dV)
    return `keys of ${shape.dK} and values of ${shape.dV} numbers differ (model.d_k, model.d_v)`;
  if (shape.ropeScale !== 1 && shape.ropeScaling.type !== 'default')
    return `model.rope_scale ${shape.ropeScale} is combined with rope_type ${shape.ropeScaling.type}`;
  if (shape.attention === 'nsa') return null; // nsaArchitecture knows
  if (shape.qkNorm && (shape.qkvBias !== shape.outBias || shape.mlpBias))
    return 'norms of heads are combined with some biases only (model.qk_norm)';
  if (shape.outBias && !shape.qkvBias)
    return 'the output projection has a bias and the others have not (model.out_bias)';
  if (shape.qkvBias && !shape.outBias && shape.mlpBias) return 'qkv_bias and mlp_bias are set and out_bias is not';
  return null;
}

/** The architecture that expresses a model, or what none can express. */
function architectureOf(
  shape: ModelShape,
  origin: ModelOrigin | null,
): { readonly architecture: string } | { readonly inexpressible: string } {
  const common = inexpressibleInAll(shape);
  if (common) return { inexpressible: common };
  if (shape.attention === 'nsa') return nsaArchitecture(shape);
  if (shape.qkNorm) return { architecture: 'Qwen3ForCausalLM' };
  if (shape.qkvBias && !shape.outBias) return { architecture: 'Qwen2ForCausalLM' };
  const isMistral = origin?.architecture === 'MistralForCausalLM' && !shape.qkvBias && !shape.mlpBias;
  return { architecture: isMistral ? 'MistralForCausalLM' : 'LlamaForCausalLM' };
}

function hfConfig(shape: ModelShape, architecture: string, origin: ModelOrigin | null): Record<string, unknown> {
  const rope = ropeOf(shape);
  const isQwen = architecture.startsWith('Qwen');
  return {
    architectures: [architecture],
    model_type: architecture.replace('ForCausalLM', '').toLowerCase(),
    vocab_size: shape.vocabSize,
    hidden_size: shape.dim,
    intermediate_size: hiddenSize(shape),
    num_hidden_layers: shape.nLayers,
    num_attention_heads: shape.nHeads,
    num_key_value_heads: shape.nKvGroups,
    head_dim: shape.dK,
    hidden_act: 'silu',
    rms_norm_eps: shape.normEps,
    tie_word_embeddings: shape.tieEmbeddings,
    ...(architecture.startsWith('Llama') ? { attention_bias: shape.qkvBias, mlp_bias: shape.mlpBias } : {}),
    ...(architecture === 'Qwen3ForCausalLM' ? { attention_bias: shape.qkvBias } : {}),
    ...(architecture === 'MistralForCausalLM' ? { sliding_window: null } : {}),
    ...(isQwen ? { sliding_window: null, use_sliding_window: false } : {}),
    // Both styles: transformers 4 ignores rope_parameters.
    rope_theta: shape.ropeTheta,
    rope_scaling: rope.rope_type === 'default' ? null : rope,
    rope_parameters: { rope_theta: shape.ropeTheta, ...rope },
    attention_dropout: 0,
    initializer_range: 0.02,
    use_cache: true,
    bos_token_id: origin?.bos_token ?? null,
  };
}

function ropeOf({ ropeScale, ropeScaling: scaling }: ModelShape): Record<string, unknown> & { rope_type: string } {
  switch (scaling.type) {
    case 'default':
      return ropeScale === 1 ? { rope_type: 'default' } : { rope_type: 'linear', factor: ropeScale };
    case 'linear':
      return { rope_type: 'linear', factor: scaling.factor };
    case 'llama3':
      return {
        rope_type: 'llama3',
        factor: scaling.factor,
        original_max_position_embeddings: scaling.originalContext,
        low_freq_factor: scaling.lowFreqFactor,
        high_freq_factor: scaling.highFreqFactor,
      };
    case 'yarn':
      return {
        rope_type: 'yarn',
        factor: scaling.factor,
        original_max_position_embeddings: scaling.originalContext,
        beta_fast: scaling.betaFast,
        beta_slow: scaling.betaSlow,
        ...(scaling.attentionFactor === null ? {} : { attention_factor: scaling.attentionFactor }),
      };
  }
}

type HfTensor = TensorToWrite & { readonly bytes: number };

/** The parts of every parameter as tensors of their own. */
function hfTensors(
  { path, shape, weights }: ExportedModel,
  architecture: string,
  wanted: 'f32' | 'bf16' | undefined,
): HfTensor[] {
  return hfParameters(shape, architecture).flatMap((parameter) => {
    const entry = weights.entries.get(parameter.name);
    if (!entry) throw new UsageError(`${path}: has no ${parameter.name}; use another checkpoint`);
    if (parameter.parts.length === 0 && toFloat32(weights.read(parameter.name))?.some((value) => value !== 0))
      throw new UsageError(`${path}: ${parameter.name} is not zero, and the gate of ${architecture} has no bias`);
    const dtype = wanted ? ({ f32: 'F32', bf16: 'BF16' } as const)[wanted] : entry.dtype;
    let at = 0;
    return parameter.parts.map((part): HfTensor => {
      const elements = part.shape.reduce((product, extent) => product * extent, 1);
      const begin = at;
      at += elements * dtypeBytes(entry.dtype);
      const end = at;
      const pieces = () => weights.pieces(parameter.name, begin, end);
      const data = () => (dtype === entry.dtype ? pieces() : converted(part, pieces(), entry.dtype, dtype));
      return { name: part.name, dtype, shape: part.shape, data, bytes: elements * dtypeBytes(dtype) };
    });
  });
}

function* converted(part: HfPart, pieces: Iterable<Uint8Array>, from: SafeDtype, to: SafeDtype): Generator<Uint8Array> {
  for (const data of pieces) {
    const values = toFloat32({ dtype: from, data });
    if (!values) throw new UsageError(`${part.name}: ${from} cannot be converted to ${to}`);
    const stored = to === 'BF16' ? float32ToBfloat16(values) : values;
    yield new Uint8Array(stored.buffer, stored.byteOffset, stored.byteLength);
  }
}

function intoShards(tensors: readonly HfTensor[], most: number): HfTensor[][] {
  const shards: HfTensor[][] = [];
  let room = -1;
  for (const tensor of tensors) {
    if (room < tensor.bytes) {
      shards.push([]);
      room = most;
    }
    shards[shards.length - 1].push(tensor);
    room -= tensor.bytes;
  }
  return shards;
}
