#!/usr/bin/env node
// Writes a folder in the layout of Hugging Face with random weights of a Llama, for measurements and guides:
//   node scripts/random-checkpoint.mjs FOLDER [--size tiny|135m|1.1b|1.2b] [--dtype bf16|f32]
// `135m` has the shape of SmolLM2 135M (134,515,008 parameters), `1.1b` that of TinyLlama (1,100,048,384, 2.2 GB in bf16) and
// `1.2b` that of Llama 3.2 1B (1,235,814,400, 2.47 GB). Both types hold the same numbers. Weights are written in pieces.
import { closeSync, mkdirSync, openSync, writeFileSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';

const SIZES = {
  tiny: { hidden: 64, inner: 172, layers: 2, heads: 4, groups: 2, headDim: 16, vocabulary: 256 },
  '135m': {
    hidden: 576,
    inner: 1536,
    layers: 30,
    heads: 9,
    groups: 3,
    headDim: 64,
    vocabulary: 49152,
    contextLength: 8192,
  },
  '1.1b': {
    ...{ hidden: 2048, inner: 5632, layers: 22, heads: 32, groups: 4, headDim: 64, vocabulary: 32000 },
    ...{ contextLength: 32768, tied: false },
  },
  '1.2b': { hidden: 2048, inner: 8192, layers: 16, heads: 32, groups: 8, headDim: 64, vocabulary: 128256 },
};
const { values, positionals } = parseArgs({
  options: { size: { type: 'string', default: '1.2b' }, dtype: { type: 'string', default: 'bf16' } },
  allowPositionals: true,
  strict: false,
});
const [folder] = positionals;
if (!folder || !(values.size in SIZES) || !['bf16', 'f32'].includes(values.dtype)) {
  console.error('usage: random-checkpoint.mjs FOLDER [--size tiny|135m|1.1b|1.2b] [--dtype bf16|f32]');
  process.exit(2);
}
const { hidden, inner, layers, heads, groups, headDim, vocabulary, tied = true, contextLength } = SIZES[values.size];
const isWide = values.dtype === 'f32';
const dtypeBytes = isWide ? 4 : 2;

const tensors = [['model.embed_tokens.weight', [vocabulary, hidden]]];
for (let layer = 0; layer < layers; layer++) {
  const add = (name, ...shape) => tensors.push([`model.layers.${layer}.${name}.weight`, shape]);
  add('input_layernorm', hidden);
  add('self_attn.q_proj', heads * headDim, hidden);
  add('self_attn.k_proj', groups * headDim, hidden);
  add('self_attn.v_proj', groups * headDim, hidden);
  add('self_attn.o_proj', hidden, heads * headDim);
  add('post_attention_layernorm', hidden);
  add('mlp.gate_proj', inner, hidden);
  add('mlp.up_proj', inner, hidden);
  add('mlp.down_proj', hidden, inner);
}
tensors.push(['model.norm.weight', [hidden]]);
if (!tied) tensors.push(['lm_head.weight', [vocabulary, hidden]]);

// A megabyte of random numbers of about ±0.03 in bfloat16, repeated: sign, exponents 120 and 121, random fractions.
const noise = new Uint16Array(1 << 19);
let state = 12345;
for (let i = 0; i < noise.length; i++) {
  state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
  noise[i] = ((state >>> 31) << 15) | ((120 + ((state >>> 30) & 1)) << 7) | ((state >>> 20) & 0x7f);
}
const bytes = new Uint8Array(isWide ? Uint32Array.from(noise, (bits) => bits << 16).buffer : noise.buffer);

function writeSafetensors(path, list) {
  const header = {};
  let at = 0;
  for (const { name, dtype, shape, size: length } of list) {
    header[name] = { dtype, shape, data_offsets: [at, at + length] };
    at += length;
  }
  let text = JSON.stringify(header);
  text += ' '.repeat((8 - (text.length % 8)) % 8);
  const prefix = Buffer.alloc(8);
  prefix.writeBigUInt64LE(BigInt(text.length));
  const file = openSync(path, 'w');
  writeSync(file, prefix);
  writeSync(file, text);
  for (const { size: length, data } of list)
    if (data) writeSync(file, data);
    else
      for (let left = length; left > 0; left -= bytes.length) writeSync(file, bytes, 0, Math.min(left, bytes.length));
  closeSync(file);
}

const sizeOf = (shape) => dtypeBytes * shape.reduce((a, b) => a * b);

mkdirSync(folder, { recursive: true });
writeSafetensors(
  join(folder, 'model.safetensors'),
  tensors.map(([name, shape]) => ({ name, dtype: isWide ? 'F32' : 'BF16', shape, size: sizeOf(shape) })),
);
const ids = Int32Array.from({ length: 32 }, (_, i) => (i * 37) % vocabulary);
writeSafetensors(join(folder, 'ids.safetensors'), [
  { name: 'input_ids', dtype: 'I32', shape: [32], size: 128, data: new Uint8Array(ids.buffer) },
]);
writeFileSync(
  join(folder, 'config.json'),
  `${JSON.stringify(
    {
      architectures: ['LlamaForCausalLM'],
      model_type: 'llama',
      vocab_size: vocabulary,
      hidden_size: hidden,
      intermediate_size: inner,
      num_hidden_layers: layers,
      num_attention_heads: heads,
      num_key_value_heads: groups,
      head_dim: headDim,
      hidden_act: 'silu',
      max_position_embeddings: contextLength ?? 131072,
      rms_norm_eps: 1e-5,
      tie_word_embeddings: tied,
      rope_theta: contextLength ? 10000 : 500000,
      torch_dtype: isWide ? 'float32' : 'bfloat16',
      ...(contextLength === undefined && {
        rope_scaling: {
          rope_type: 'llama3',
          factor: 32,
          low_freq_factor: 1,
          high_freq_factor: 4,
          original_max_position_embeddings: 8192,
        },
      }),
      bos_token_id: 0,
      eos_token_id: 1,
    },
    null,
    2,
  )}\n`,
);
console.log(`${folder}: ${(tensors.reduce((sum, [, shape]) => sum + sizeOf(shape), 0) / 1e6).toFixed(1)} MB`);
