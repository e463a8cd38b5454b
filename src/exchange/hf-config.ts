/**
 * config.json of a Hugging Face model as the `model` section of a config. Only what this program computes is accepted:
 * an architecture or a feature that is missing here is refused by name, because ignoring it would give wrong results.
 */

import type { ConfigInput } from '../config/schema.js';
import { UsageError } from '../errors.js';
import type { ModelOrigin } from '../model/saved-model.js';
import { yarnAttentionFactor } from '../ops/rope/frequencies.js';
import * as z from '../zod.js';
import { FLA, fromFla, isNsa, LLAMA_NSA, nsaKeys, unsupportedInFla } from './nsa-config.js';

/** Differences between the architectures, and the values that transformers assumes for missing keys. */
interface Architecture {
  readonly kvHeads: (heads: number) => number;
  readonly headDim: (hidden: number, heads: number) => number;
  readonly maxPositions: number;
  readonly hasKeyNorm: boolean;
  /**
   * Which projections have a bias. `qkv`: those of q, k and v. `qkv_bias`: the same, if config.json sets this key.
   * `attention_bias`: these and the output's, if config.json sets this key.
   */
  readonly bias: 'qkv' | 'never' | 'attention_bias' | 'qkv_bias';
  readonly slidingWindow: number | null;
}

const evenHeads = (hidden: number, heads: number) => hidden / heads;

const ARCHITECTURES: Readonly<Record<string, Architecture>> = {
  LlamaForCausalLM: {
    kvHeads: (heads) => heads,
    headDim: evenHeads,
    maxPositions: 2048,
    hasKeyNorm: false,
    bias: 'attention_bias',
    slidingWindow: null,
  },
  MistralForCausalLM: {
    kvHeads: () => 8,
    headDim: evenHeads,
    maxPositions: 131_072,
    hasKeyNorm: false,
    bias: 'never',
    slidingWindow: 4096,
  },
  Qwen2ForCausalLM: {
    kvHeads: () => 32,
    headDim: evenHeads,
    maxPositions: 32_768,
    hasKeyNorm: false,
    bias: 'qkv',
    slidingWindow: null,
  },
  Qwen3ForCausalLM: {
    kvHeads: () => 32,
    headDim: () => 128,
    maxPositions: 32_768,
    hasKeyNorm: true,
    bias: 'attention_bias',
    slidingWindow: null,
  },
  [FLA]: {
    kvHeads: (heads) => heads,
    headDim: () => 64,
    maxPositions: 2048,
    hasKeyNorm: false,
    bias: 'qkv_bias',
    slidingWindow: null,
  },
  [LLAMA_NSA]: {
    kvHeads: (heads) => heads,
    headDim: evenHeads,
    maxPositions: 2048,
    hasKeyNorm: false,
    bias: 'attention_bias',
    slidingWindow: null,
  },
};

const NAMES = Object.keys(ARCHITECTURES).join(', ');

/** Missing features for architectures that people are likely to try, by a part of their names. */
const UNSUPPORTED: readonly (readonly [RegExp, string])[] = [
  [/moe|mixtral|deepseekv[23]|granitemoe/i, 'layers of experts (MoE)'],
  [/gemma/i, 'norms with an offset, GELU and scaled embeddings'],
  [/phi3/i, 'fused projections and LongRoPE'],
  [/gpt2|gptneox|opt/i, 'LayerNorm and learned or partial positions'],
  [/mamba|rwkv|jamba/i, 'recurrent layers'],
  [/ForConditionalGeneration|VL/, 'image or encoder inputs'],
];

const count = z.int().min(1);
const optional = <T extends z.ZodType>(type: T) => type.nullish();
const token = z.int().min(0);

const rope = z.looseObject({
  rope_type: optional(z.string()),
  type: optional(z.string()),
  rope_theta: optional(z.number().positive()),
  factor: optional(z.number().positive()),
  original_max_position_embeddings: optional(count),
  low_freq_factor: optional(z.number().positive()),
  high_freq_factor: optional(z.number().positive()),
  beta_fast: optional(z.number().positive()),
  beta_slow: optional(z.number().positive()),
  attention_factor: optional(z.number().positive()),
  mscale: optional(z.number()),
  mscale_all_dim: optional(z.number()),
  truncate: optional(z.boolean()),
  partial_rotary_factor: optional(z.number()),
});

const schema = z.looseObject({
  architectures: optional(z.array(z.string())),
  vocab_size: z.int().min(2),
  hidden_size: count,
  intermediate_size: count,
  num_hidden_layers: count,
  num_attention_heads: count,
  num_key_value_heads: optional(count),
  head_dim: optional(count),
  hidden_act: optional(z.string()),
  max_position_embeddings: optional(count),
  rms_norm_eps: optional(z.number().positive()),
  tie_word_embeddings: optional(z.boolean()),
  attention_bias: optional(z.boolean()),
  qkv_bias: optional(z.boolean()),
  mlp_bias: optional(z.boolean()),
  sliding_window: optional(count),
  use_sliding_window: optional(z.boolean()),
  layer_types: optional(z.array(z.string())),
  rope_parameters: optional(rope),
  rope_theta: optional(z.number().positive()),
  rope_scaling: optional(rope),
  partial_rotary_factor: optional(z.number()),
  bos_token_id: optional(token),
  eos_token_id: optional(z.union([token, z.array(token)])),
  quantization_config: z.unknown().optional(),
  block_size: optional(count),
  block_counts: optional(count),
  window_size: optional(z.int().min(0)),
});

type HfConfig = z.infer<typeof schema>;
type ModelKeys = NonNullable<ConfigInput['model']>;

/** A foreign model in the terms of a config. */
export interface HfModelConfig {
  readonly model: ModelKeys;
  /** Settings of a sparse model; empty for a dense one. */
  readonly nsa: NonNullable<ConfigInput['nsa']>;
  /** Rows of the embedding. */
  readonly vocabulary: number;
  readonly endTokens: readonly number[];
  readonly origin: ModelOrigin;
}

/** Whether a config.json names an architecture, as those of transformers do. */
export function isHfConfig(json: unknown): boolean {
  const fields = json as { architectures?: unknown; model_type?: unknown } | null;
  return typeof json === 'object' && fields !== null && (Array.isArray(fields.architectures) || 'model_type' in fields);
}

/** `path` is the config.json, for messages; `generation` the content of generation_config.json, if there is one. */
export function parseHfConfig(path: string, json: unknown, generation: unknown = null): HfModelConfig {
  const refuse = (text: string) => new UsageError(`${path}: ${text}`);
  const names = (json as { architectures?: unknown } | null)?.architectures;
  const name = Array.isArray(names) ? names[0] : undefined;
  if (typeof name !== 'string') throw refuse(`architectures is missing; ${NAMES} are supported`);
  const architecture = Object.hasOwn(ARCHITECTURES, name) ? ARCHITECTURES[name] : null;
  if (!architecture) {
    const missing = UNSUPPORTED.find(([pattern]) => pattern.test(name))?.[1];
    throw refuse(
      `the architecture ${name} is not supported${missing ? ` (missing: ${missing})` : ''}; ${NAMES} are supported`,
    );
  }
  const isFla = name === FLA;
  const parsed = schema.safeParse(isFla ? fromFla(json as Record<string, unknown>) : json);
  if (!parsed.success) {
    const [{ path: key, message }] = parsed.error.issues;
    throw refuse(`${key.join('.')}: ${message}`);
  }
  const config = parsed.data;
  const sparse = isNsa(name) ? nsaKeys(name, config) : { nsa: {} };
  const unsupported =
    unsupportedFeature(config, architecture) ??
    (isFla ? unsupportedInFla(config) : null) ??
    ('unsupported' in sparse ? sparse.unsupported : null);
  if (unsupported !== null || !('nsa' in sparse)) throw refuse(`${unsupported} is not supported`);
  const heads = config.num_attention_heads;
  const headDim = config.head_dim ?? architecture.headDim(config.hidden_size, heads);
  if (!Number.isInteger(headDim)) throw refuse(`hidden_size ${config.hidden_size} is not a multiple of ${heads} heads`);
  const bias = architecture.bias === 'attention_bias' && (config.attention_bias ?? false);
  const hasOnlyQkvBias =
    architecture.bias === 'qkv' || (architecture.bias === 'qkv_bias' && (config.qkv_bias ?? false));
  return {
    nsa: sparse.nsa,
    model: {
      dim: config.hidden_size,
      n_layers: config.num_hidden_layers,
      n_heads: heads,
      n_kv_groups: config.num_key_value_heads ?? architecture.kvHeads(heads),
      d_k: headDim,
      d_v: headDim,
      attention: isNsa(name) ? 'nsa' : 'dense',
      mlp: 'swiglu',
      mlp_hidden: config.intermediate_size,
      qkv_bias: bias || hasOnlyQkvBias,
      out_bias: bias,
      qk_norm: architecture.hasKeyNorm,
      mlp_bias: name.startsWith('Llama') && (config.mlp_bias ?? false),
      tie_embeddings: config.tie_word_embeddings ?? false,
      norm_eps: config.rms_norm_eps ?? 1e-6,
      vocab_size: config.vocab_size,
      ...ropeKeys(config, architecture, refuse),
    },
    vocabulary: config.vocab_size,
    endTokens: endTokens(config, generation),
    origin: {
      format: 'huggingface',
      architecture: name,
      max_positions: config.max_position_embeddings ?? architecture.maxPositions,
      bos_token: config.bos_token_id ?? null,
    },
  };
}

/** The first feature in the file that is not computed here. */
function unsupportedFeature(config: HfConfig, architecture: Architecture): string | null {
  const activation = config.hidden_act ?? 'silu';
  if (activation !== 'silu' && activation !== 'swish') return `hidden_act ${activation}`;
  if (config.quantization_config !== undefined && config.quantization_config !== null)
    return 'a quantized model (quantization_config)';
  const layer = config.layer_types?.find((type) => type !== 'full_attention');
  if (layer !== undefined) return `a layer of type ${layer} (layer_types)`;
  // Llama has no windows, Qwen's are off unless use_sliding_window says otherwise, and Mistral's are on.
  const { slidingWindow } = architecture;
  const window = config.sliding_window === undefined ? slidingWindow : config.sliding_window;
  if (slidingWindow !== null && window !== null) return `a sliding window (sliding_window ${window})`;
  if (config.use_sliding_window) return 'a sliding window (use_sliding_window)';
  const partial = config.partial_rotary_factor ?? config.rope_parameters?.partial_rotary_factor ?? 1;
  if (partial !== 1) return `partial_rotary_factor ${partial}`;
  return null;
}

/** The new style has `rope_parameters`; the old one `rope_theta` and, unless it is plain, `rope_scaling`. */
function ropeKeys(config: HfConfig, architecture: Architecture, refuse: (text: string) => UsageError): ModelKeys {
  const scaling = config.rope_parameters ?? config.rope_scaling ?? {};
  const where = config.rope_parameters ? 'rope_parameters' : 'rope_scaling';
  const theta = { rope_theta: config.rope_parameters?.rope_theta ?? config.rope_theta ?? 10_000 };
  const type = scaling.rope_type ?? scaling.type ?? 'default';
  const required = (key: 'factor' | 'low_freq_factor' | 'high_freq_factor'): number => {
    const value = scaling[key];
    if (value === undefined || value === null) throw refuse(`${where}.${key}: missing; rope type ${type} needs it`);
    return value;
  };
  const maxPositions = config.max_position_embeddings ?? architecture.maxPositions;
  const original = scaling.original_max_position_embeddings ?? maxPositions;
  switch (type) {
    case 'default':
      return theta;
    case 'linear':
      return { ...theta, rope_type: type, rope_factor: required('factor') };
    case 'llama3':
      return {
        ...theta,
        rope_type: type,
        rope_factor: required('factor'),
        rope_original_context: original,
        rope_low_freq_factor: required('low_freq_factor'),
        rope_high_freq_factor: required('high_freq_factor'),
      };
    case 'yarn': {
      if (scaling.truncate === false) throw refuse(`${where}.truncate false is not supported`);
      const factor = scaling.factor ?? maxPositions / original;
      const { mscale, mscale_all_dim: all } = scaling;
      const fromScales = mscale && all ? yarnAttentionFactor(factor, mscale) / yarnAttentionFactor(factor, all) : null;
      return {
        ...theta,
        rope_type: type,
        rope_factor: factor,
        rope_original_context: original,
        rope_beta_fast: scaling.beta_fast ?? 32,
        rope_beta_slow: scaling.beta_slow ?? 1,
        rope_attention_factor: scaling.attention_factor ?? fromScales,
      };
    }
    default:
      throw refuse(`${where}: rope type ${type} is not supported; default, linear, llama3 and yarn are`);
  }
}

/** End tokens of both files, those of the vocabulary, rising. */
function endTokens({ eos_token_id: own, vocab_size: vocabulary }: HfConfig, generation: unknown): number[] {
  const other = (generation as { eos_token_id?: unknown } | null)?.eos_token_id;
  const ids = [own, other].flat().filter((id): id is number => Number.isSafeInteger(id));
  return [...new Set(ids)].filter((id) => id >= 0 && id < vocabulary).sort((a, b) => a - b);
}
