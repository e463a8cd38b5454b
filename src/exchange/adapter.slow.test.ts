/** Adapters in PEFT's files: training, reading, merging, and export; one made by hand from the description of the format. */
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { runCli } from '../cli/testing/run.js';
import { parseConfig } from '../config/parse.js';
import { sequenceLogits } from '../evaluate/logits.js';
import { loadModel, locateModel, withAdapter, writeFinalModel } from '../infer/load.js';
import { LanguageModel } from '../model/language-model.js';
import { modelShape } from '../model/shape.js';
import { readSafetensors, writeSafetensors } from '../run/safetensors.js';
import { toFloat32 } from '../run/safetensors-format.js';
import { loadWeights } from '../run/tensor-source.js';
import { cpu } from '../testing/devices.js';
import { randomValues } from '../testing/numbers.js';
import { writeAdapter } from './adapter.js';
import { exportHf } from './export-hf.js';
import { LLAMA, writeHfFolder } from './testing/hf-folder.js';
import { distance } from './testing/logits.js';

const root = mkdtempSync(join(tmpdir(), 'trefoil-adapter-'));
afterAll(() => rmSync(root, { recursive: true, force: true }));
let folders = 0;
const fresh = (name = 'folder') => join(root, `${name}-${++folders}`);
const GOLDEN = join(import.meta.dirname, '../../test/golden/hf');

/** A sparse model of this program. */
function sparseModel(phi: 'avg' | 'mlp'): string {
  const config = parseConfig({
    model: { dim: 32, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8, mlp: 'swiglu' },
    nsa: { l: 8, d: 4, l_sel: 16, n_sel: 3, w: 16, phi },
  });
  const model = new LanguageModel(cpu(), modelShape(config, 257), 3);
  const path = fresh('sparse');
  writeFinalModel(path, model, config);
  model.free();
  return path;
}

const MODELS: [string, () => string][] = [
  ['Llama', () => join(GOLDEN, 'llama')],
  ['Qwen2', () => join(GOLDEN, 'qwen2')],
  ['Qwen3', () => join(GOLDEN, 'qwen3')],
  ['a sparse model', () => sparseModel('avg')],
  ['a sparse model with phi mlp', () => sparseModel('mlp')],
];
const SETTINGS = { rank: 4, alpha: 6, targets: ['all-linear'] };

/** A model as training has it: its adapters beside its weights, random and large enough to change every logit. */
function adapted(path: string, settings: { rank: number; alpha: number; targets: string[] } = SETTINGS): LanguageModel {
  const { shape, weights } = locateModel(path);
  const model = new LanguageModel(cpu(), shape, 1);
  loadWeights(weights, model);
  weights.close();
  model.adapt(settings);
  for (const [i, { down, up }] of model.adapters.entries())
    for (const { value } of [down, up]) value.write(randomValues(value.size, i + 9).map((one) => 0.1 * one));
  return model;
}

function logits(model: LanguageModel): Float32Array {
  const ids = Array.from({ length: 90 }, (_, t) => (t * 7 + (t % 5) * 3) % Math.min(200, model.shape.vocabSize));
  return Float32Array.from([...sequenceLogits(model, ids)].flatMap((chunk) => Array.from(chunk)));
}

describe.each(MODELS)('adapters of %s', (name, make) => {
  it('merged and unmerged have the same logits to fp32 rounding, loaded and exported', () => {
    const base = make();
    const model = adapted(base);
    const expected = logits(model);
    const folder = fresh('adapter');
    writeAdapter(folder, model.adapters, { ...SETTINGS, base });
    model.free();
    using plain = loadModel(cpu(), base, 'f32');
    expect(distance(logits(plain.model), expected)).toBeGreaterThan(0.01);
    using merged = loadModel(cpu(), base, 'f32', { adapter: folder });
    const difference = distance(logits(merged.model), expected);
    expect(difference).toBeLessThan(5e-6);
    console.log(`${name}: merged and unmerged logits differ by ${difference.toExponential(1)} of the largest`);
    using trainable = loadModel(cpu(), base, 'f32', { adapter: folder, trainable: true });
    expect(distance(logits(trainable.model), expected)).toBeLessThan(5e-6);
    if (name.startsWith('a sparse')) return; // no format elsewhere has three pairs of keys and values
    const located = withAdapter(cpu(), locateModel(base), folder);
    const out = fresh('exported');
    exportHf(located, out);
    located.weights.close();
    using again = loadModel(cpu(), out, 'f32');
    expect(distance(logits(again.model), expected)).toBeLessThan(5e-6);
  });
});

it('the tensors and the config have the names that PEFT writes', () => {
  const base = writeHfFolder(fresh(), LLAMA).folder;
  const model = adapted(base, { rank: 2, alpha: 3, targets: ['q_proj', 'mlp.down_proj'] });
  const folder = fresh('adapter');
  writeAdapter(folder, model.adapters, { rank: 2, alpha: 3, targets: ['q_proj', 'mlp.down_proj'], base: 'some/model' });
  const { tensors, metadata } = readSafetensors(join(folder, 'adapter_model.safetensors'));
  const names = [0, 1].flatMap((layer) =>
    ['self_attn.q_proj', 'mlp.down_proj'].flatMap((module) =>
      ['A', 'B'].map((matrix) => `base_model.model.model.layers.${layer}.${module}.lora_${matrix}.weight`),
    ),
  );
  expect([...tensors.keys()].sort()).toEqual(names.sort());
  expect(tensors.get(names.find((name) => name.includes('0.mlp') && name.includes('A'))!)!.shape).toEqual([2, 44]);
  expect(metadata).toEqual({ format: 'pt' });
  expect(JSON.parse(readFileSync(join(folder, 'adapter_config.json'), 'utf8'))).toMatchObject({
    peft_type: 'LORA',
    task_type: 'CAUSAL_LM',
    base_model_name_or_path: 'some/model',
    r: 2,
    lora_alpha: 3,
    target_modules: ['q_proj', 'mlp.down_proj'],
    bias: 'none',
    fan_in_fan_out: false,
  });
  model.free();
});

it('an adapter that PEFT wrote gives the logits of PEFT, and one of another model is refused', () => {
  const folder = join(GOLDEN, 'adapter');
  const base = join(GOLDEN, 'llama');
  const { tensors } = readSafetensors(join(folder, 'golden.safetensors'));
  const values = (name: string) => toFloat32(tensors.get(name)!)!;
  const ids = [...new Int32Array(tensors.get('input_ids')!.data.slice().buffer)];
  for (const [expected, options] of [
    [values('plain'), {}],
    [values('logits'), { adapter: folder }],
  ] as const) {
    using loaded = loadModel(cpu(), base, 'f32', options);
    const all = [...sequenceLogits(loaded.model, ids)].flatMap((chunk) => Array.from(chunk));
    expect(distance(all.slice(-expected.length), expected)).toBeLessThan(2e-5);
  }
  expect(distance(values('plain'), values('logits'))).toBeGreaterThan(0.1);
  // PEFT saves a copy of the head beside an adapter of it: that of another model does not belong here.
  const other = fresh('other');
  cpSync(folder, other, { recursive: true });
  const path = join(other, 'adapter_model.safetensors');
  const copied = readSafetensors(path).tensors;
  const written = Array.from(copied, ([name, tensor]) => ({ ...tensor, name, data: tensor.data.slice() }));
  written.find(({ name }) => name.endsWith('lm_head.base_layer.weight'))!.data.fill(1, 0, 4);
  rmSync(path);
  writeSafetensors(path, written, { format: 'pt' });
  expect(() => withAdapter(cpu(), locateModel(base), other)).toThrow(
    /lm_head\.base_layer\.weight is not the head of this model; the adapter is one of another model$/,
  );
});

/** PEFT's documentation, "LoRA" and "Checkpoint format": what a program that is not ours would write. */
function handMade(
  change: (config: Record<string, unknown>, tensors: Map<string, [number[], number]>) => void = () => {},
) {
  const folder = fresh('hand');
  mkdirSync(folder);
  const config: Record<string, unknown> = {
    peft_type: 'LORA',
    auto_mapping: null,
    base_model_name_or_path: 'meta-llama/small',
    revision: null,
    task_type: 'CAUSAL_LM',
    inference_mode: true,
    r: 2,
    target_modules: ['v_proj', 'o_proj'],
    exclude_modules: null,
    lora_alpha: 4,
    lora_dropout: 0.05,
    fan_in_fan_out: false,
    bias: 'none',
    use_rslora: false,
    modules_to_save: null,
    init_lora_weights: true,
    rank_pattern: { o_proj: 1 },
    alpha_pattern: { o_proj: 3 },
    use_dora: false,
  };
  const tensors = new Map<string, [number[], number]>();
  for (const layer of [0, 1]) {
    const place = `base_model.model.model.layers.${layer}.self_attn`;
    tensors.set(`${place}.v_proj.lora_A.weight`, [[2, 32], 0.5]);
    tensors.set(`${place}.v_proj.lora_B.weight`, [[16, 2], 0.25]);
    tensors.set(`${place}.o_proj.lora_A.weight`, [[1, 32], 0.125]);
    tensors.set(`${place}.o_proj.lora_B.weight`, [[32, 1], 1]);
  }
  change(config, tensors);
  writeFileSync(join(folder, 'adapter_config.json'), JSON.stringify(config));
  const written = Array.from(tensors, ([name, [shape, value]]) => {
    const values = new Float32Array(shape.reduce((product, size) => product * size, 1)).fill(value);
    return { name, shape, dtype: 'F32' as const, data: new Uint8Array(values.buffer) };
  });
  writeSafetensors(join(folder, 'adapter_model.safetensors'), written, { format: 'pt' });
  return folder;
}

describe('an adapter made by hand', () => {
  const base = writeHfFolder(fresh(), LLAMA).folder;
  const delta = (folder: string, name: string) => {
    const [plain, merged] = [locateModel(base), withAdapter(cpu(), locateModel(base), folder)];
    const [before, after] = [plain, merged].map(({ weights }) => toFloat32(weights.read(name))!);
    for (const { weights } of [plain, merged]) weights.close();
    return after.map((value, i) => value - before[i]);
  };

  it('is added to the rows of its layers, with their own rank and alpha', () => {
    const folder = handMade();
    const qkv = delta(folder, 'blocks.1.attention.qkv'); // 32 rows of queries, 16 of keys, 16 of values, 32 columns
    expect(qkv.subarray(0, 48 * 32).every((value) => value === 0)).toBe(true);
    // 4 / 2 * (2 * 0.25 * 0.5) and 3 / 1 * (1 * 0.125)
    for (const value of qkv.subarray(48 * 32)) expect(value).toBeCloseTo(0.5, 5);
    for (const value of delta(folder, 'blocks.0.attention.out')) expect(value).toBeCloseTo(0.375, 5);
    expect(delta(folder, 'blocks.0.mlp.up').every((value) => value === 0)).toBe(true);
  });

  it('takes patterns as PEFT does: expressions for the end of a name, of which the first counts', () => {
    const folder = handMade((config) => {
      const patterns = { 'layers\\.0\\..*v_proj': 8, 'v_proj|o_proj': 6, o_proj: 1 };
      Object.assign(config, { alpha_pattern: patterns });
    });
    const change = (layer: number) => delta(folder, `blocks.${layer}.attention.qkv`).subarray(48 * 32);
    for (const value of change(0)) expect(value).toBeCloseTo((8 / 2) * 0.25, 5);
    for (const value of change(1)) expect(value).toBeCloseTo((6 / 2) * 0.25, 5);
    for (const value of delta(folder, 'blocks.0.attention.out')) expect(value).toBeCloseTo(6 * 0.125, 5);
  });

  it('is scaled by the root of its rank where the file says so, and may adapt the head', () => {
    const folder = handMade((config, tensors) => {
      config['use_rslora'] = true;
      tensors.set('base_model.model.lm_head.lora_A.weight', [[2, 32], 0.5]);
      tensors.set('base_model.model.lm_head.lora_B.weight', [[48, 2], 0.25]);
    });
    for (const value of delta(folder, 'head')) expect(value).toBeCloseTo((4 / Math.SQRT2) * 0.25, 5);
  });

  it.each<[string, Parameters<typeof handMade>[0], RegExp]>([
    [
      'sizes of another model',
      (_, tensors) => void tensors.set('base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight', [[2, 64], 1]),
      /adapter_model\.safetensors: .*layers\.0\.self_attn\.v_proj\.lora_A\.weight has the shape \[2, 64\], this model needs \[2, 32\]; the adapter is one of another model$/,
    ],
    [
      'more layers than the model',
      (_, tensors) => void tensors.set('base_model.model.model.layers.7.self_attn.v_proj.lora_A.weight', [[2, 32], 1]),
      /layers\.7\.self_attn\.v_proj\.lora_A\.weight belongs to no linear layer of this model; the adapter is one of another model$/,
    ],
    [
      'half of a pair',
      (_, tensors) => void tensors.delete('base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight'),
      /layers\.0\.self_attn\.v_proj has only one of lora_A and lora_B/,
    ],
    [
      'rank 0',
      (config) => void Object.assign(config, { r: 0 }),
      /adapter_config\.json: r: .*only plain LoRA adapters are supported$/,
    ],
    ['alpha NaN', (config) => void Object.assign(config, { lora_alpha: 'NaN' }), /adapter_config\.json: lora_alpha: /],
    [
      'DoRA',
      (config) => void Object.assign(config, { use_dora: true }),
      /adapter_config\.json: use_dora: .*only plain LoRA/,
    ],
    [
      'another method',
      (config) => void Object.assign(config, { peft_type: 'IA3' }),
      /adapter_config\.json: peft_type: /,
    ],
    [
      '20,000 patterns',
      (config) =>
        void Object.assign(config, { rank_pattern: Object.fromEntries(Array.from({ length: 2e4 }, (_, i) => [i, 1])) }),
      /adapter_config\.json: rank_pattern: more than 10000 patterns; only plain LoRA/,
    ],
    [
      'other weights than those of the model',
      (config) => void Object.assign(config, { init_lora_weights: 'pissa' }),
      /adapter_config\.json: init_lora_weights: .*only plain LoRA/,
    ],
    [
      'an adapter that is added to some tokens only',
      (config) => void Object.assign(config, { alora_invocation_tokens: [1, 2] }),
      /adapter_config\.json: alora_invocation_tokens: /,
    ],
    [
      'an invalid pattern',
      (config) => void Object.assign(config, { alpha_pattern: { '(': 2 } }),
      /adapter_config\.json: alpha_pattern\.\(: .*only plain LoRA/,
    ],
    [
      'a pattern that backtracks',
      (config) => void Object.assign(config, { rank_pattern: { '((\\w+\\.?)+)+!': 2 } }),
      /the pattern .* of adapter_config\.json takes too long to match/,
    ],
    ['saved modules', (config) => void Object.assign(config, { modules_to_save: ['lm_head'] }), /modules_to_save: /],
  ])('is refused in one line: %s', (_, change, message) => {
    const folder = handMade(change);
    expect(() => withAdapter(cpu(), locateModel(base), folder)).toThrow(message);
    expect(() => loadModel(cpu(), base, 'f32', { adapter: folder })).toThrow(message);
  });

  it('is taken by the commands, and a folder without one is refused', async () => {
    const adapter = handMade();
    const merged = fresh('merged');
    const { code, stderr } = await runCli(['export', 'hf', base, '--merge', adapter, '--out', merged]);
    expect([code, stderr]).toEqual([0, expect.stringContaining('no tokenizer.json')]);
    const ids = join(root, 'ids.safetensors');
    const data = new Uint8Array(Int32Array.from([1, 2, 3, 4]).buffer);
    writeSafetensors(ids, [{ name: 'input_ids', dtype: 'I32', shape: [4], data }]);
    const evaluated = async (...words: string[]) => {
      const out = fresh('logits.safetensors');
      const done = await runCli(['eval', 'logits', ...words, '--device', 'cpu', '--in', ids, '--out', out]);
      expect(done.code, done.stderr).toBe(0);
      return toFloat32(readSafetensors(out).tensors.get('logits')!)!;
    };
    const [plain, added, exported] = [
      await evaluated('--model', base),
      await evaluated('--model', base, '--adapter', adapter),
      await evaluated('--model', merged),
    ];
    expect(distance(plain, added)).toBeGreaterThan(0.01);
    expect(distance(exported, added)).toBeLessThan(1e-6);
    const missing = await runCli(['eval', 'logits', '--model', base, '--adapter', root, '--in', ids, '--out', fresh()]);
    expect(missing.code).toBe(2);
    expect(missing.stderr).toMatch(
      /adapter_config\.json: is missing; --adapter takes the folder of an adapter in PEFT's format\n$/,
    );
    const alone = await runCli(['eval', 'logits', '--model', adapter, '--in', ids, '--out', fresh()]);
    expect(alone.stderr).toContain(`holds an adapter, not a model; use --model meta-llama/small --adapter ${adapter}`);
  });
});
