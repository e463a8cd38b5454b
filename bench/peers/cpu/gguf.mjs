// Writes a GGUF file of a Llama in a Hugging Face folder (BF16 or F32), which llama.cpp reads:
//   node bench/peers/cpu/gguf.mjs FOLDER FILE.gguf --type f32|bf16|q8_0|q4_0
// The vocabulary is made up (t0, t1, …): the file is for measurements with token ids.
import { closeSync, openSync, readFileSync, readSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';

/** ggml_type and llama_ftype by name. */
const TYPES = { f32: [0, 0], bf16: [30, 32], q8_0: [8, 7], q4_0: [2, 2] };
const ALIGNMENT = 32;
const BLOCK = 32;

export function writeGguf(folder, path, typeName) {
  const config = JSON.parse(readFileSync(join(folder, 'config.json'), 'utf8'));
  const source = openSync(join(folder, 'model.safetensors'), 'r');
  const prefix = Buffer.alloc(8);
  readSync(source, prefix, 0, 8, 0);
  const headerBytes = Number(prefix.readBigUInt64LE());
  const headerText = Buffer.alloc(headerBytes);
  readSync(source, headerText, 0, headerBytes, 8);
  const entries = JSON.parse(headerText.toString());
  delete entries.__metadata__;
  const tensors = Object.entries(entries).map(
    ([
      name,
      {
        dtype,
        shape,
        data_offsets: [begin, end],
      },
    ]) => ({
      name: ggufName(name),
      shape,
      // Llama's rotation of neighbours instead of halves: rows of a head change places.
      heads: name.includes('q_proj')
        ? config.num_attention_heads
        : name.includes('k_proj')
          ? config.num_key_value_heads
          : 0,
      type: shape.length === 1 ? 'f32' : typeName,
      read: () => {
        const bytes = Buffer.alloc(end - begin);
        readSync(source, bytes, 0, bytes.length, 8 + headerBytes + begin);
        if (dtype === 'F32') return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
        const bits = new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2);
        return new Float32Array(Uint32Array.from(bits, (value) => value << 16).buffer);
      },
    }),
  );
  const out = new Writer(path);
  const metadata = metadataOf(config, TYPES[typeName][1]);
  out.bytes(Buffer.from('GGUF'));
  out.u32(3);
  out.u64(tensors.length);
  out.u64(metadata.length);
  for (const [key, type, value] of metadata) {
    out.text(key);
    out.value(type, value);
  }
  let offset = 0;
  for (const { name, shape, type } of tensors) {
    out.text(name);
    out.u32(shape.length);
    for (const extent of [...shape].reverse()) out.u64(extent);
    out.u32(TYPES[type][0]);
    out.u64(offset);
    offset += aligned(
      sizeOf(
        shape.reduce((a, b) => a * b),
        type,
      ),
    );
  }
  out.pad();
  for (const { shape, heads, type, read } of tensors) {
    const values = read();
    out.bytes(encode(heads > 0 ? neighbours(values, shape, heads) : values, type));
    out.pad();
  }
  out.close();
  closeSync(source);
}

function metadataOf(config, fileType) {
  const headDim = config.head_dim ?? config.hidden_size / config.num_attention_heads;
  const { vocab_size: count } = config;
  const ids = Array.from({ length: count }, (_, i) => i);
  // SentencePiece: unknown, begin, end, then a token for each byte.
  const byte = (i) => `<0x${(i - 3).toString(16).toUpperCase().padStart(2, '0')}>`;
  const tokens = ids.map((i) => (i < 3 ? ['<unk>', '<s>', '</s>'][i] : i < 259 ? byte(i) : `t${i}`));
  return [
    ['general.architecture', 'string', 'llama'],
    ['general.file_type', 'u32', fileType],
    ['llama.vocab_size', 'u32', count],
    ['llama.context_length', 'u32', config.max_position_embeddings],
    ['llama.embedding_length', 'u32', config.hidden_size],
    ['llama.block_count', 'u32', config.num_hidden_layers],
    ['llama.feed_forward_length', 'u32', config.intermediate_size],
    ['llama.attention.head_count', 'u32', config.num_attention_heads],
    ['llama.attention.head_count_kv', 'u32', config.num_key_value_heads],
    ['llama.attention.key_length', 'u32', headDim],
    ['llama.attention.value_length', 'u32', headDim],
    ['llama.attention.layer_norm_rms_epsilon', 'f32', config.rms_norm_eps],
    ['llama.rope.dimension_count', 'u32', headDim],
    ['llama.rope.freq_base', 'f32', config.rope_theta],
    ['tokenizer.ggml.model', 'string', 'llama'],
    ['tokenizer.ggml.tokens', 'strings', tokens],
    ['tokenizer.ggml.scores', 'f32s', ids.map((i) => -i)],
    ['tokenizer.ggml.token_type', 'i32s', ids.map((i) => (i === 0 ? 2 : i < 3 ? 3 : i < 259 ? 6 : 1))],
    ['tokenizer.ggml.bos_token_id', 'u32', 1],
    ['tokenizer.ggml.eos_token_id', 'u32', 2],
    ['tokenizer.ggml.unknown_token_id', 'u32', 0],
  ];
}

function ggufName(name) {
  const top = { 'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm', lm_head: 'output' };
  const parts = {
    ...{ input_layernorm: 'attn_norm', post_attention_layernorm: 'ffn_norm', 'self_attn.q_proj': 'attn_q' },
    ...{ 'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v', 'self_attn.o_proj': 'attn_output' },
    ...{ 'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up', 'mlp.down_proj': 'ffn_down' },
  };
  const whole = name.replace(/\.weight$/, '');
  const [, layer, part] = /^model\.layers\.(\d+)\.(.+)$/.exec(whole) ?? [];
  return `${layer === undefined ? top[whole] : `blk.${layer}.${parts[part]}`}.weight`;
}

function neighbours(values, [rows, columns], heads) {
  const out = new Float32Array(values.length);
  const size = rows / heads;
  for (let row = 0; row < rows; row++) {
    const [head, at] = [Math.floor(row / size), row % size];
    const from = head * size + (at % 2) * (size / 2) + Math.floor(at / 2);
    out.set(values.subarray(from * columns, (from + 1) * columns), row * columns);
  }
  return out;
}

function sizeOf(count, type) {
  return type === 'f32' ? 4 * count : type === 'bf16' ? 2 * count : (count / BLOCK) * (type === 'q8_0' ? 34 : 18);
}

function encode(values, type) {
  if (type === 'f32') return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  // These checkpoints hold bf16 numbers: the lower half is zero.
  if (type === 'bf16') return new Uint8Array(Uint16Array.from(bits, (value) => value >>> 16).buffer);
  const out = new Uint8Array(sizeOf(values.length, type));
  const view = new DataView(out.buffer);
  const blockBytes = type === 'q8_0' ? 34 : 18;
  for (let i = 0, at = 0; i < values.length; i += BLOCK, at += blockBytes) {
    let most = 0;
    for (let j = 0; j < BLOCK; j++) if (Math.abs(values[i + j]) > Math.abs(most)) most = values[i + j];
    const scale = type === 'q8_0' ? Math.abs(most) / 127 : most / -8;
    view.setUint16(at, halfOf(scale), true);
    const inverse = scale === 0 ? 0 : 1 / scale;
    if (type === 'q8_0') for (let j = 0; j < BLOCK; j++) view.setInt8(at + 2 + j, Math.round(values[i + j] * inverse));
    else
      for (let j = 0; j < BLOCK / 2; j++) {
        const nibble = (value) => Math.min(15, Math.floor(value * inverse + 8.5));
        out[at + 2 + j] = nibble(values[i + j]) | (nibble(values[i + j + BLOCK / 2]) << 4);
      }
  }
  return out;
}

const one = new Float32Array(1);
const oneBits = new Uint32Array(one.buffer);
/** The bits of the nearest float16 below, for scales, which are normal numbers. */
function halfOf(value) {
  one[0] = value;
  const [bits] = oneBits;
  const exponent = ((bits >>> 23) & 0xff) - 112;
  return exponent <= 0 ? 0 : ((bits >>> 16) & 0x8000) | (exponent << 10) | ((bits >>> 13) & 0x3ff);
}

const aligned = (bytes) => Math.ceil(bytes / ALIGNMENT) * ALIGNMENT;

/** Little-endian values one after another. */
class Writer {
  #file;
  #at = 0;
  #small = Buffer.alloc(8);

  constructor(path) {
    this.#file = openSync(path, 'w');
  }
  bytes(data) {
    for (let at = 0; at < data.length; ) at += writeSync(this.#file, data, at, data.length - at);
    this.#at += data.length;
  }
  u32(value) {
    this.#small.writeUInt32LE(value);
    this.bytes(this.#small.subarray(0, 4));
  }
  u64(value) {
    this.#small.writeBigUInt64LE(BigInt(value));
    this.bytes(this.#small);
  }
  f32(value) {
    this.#small.writeFloatLE(value);
    this.bytes(this.#small.subarray(0, 4));
  }
  text(value) {
    const data = Buffer.from(value);
    this.u64(data.length);
    this.bytes(data);
  }
  value(type, value) {
    const tags = { u32: 4, f32: 6, string: 8, i32s: 9, f32s: 9, strings: 9 };
    this.u32(tags[type]);
    if (type === 'u32') return this.u32(value);
    if (type === 'f32') return this.f32(value);
    if (type === 'string') return this.text(value);
    this.u32({ i32s: 5, f32s: 6, strings: 8 }[type]);
    this.u64(value.length);
    const data = type === 'strings' ? null : type === 'i32s' ? Int32Array.from(value) : Float32Array.from(value);
    if (data) this.bytes(new Uint8Array(data.buffer));
    else {
      const parts = value.flatMap((text) => {
        const length = Buffer.alloc(8);
        length.writeBigUInt64LE(BigInt(Buffer.byteLength(text)));
        return [length, Buffer.from(text)];
      });
      this.bytes(Buffer.concat(parts));
    }
  }
  pad() {
    this.bytes(new Uint8Array(aligned(this.#at) - this.#at));
  }
  close() {
    closeSync(this.#file);
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const { values, positionals } = parseArgs({ options: { type: { type: 'string' } }, allowPositionals: true });
  const [folder, path] = positionals;
  if (!path || !(values.type in TYPES)) {
    console.error(`usage: gguf.mjs FOLDER FILE.gguf --type ${Object.keys(TYPES).join('|')}`);
    process.exit(2);
  }
  writeGguf(folder, path, values.type);
}
