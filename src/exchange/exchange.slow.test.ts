/** Models of transformers in, out and in direct use: small folders made here, and golden ones. */
import { execFileSync } from 'node:child_process';
import {
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { runCli } from '../cli/testing/run.js';
import { parseConfig } from '../config/parse.js';
import { prefill, readTokens } from '../infer/decode.js';
import { loadModel, writeFinalModel } from '../infer/load.js';
import { DecodeCache } from '../model/cache.js';
import { LanguageModel } from '../model/language-model.js';
import { modelShape } from '../model/shape.js';
import { embedding } from '../ops/embedding/op.js';
import { readSafetensors, writeSafetensors } from '../run/safetensors.js';
import { toFloat64 } from '../run/safetensors-format.js';
import { Tape } from '../tensor/tape.js';
import { cpu } from '../testing/devices.js';
import { denseGoldenModels, GOLDEN_REFERENCE, SHARED_GOLDEN, sharedGoldenAbsence } from '../testing/golden.js';
import { LLAMA, writeHfFolder } from './testing/hf-folder.js';
import { hfReferenceLogits } from './testing/hf-reference.js';
import { distance, logitsOf } from './testing/logits.js';

const root = mkdtempSync(join(tmpdir(), 'trefoil-exchange-'));
afterAll(() => rmSync(root, { recursive: true, force: true }));
let folders = 0;
const fresh = (name = 'folder') => join(root, `${name}-${++folders}`);

const QWEN3 = { ...LLAMA, architectures: ['Qwen3ForCausalLM'], head_dim: 12, model_type: 'qwen3' };
const CASES: Record<string, [Record<string, unknown>, object?]> = {
  'Llama, untied, no head_dim': [LLAMA],
  'Llama, tied, BF16, rope llama3 in the old style': [
    {
      ...LLAMA,
      tie_word_embeddings: true,
      rope_theta: 500_000,
      rope_scaling: {
        rope_type: 'llama3',
        factor: 8,
        low_freq_factor: 1,
        high_freq_factor: 4,
        original_max_position_embeddings: 32,
      },
    },
    { dtype: 'BF16' },
  ],
  'Llama with all biases, F16, rope linear by its legacy key': [
    { ...LLAMA, attention_bias: true, mlp_bias: true, rope_scaling: { type: 'linear', factor: 2.5 } },
    { dtype: 'F16' },
  ],
  'Qwen2, three shards, rope yarn in the new style': [
    {
      ...LLAMA,
      architectures: ['Qwen2ForCausalLM'],
      rope_theta: undefined,
      dtype: 'float32',
      sliding_window: 4096,
      use_sliding_window: false,
      max_window_layers: 28,
      rope_parameters: { rope_type: 'yarn', rope_theta: 1000, factor: 4, original_max_position_embeddings: 64 },
    },
    { shards: 3 },
  ],
  'Qwen3, heads wider than the model, two shards': [{ ...QWEN3, head_dim: 32 }, { shards: 2 }],
  'Mistral, unknown keys': [
    { ...LLAMA, architectures: ['MistralForCausalLM'], sliding_window: null, someone: { else: 'knows' } },
  ],
  '32 heads in one group': [
    { ...LLAMA, hidden_size: 128, num_attention_heads: 32, num_key_value_heads: 1, num_hidden_layers: 1 },
  ],
};
const ids = Array.from({ length: 60 }, (_, t) => (t * 7 + (t % 5) * 3) % LLAMA.vocab_size);

describe.each(Object.keys(CASES))('%s', (name) => {
  const [config, options] = CASES[name];
  const { folder, tensors } = writeHfFolder(fresh(), JSON.parse(JSON.stringify(config)), options);
  const imported = fresh('imported');

  it('has the logits of the reference, used directly', () => {
    const reference = { ...JSON.parse(readFileSync(join(folder, 'config.json'), 'utf8')) };
    expect(reference.architectures).toEqual(config['architectures']);
    expect(distance(logitsOf(folder, ids), hfReferenceLogits(folder, tensors, ids).flat())).toBeLessThan(2e-5);
  });

  it('has the same logits after import, and end tokens', async () => {
    const { code, stderr, stdout } = await runCli(['import', 'hf', folder, '--out', imported]);
    expect(code, stderr).toBe(0);
    expect(stdout).toContain((config['architectures'] as string[])[0]);
    expect(stderr).toContain('has no tokenizer.json');
    expect(logitsOf(imported, ids)).toEqual(logitsOf(folder, ids));
    using loaded = loadModel(cpu(), imported);
    expect(loaded.endTokens).toEqual([1, 2]);
    expect(() => loaded.tokenizer).toThrow('tokenizer.json');
  });

  it('has the same bytes after import, export and import', async () => {
    const [exported, again] = [fresh('exported'), fresh('again')];
    const args = ['export', 'hf', imported, '--out', exported, '--shard-mb', '1'];
    const { code, stderr } = await runCli(args);
    expect(code, stderr).toBe(0);
    expect((await runCli(['import', 'hf', exported, '--out', again])).code).toBe(0);
    const weights = (path: string) => readSafetensors(join(path, 'model.safetensors')).tensors;
    expect(weights(again)).toEqual(weights(imported));
    const models = [imported, again].map((path) => JSON.parse(readFileSync(join(path, 'config.json'), 'utf8')));
    expect(models[1]).toEqual(models[0]);
    // The exported folder, read by its own names, is the folder that was imported.
    const files = readdirSync(exported).filter((file) => file.endsWith('.safetensors'));
    const held = files.flatMap((file) => [...readSafetensors(join(exported, file)).tensors]);
    expect(held.map(([tensor]) => tensor).sort()).toEqual([...tensors.keys()].sort());
    for (const [tensor, { dtype, shape, data }] of held) {
      expect(shape).toEqual(tensors.get(tensor)!.shape);
      expect(toFloat64({ dtype, shape, data })).toEqual(tensors.get(tensor)!.values);
    }
    const written = new Map(held.map(([tensor, value]) => [tensor, { shape: value.shape, values: toFloat64(value) }]));
    const found = hfReferenceLogits(exported, written, ids.slice(0, 20)).flat();
    expect(distance(found, hfReferenceLogits(folder, tensors, ids.slice(0, 20)).flat())).toBeLessThan(1e-9);
  });
});

describe('export', () => {
  /** Models that transformers cannot express, and the reason. */
  const INEXPRESSIBLE: readonly [Record<string, unknown>, string][] = [
    [{ mlp: 'silu' }, 'the model has a feed-forward without a gate (model.mlp silu)'],
    [{ d_v: 8 }, 'keys of 16 and values of 8 numbers differ (model.d_k, model.d_v)'],
    [{ rope_scale: 2, rope_type: 'linear', rope_factor: 2 }, 'model.rope_scale 2 is combined with rope_type linear'],
    [{ qk_norm: true, mlp_bias: true }, 'norms of heads are combined with some biases only (model.qk_norm)'],
    [{ out_bias: true }, 'the output projection has a bias and the others have not (model.out_bias)'],
    [{ qkv_bias: true, mlp_bias: true }, 'qkv_bias and mlp_bias are set and out_bias is not'],
  ];

  /** A trained dense model that transformers can express, with changes. */
  function finalModel(changes: Record<string, unknown> = {}, train: Record<string, unknown> = {}): string {
    const config = parseConfig({
      model: {
        dim: 32,
        n_layers: 1,
        n_heads: 2,
        n_kv_groups: 1,
        d_k: 16,
        d_v: 16,
        mlp_hidden: 24,
        mlp: 'swiglu',
        attention: 'dense',
        ...changes,
      },
      nsa: { l: 8, d: 4, l_sel: 16, n_sel: 4, w: 16 },
      train,
    });
    const path = fresh('model');
    const model = new LanguageModel(cpu(), modelShape(config, 256), 1);
    writeFinalModel(path, model, config);
    model.free();
    return path;
  }

  it.each(INEXPRESSIBLE)('refuses %j by name, and writes nothing', async (changes, reason) => {
    const [path, parent] = [finalModel(changes), fresh('parent')];
    mkdirSync(parent);
    const { code, stdout, stderr } = await runCli(['export', 'hf', path, '--out', join(parent, 'out')]);
    expect(stderr).toBe(`trefoil: ${path}: ${reason}, which the formats of transformers cannot express\n`);
    expect([code, stdout]).toEqual([2, '']);
    expect(readdirSync(parent)).toEqual([]);
  });

  it('has as many positions as the sequences of the training had tokens, or as asked for', async () => {
    const path = finalModel({}, { seq_len: 96 });
    const positions = async (...flags: string[]) => {
      const out = fresh('out');
      expect((await runCli(['export', 'hf', path, '--out', out, ...flags])).code).toBe(0);
      return JSON.parse(readFileSync(join(out, 'config.json'), 'utf8')).max_position_embeddings;
    };
    expect(await positions()).toBe(96);
    expect(await positions('--max-positions', '500')).toBe(500);
  });

  it('converts to bf16', async () => {
    const { folder } = writeHfFolder(fresh(), LLAMA);
    const out = fresh('out');
    expect((await runCli(['export', 'hf', folder, '--out', out, '--dtype', 'bf16'])).code).toBe(0);
    const { tensors } = readSafetensors(join(out, 'model.safetensors'));
    expect(new Set([...tensors.values()].map(({ dtype }) => dtype))).toEqual(new Set(['BF16']));
    expect(JSON.parse(readFileSync(join(out, 'config.json'), 'utf8')).torch_dtype).toBe('bfloat16');
    expect(distance(logitsOf(out, ids), logitsOf(folder, ids))).toBeLessThan(5e-2);
  });
});

describe('bad input', () => {
  const rewrite = (folder: string, change: (config: Record<string, unknown>) => object) => {
    const path = join(folder, 'config.json');
    writeFileSync(path, JSON.stringify(change(JSON.parse(readFileSync(path, 'utf8')))));
  };
  const reindex = (folder: string, change: (map: Record<string, string>) => object) => {
    const path = join(folder, 'model.safetensors.index.json');
    const index = JSON.parse(readFileSync(path, 'utf8'));
    writeFileSync(path, JSON.stringify({ ...index, weight_map: change(index.weight_map) }));
  };
  /** The one file of weights with other tensors. */
  const reweigh = (folder: string, change: (tensors: ReturnType<typeof readSafetensors>['tensors']) => void) => {
    const path = join(folder, 'model.safetensors');
    const { tensors } = readSafetensors(path);
    change(tensors);
    writeSafetensors(
      path,
      [...tensors].map(([name, tensor]) => ({ name, ...tensor })),
    );
  };
  const tokenizer = (ids: Record<string, number>, added: object[] = []) =>
    JSON.stringify({ model: { type: 'BPE', vocab: ids, merges: [] }, added_tokens: added });
  const plain = 'model.layers.0.mlp.up_proj.weight';

  const BAD: Record<string, [(folder: string) => void, string | RegExp, number?]> = {
    'a truncated shard': [
      (folder) => {
        const path = join(folder, 'model-00002-of-00002.safetensors');
        truncateSync(path, statSync(path).size - 100);
      },
      /model-00002-of-00002.safetensors: /,
      2,
    ],
    'a missing shard': [
      (folder) => rmSync(join(folder, 'model-00002-of-00002.safetensors')),
      'model-00002-of-00002.safetensors: is missing',
      2,
    ],
    'a wrong shape': [
      (folder) => reweigh(folder, (tensors) => void Object.assign(tensors.get(plain)!, { shape: [32, 44] })),
      `${plain} has the shape [32, 44], config.json implies [44, 32]`,
    ],
    'a missing tensor': [
      (folder) => reweigh(folder, (tensors) => void tensors.delete(plain)),
      `there is no tensor ${plain}, which config.json implies`,
    ],
    'an extra tensor': [
      (folder) =>
        reweigh(folder, (all) => void all.set('extra', { dtype: 'F32', shape: [1], data: new Uint8Array(4) })),
      'holds extra, which is not part of the model',
    ],
    integers: [
      (folder) => reweigh(folder, (tensors) => void Object.assign(tensors.get(plain)!, { dtype: 'I32' })),
      `${plain} is I32; F32, BF16, F16 are supported`,
    ],
    'an unknown rope type': [
      (folder) => rewrite(folder, (config) => ({ ...config, rope_scaling: { rope_type: 'longrope', factor: 4 } })),
      'rope type longrope is not supported; default, linear, llama3 and yarn are',
    ],
    'a rope type without its factor': [
      (folder) => rewrite(folder, (config) => ({ ...config, rope_scaling: { rope_type: 'llama3' } })),
      'rope_scaling.factor: missing; rope type llama3 needs it',
    ],
    'an index that points outside': [
      (folder) => reindex(folder, (map) => ({ ...map, [plain]: '../secret.safetensors' })),
      'is said to be in "../secret.safetensors", which is not a .safetensors file of this folder',
      2,
    ],
    'an index that points to the wrong shard': [
      (folder) => reindex(folder, (map) => ({ ...map, 'lm_head.weight': 'model-00001-of-00002.safetensors' })),
      'holds lm_head.weight, but',
      2,
    ],
    'a tokenizer that does not fit': [
      (folder) => writeFileSync(join(folder, 'tokenizer.json'), tokenizer({ a: 0, b: 60 })),
      'token "b" has the id 60, but the model has 48 tokens',
    ],
    'an added token that does not fit': [
      (folder) => writeFileSync(join(folder, 'tokenizer.json'), tokenizer({ a: 0 }, [{ id: 48, content: '<x>' }])),
      'token "<x>" has the id 48, but the model has 48 tokens',
    ],
    experts: [
      (folder) => rewrite(folder, (config) => ({ ...config, architectures: ['MixtralForCausalLM'] })),
      'the architecture MixtralForCausalLM is not supported (missing: layers of experts (MoE)); LlamaForCausalLM',
    ],
    'an architecture that nothing is known of': [
      (folder) => rewrite(folder, (config) => ({ ...config, architectures: ['constructor'] })),
      'the architecture constructor is not supported; LlamaForCausalLM',
    ],
    'sliding windows of a Mistral': [
      (folder) =>
        rewrite(folder, (config) => ({ ...config, architectures: ['MistralForCausalLM'], sliding_window: 4096 })),
      'a sliding window (sliding_window 4096) is not supported',
    ],
    'sliding windows in some layers': [
      (folder) => rewrite(folder, (config) => ({ ...config, layer_types: ['full_attention', 'sliding_attention'] })),
      'a layer of type sliding_attention (layer_types) is not supported',
    ],
    'another activation': [
      (folder) => rewrite(folder, (config) => ({ ...config, hidden_act: 'gelu' })),
      'hidden_act gelu is not supported',
    ],
    'quantized weights': [
      (folder) => rewrite(folder, (config) => ({ ...config, quantization_config: { bits: 4 } })),
      'a quantized model (quantization_config) is not supported',
    ],
    'a missing size': [
      (folder) => rewrite(folder, ({ hidden_size: _, ...config }) => config),
      'config.json: hidden_size',
    ],
    'more heads in a group than kernels support': [
      (folder) =>
        rewrite(folder, (config) => ({ ...config, num_attention_heads: 64, num_key_value_heads: 1, head_dim: 2 })),
      'more than 32',
    ],
    'no config.json': [(folder) => rmSync(join(folder, 'config.json')), 'config.json: is missing'],
    'no JSON': [(folder) => writeFileSync(join(folder, 'config.json'), '{'), 'it is not JSON'],
  };

  it.each(Object.keys(BAD))('%s is one line, and nothing is written', async (name) => {
    const [damage, message, shards = 1] = BAD[name];
    const parent = fresh('parent');
    const { folder } = writeHfFolder(join(parent, 'in'), LLAMA, { shards });
    damage(folder);
    const { code, stdout, stderr } = await runCli(['import', 'hf', folder, '--out', join(parent, 'out')]);
    expect(stderr).toMatch(message);
    expect(stderr.trim().split('\n')).toHaveLength(1);
    expect([code, stdout]).toEqual([2, '']);
    expect(readdirSync(parent)).toEqual(['in']);
  });

  it('does not write over a folder', async () => {
    const { folder } = writeHfFolder(fresh(), LLAMA);
    const { code, stderr } = await runCli(['import', 'hf', folder, '--out', folder]);
    expect([code, stderr]).toEqual([2, expect.stringContaining('exists already; choose a new folder')]);
    expect(existsSync(join(folder, 'model.safetensors'))).toBe(true);
  });
});

describe('eval logits', () => {
  it('writes those of one sequence and of a batch', async () => {
    const { folder } = writeHfFolder(fresh(), LLAMA);
    const [input, output] = [fresh('ids'), fresh('logits')];
    const expected = logitsOf(folder, ids.slice(0, 30));
    for (const [shape, tensor] of [
      [[30], { dtype: 'I64', data: new Uint8Array(BigInt64Array.from(ids.slice(0, 30), BigInt).buffer) }],
      [
        [2, 30],
        { dtype: 'I32', data: new Uint8Array(Int32Array.from([...ids.slice(0, 30), ...ids.slice(30)]).buffer) },
      ],
    ] as const) {
      writeSafetensors(input, [{ name: 'input_ids', shape, ...tensor }]);
      const { code, stderr } = await runCli(['eval', 'logits', '--model', folder, '--in', input, '--out', output]);
      expect(code, stderr).toBe(0);
      const logits = readSafetensors(output).tensors.get('logits')!;
      expect([logits.dtype, logits.shape]).toEqual(['F32', [...shape, 48]]);
      expect(toFloat64(logits).subarray(0, 30 * 48)).toEqual(Float64Array.from(expected));
    }
  });

  it('refuses ids that the model does not have, and other tensors', async () => {
    const { folder } = writeHfFolder(fresh(), LLAMA);
    const [input, output] = [fresh('ids'), fresh('logits')];
    const run = () => runCli(['eval', 'logits', '--model', folder, '--in', input, '--out', output]);
    writeSafetensors(input, [
      { name: 'input_ids', dtype: 'I32', shape: [1], data: new Uint8Array(Int32Array.of(48).buffer) },
    ]);
    expect(await run()).toMatchObject({ code: 2, stderr: expect.stringContaining('token 48 is not in') });
    writeSafetensors(input, [{ name: 'ids', dtype: 'I32', shape: [1], data: new Uint8Array(4) }]);
    expect(await run()).toMatchObject({ code: 2, stderr: expect.stringContaining('has no tensor input_ids') });
    expect(existsSync(output)).toBe(false);
  });
});

describe('golden models', () => {
  it('of the repository and of transformers are present', ({ skip }) => {
    expect(denseGoldenModels().length).toBeGreaterThanOrEqual(3);
    const absence = sharedGoldenAbsence('hf');
    if (absence) skip(absence);
    expect(denseGoldenModels().length).toBeGreaterThanOrEqual(10);
  });

  describe.each(denseGoldenModels())('%s', (_name, folder) => {
    const golden = readSafetensors(join(folder, 'golden.safetensors')).tensors;
    const values = (tensor: string) => toFloat64(golden.get(tensor)!);
    const tokens = (count: number) => Array.from(values(`input_ids_${count}`));

    it.each([1, 7, 33, 130])('logits of %i tokens', (count) => {
      const found = logitsOf(folder, tokens(count));
      const width = found.length / count;
      const rows = golden.has(`positions_${count}`) ? Array.from(values(`positions_${count}`)) : tokens(count).keys();
      const chosen = [...rows].flatMap((row) => Array.from(found.subarray(row * width, (row + 1) * width)));
      expect(distance(chosen, values(`logits_${count}`))).toBeLessThan(2e-5);
    });

    it('hidden states', () => {
      using loaded = loadModel(cpu(), folder, 'f32');
      const { model } = loaded;
      const tape = new Tape(cpu(), { record: false });
      let x = embedding(tape, model.embedding.value, tape.from(tokens(7), [7], 'i32'), 'f32');
      model.blocks.forEach((block, i) => {
        expect(distance(x.read(), values(`hidden_7.${i}`)), `before layer ${i}`).toBeLessThan(2e-5);
        x = block.forward(tape, x, { lengths: [7] });
      });
      expect(distance(x.read(), values(`hidden_7.${model.blocks.length}`))).toBeLessThan(2e-5);
      const last = model.hidden(tape, tape.from(tokens(7), [7], 'i32'), { lengths: [7] });
      expect(distance(last.read(), values('hidden_7.final'))).toBeLessThan(2e-5);
      tape.end();
    });

    it('greedy tokens, and decoding equals prefilling', () => {
      using loaded = loadModel(cpu(), folder, 'f32');
      const { model } = loaded;
      using sequence = new DecodeCache(cpu(), model.shape, 'f32').sequence();
      const chosen: number[] = [];
      const all = tokens(33);
      let [logits] = prefill(model, [sequence], [all]);
      for (let i = 0; i < 16; i++) {
        const next = logits.indexOf(Math.max(...logits));
        chosen.push(next);
        all.push(next);
        [logits] = readTokens(model, [sequence], [[next]]);
      }
      expect(chosen).toEqual(Array.from(values('greedy_33')));
      const whole = logitsOf(folder, all);
      const width = whole.length / all.length;
      expect(distance(logits, whole.subarray(whole.length - width))).toBeLessThan(1e-5);
    });

    it('import, export and import keep every byte', async () => {
      const [imported, exported, again] = [fresh('imported'), fresh('exported'), fresh('again')];
      for (const args of [
        ['import', 'hf', folder, '--out', imported],
        ['export', 'hf', imported, '--out', exported],
        ['import', 'hf', exported, '--out', again],
      ])
        expect((await runCli(args)).code, args.join(' ')).toBe(0);
      const weights = (path: string) => readFileSync(join(path, 'model.safetensors'));
      expect(weights(again).equals(weights(imported))).toBe(true);
      expect(logitsOf(again, tokens(33))).toEqual(logitsOf(folder, tokens(33)));
    });
  });

  it('exported folders have the golden results in numpy', async ({ skip }) => {
    try {
      execFileSync('python3', ['-c', 'import numpy'], { stdio: 'ignore' });
    } catch {
      skip('python3 with numpy is not installed (Debian: apt-get install python3-numpy)');
    }
    const exported: string[] = [];
    for (const [name, folder] of denseGoldenModels()) {
      exported.push(fresh('exported'));
      expect((await runCli(['export', 'hf', folder, '--out', exported.at(-1)!])).code, name).toBe(0);
      cpSync(join(folder, 'golden.safetensors'), join(exported.at(-1)!, 'golden.safetensors'));
    }
    const text = execFileSync('python3', [GOLDEN_REFERENCE, 'check', ...exported], { encoding: 'utf8' });
    const errors = [...text.matchAll(/(\d\.\d+e[-+]\d+)/g)].map(([number]) => Number(number));
    expect(errors, text).toHaveLength(2 * exported.length);
    expect(Math.max(...errors), text).toBeLessThan(3e-4);
  });
});

/** From messages to text, as `generate` of transformers made it. */
interface GoldenChat {
  readonly messages: readonly { readonly role: string; readonly content: string }[];
  readonly max_new_tokens: number;
  readonly new_ids: readonly number[];
  readonly stopped_by_eos: boolean;
  readonly text: string;
}

describe('golden chats of transformers', () => {
  const folder = join(SHARED_GOLDEN, 'hf/llama3-tied');
  const file = join(folder, 'generate_golden.json');
  const chats: GoldenChat[] = existsSync(file) ? JSON.parse(readFileSync(file, 'utf8')).cases : [];

  it('are here', ({ skip }) => {
    const absence = sharedGoldenAbsence('hf/llama3-tied/generate_golden.json');
    if (absence) skip(absence);
    expect(chats.length).toBeGreaterThanOrEqual(5);
  });

  it.each(chats)('trefoil generate --chat: $messages', async (chat) => {
    const { content: prompt } = chat.messages.find(({ role }) => role === 'user')!;
    const system = chat.messages.find(({ role }) => role === 'system')?.content;
    const words = ['--prompt', prompt, '--max-new-tokens', String(chat.max_new_tokens), '--precision', 'fp32'];
    if (system !== undefined) words.push('--system', system);
    const { code, stdout, stderr } = await runCli([
      'generate',
      '--model',
      folder,
      '--chat',
      '--greedy',
      '--device',
      'cpu',
      '--json',
      ...words,
    ]);
    expect(code, stderr).toBe(0);
    const { text, tokens, finish_reason: reason } = JSON.parse(stdout);
    expect(reason).toBe(chat.stopped_by_eos ? 'separator' : 'length');
    // The token that ends the answer is not part of it.
    const isEnded = chat.stopped_by_eos ? 1 : 0;
    expect(tokens).toBe(chat.new_ids.length - isEnded);
    expect(text).toBe(isEnded ? chat.text.replace('<|eot_id|>', '') : chat.text);
  });
});
