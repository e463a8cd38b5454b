/** Writes small Hugging Face folders with random weights. */
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { writeSafetensors } from '../../run/safetensors.js';
import { type SafeDtype, toFloat64 } from '../../run/safetensors-format.js';
import { float32ToBfloat16 } from '../../tensor/bfloat16.js';
import { randomValues } from '../../testing/numbers.js';

export const LLAMA = {
  architectures: ['LlamaForCausalLM'],
  model_type: 'llama',
  vocab_size: 48,
  hidden_size: 32,
  intermediate_size: 44,
  num_hidden_layers: 2,
  num_attention_heads: 4,
  num_key_value_heads: 2,
  hidden_act: 'silu',
  max_position_embeddings: 256,
  rms_norm_eps: 1e-5,
  tie_word_embeddings: false,
  rope_theta: 10_000,
  bos_token_id: 0,
  eos_token_id: [1, 2],
  torch_dtype: 'float32',
};

export interface WrittenFolder {
  readonly folder: string;
  /** The values as the files hold them. */
  readonly tensors: ReadonlyMap<string, { readonly shape: readonly number[]; readonly values: Float64Array }>;
}

interface FolderOptions {
  readonly dtype?: 'F32' | 'BF16' | 'F16';
  readonly shards?: number;
}

/** Names and shapes of the tensors that a config implies. */
function shapesOf(config: Record<string, unknown>): [string, number[]][] {
  const size = (key: string) => config[key] as number;
  const [hidden, heads] = [size('hidden_size'), size('num_attention_heads')];
  const head = (config['head_dim'] as number | undefined) ?? hidden / heads;
  const [q, kv, inner] = [heads * head, size('num_key_value_heads') * head, size('intermediate_size')];
  const architecture = (config['architectures'] as string[])[0];
  const isBiased = config['attention_bias'] === true;
  const list: [string, number[]][] = [['model.embed_tokens.weight', [size('vocab_size'), hidden]]];
  for (let layer = 0; layer < size('num_hidden_layers'); layer++) {
    const add = (name: string, ...shape: number[]) => list.push([`model.layers.${layer}.${name}`, shape]);
    add('input_layernorm.weight', hidden);
    for (const [part, rows] of [['q', q] as const, ['k', kv] as const, ['v', kv] as const]) {
      add(`self_attn.${part}_proj.weight`, rows, hidden);
      if (isBiased || architecture === 'Qwen2ForCausalLM') add(`self_attn.${part}_proj.bias`, rows);
      if (architecture === 'Qwen3ForCausalLM' && part !== 'v') add(`self_attn.${part}_norm.weight`, head);
    }
    add('self_attn.o_proj.weight', hidden, q);
    if (isBiased) add('self_attn.o_proj.bias', hidden);
    add('post_attention_layernorm.weight', hidden);
    for (const [part, rows, columns] of [
      ['gate', inner, hidden],
      ['up', inner, hidden],
      ['down', hidden, inner],
    ] as const) {
      add(`mlp.${part}_proj.weight`, rows, columns);
      if (config['mlp_bias'] === true) add(`mlp.${part}_proj.bias`, rows);
    }
  }
  list.push(['model.norm.weight', [hidden]]);
  if (config['tie_word_embeddings'] !== true) list.push(['lm_head.weight', [size('vocab_size'), hidden]]);
  return list;
}

/** F16 of numbers that it holds exactly enough: rounded toward zero, no subnormals. */
function toF16(value: number): number {
  if (Math.abs(value) < 2 ** -14) return 0;
  const exponent = Math.floor(Math.log2(Math.abs(value)));
  const fraction = Math.floor((Math.abs(value) / 2 ** exponent - 1) * 1024);
  return (value < 0 ? 0x8000 : 0) | ((exponent + 15) << 10) | fraction;
}

function encode(values: Float32Array, dtype: SafeDtype): Uint8Array {
  if (dtype === 'F32') return new Uint8Array(values.buffer);
  const halves = dtype === 'BF16' ? float32ToBfloat16(values) : Uint16Array.from(values, toF16);
  return new Uint8Array(halves.buffer);
}

export function writeHfFolder(
  folder: string,
  config: Record<string, unknown>,
  { dtype = 'F32', shards = 1 }: FolderOptions = {},
): WrittenFolder {
  mkdirSync(folder, { recursive: true });
  writeFileSync(join(folder, 'config.json'), JSON.stringify(config));
  const list = shapesOf(config).map(([name, shape], k) => {
    const count = shape.reduce((product, extent) => product * extent, 1);
    const values = randomValues(count, k + 1).map((x) => (/norm\.weight$/.test(name) ? 1 + 0.2 * x : 0.4 * x));
    return { name, dtype, shape, data: encode(Float32Array.from(values), dtype) };
  });
  const files = Array.from({ length: shards }, (_, i) => ({
    name: shards === 1 ? 'model.safetensors' : `model-0000${i + 1}-of-0000${shards}.safetensors`,
    tensors: list.filter((_, k) => Math.floor((k * shards) / list.length) === i),
  }));
  for (const { name, tensors } of files) writeSafetensors(join(folder, name), tensors, { format: 'pt' });
  if (shards > 1) {
    const map = files.flatMap(({ name, tensors }) => tensors.map((tensor) => [tensor.name, name]));
    writeFileSync(
      join(folder, 'model.safetensors.index.json'),
      JSON.stringify({ metadata: {}, weight_map: Object.fromEntries(map) }),
    );
  }
  const tensors = list.map(
    ({ name, shape, data }) => [name, { shape, values: toFloat64({ dtype, shape, data }) }] as const,
  );
  return { folder, tensors: new Map(tensors) };
}
