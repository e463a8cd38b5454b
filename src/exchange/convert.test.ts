/** `trefoil convert --sparse`: the converted model starts equal to the dense one, and bad input writes nothing. */
import { existsSync, mkdtempSync, readdirSync, rmSync, truncateSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { runCli } from '../cli/testing/run.js';
import { loadConfig } from '../config/load.js';
import { prefill, readTokens } from '../infer/decode.js';
import { loadModel, writeFinalModel } from '../infer/load.js';
import { DecodeCache } from '../model/cache.js';
import { LanguageModel } from '../model/language-model.js';
import { modelShape } from '../model/shape.js';
import { readSafetensors } from '../run/safetensors.js';
import { toFloat64 } from '../run/safetensors-format.js';
import { cpu } from '../testing/devices.js';
import { denseGoldenModels } from '../testing/golden.js';
import { runTraining, tinyConfig } from '../testing/run.js';
import { LLAMA, writeHfFolder } from './testing/hf-folder.js';
import { distance, logitsOf } from './testing/logits.js';

const root = mkdtempSync(join(tmpdir(), 'trefoil-convert-'));
afterAll(() => rmSync(root, { recursive: true, force: true }));
let folders = 0;
const fresh = (name = 'folder') => join(root, `${name}-${++folders}`);

const tokens = (count: number, vocabulary = LLAMA.vocab_size) =>
  Array.from({ length: count }, (_, t) => (t * 7 + (t % 5) * 3 + (t >> 6)) % vocabulary);

async function convert(model: string, ...words: string[]): Promise<string> {
  const out = fresh('sparse');
  const { code, stderr } = await runCli(['convert', '--sparse', model, '--out', out, ...words]);
  expect(code, stderr).toBe(0);
  return out;
}

const CASES: Record<string, [Record<string, unknown>, object?]> = {
  'Llama, two shards': [LLAMA, { shards: 2 }],
  'Qwen2 in BF16, with biases': [{ ...LLAMA, architectures: ['Qwen2ForCausalLM'] }, { dtype: 'BF16' }],
  'Qwen3 with norms of heads': [{ ...LLAMA, architectures: ['Qwen3ForCausalLM'], head_dim: 16 }],
  'rope yarn': [{ ...LLAMA, rope_scaling: { rope_type: 'yarn', factor: 4, original_max_position_embeddings: 64 } }],
};

describe.each(Object.keys(CASES))('exact start: %s', (name) => {
  const { folder } = writeHfFolder(fresh(), ...CASES[name]);
  // The first case has the lengths of a real context.
  const lengths = name.startsWith('Llama') ? [64, 1024, 4096] : [64, 1024];

  it.each(lengths)('%i tokens have the logits of the dense model', async (count) => {
    const sparse = await convert(folder, '--context', String(count));
    const error = distance(logitsOf(sparse, tokens(count)), logitsOf(folder, tokens(count)));
    console.log(`${name}, ${count} tokens: distance of the logits ${error.toExponential(1)}`);
    expect(error).toBeLessThan(1e-5);
  });

  it.each([false, true])('decodes as the dense model prefills; shared_kv %s', async (isShared) => {
    const sparse = await convert(folder, '--context', '200', '--set', `nsa.shared_kv=${isShared}`);
    const ids = tokens(200);
    const expected = logitsOf(folder, ids);
    using loaded = loadModel(cpu(), sparse, 'f32');
    using sequence = new DecodeCache(cpu(), loaded.model.shape, 'f32').sequence();
    let [logits] = prefill(loaded.model, [sequence], [ids.slice(0, 150)]);
    for (let t = 150; t < ids.length; t++) {
      const row = expected.subarray((t - 1) * LLAMA.vocab_size, t * LLAMA.vocab_size);
      expect(distance(logits, row), `token ${t}`).toBeLessThan(2e-5);
      [logits] = readTokens(loaded.model, [sequence], [[ids[t]]]);
    }
  });
});

describe('a converted model', () => {
  it('differs from the dense one where blocks are left out', async () => {
    const { folder } = writeHfFolder(fresh(), LLAMA);
    const sparse = await convert(folder, '--set', 'nsa.n_sel=4', '--set', 'nsa.l_sel=32');
    const [found, expected] = [sparse, folder].map((path) => logitsOf(path, tokens(300)));
    const exact = 4 * 32 * LLAMA.vocab_size;
    expect(distance(found.subarray(0, exact), expected.subarray(0, exact))).toBeLessThan(1e-5);
    expect(distance(found.subarray(exact), expected.subarray(exact))).toBeGreaterThan(1e-3);
  });

  it('keeps types, tokenizer and end tokens, and has copies of keys and values', async () => {
    const { folder } = writeHfFolder(fresh(), LLAMA, { dtype: 'BF16' });
    const [sparse, imported] = [await convert(folder), fresh('imported')];
    await runCli(['import', 'hf', folder, '--out', imported]);
    const [own, dense] = [sparse, imported].map((path) => readSafetensors(join(path, 'model.safetensors')).tensors);
    const name = 'blocks.1.attention.qkv';
    const rows = (tensor: Uint8Array, from: number, to: number) =>
      tensor.subarray(from * 2 * LLAMA.hidden_size, to * 2 * LLAMA.hidden_size);
    const { data, dtype, shape } = own.get(name)!;
    expect([dtype, shape]).toEqual(['BF16', [32 + 3 * 32, 32]]);
    for (const from of [32, 64, 96]) expect(rows(data, from, from + 32)).toEqual(rows(dense.get(name)!.data, 32, 64));
    expect(toFloat64(own.get('blocks.0.attention.gate.bias')!).slice(0, 6)).toEqual(
      Float64Array.of(-20, 0, -20, -20, 0, -20),
    );
    for (const [tensor, value] of dense) if (!tensor.endsWith('qkv')) expect(own.get(tensor), tensor).toEqual(value);
    using loaded = loadModel(cpu(), sparse);
    expect(loaded.endTokens).toEqual([1, 2]);
    expect(loaded.config.nsa).toMatchObject({ phi: 'avg', cmp_rope: 'before', n_sel: 16, l_sel: 64 });
  });

  it('comes from a run with its tokenizer and sizes, and its config continues the training', async () => {
    const path = fresh('run');
    const model = { attention: 'dense', mlp: 'swiglu' };
    // Keys of sparse attention that a dense model has not used: those of text_cpu.
    const nsa = { rope: 'window', cmp_rope: 'none', gate_temp: 10 };
    const config = tinyConfig(root, { model, nsa, train: { steps: 2, out_dir: path, save_every: 1, eval_every: 0 } });
    await runTraining(config);
    const sparse = await convert(join(path, 'checkpoints', 'step-1'));
    const { config: continued } = loadConfig({ env: {}, config: join(sparse, 'train.yaml'), flags: new Map() });
    expect(continued.nsa).toMatchObject({ l: 8, d: 4, l_sel: 16, n_sel: 4, w: 16 });
    expect(continued.nsa).toMatchObject({ rope: 'all', cmp_rope: 'before', gate_temp: 1 });
    const once = { ...config.train, steps: 1, lr: 1e-9 };
    const train = { ...once, init_from: continued.train.init_from, out_dir: fresh('continued') };
    const { result } = await runTraining({ ...config, model: continued.model, nsa: continued.nsa, train });
    // 4 blocks of 16 tokens cover the sequence: the first loss is that of the dense model at its step 1.
    const dense = { ...once, out_dir: fresh('dense'), init_from: join(path, 'checkpoints', 'step-1') };
    const { result: expected } = await runTraining({ ...config, train: dense });
    expect(Math.abs(result.firstLoss! - expected.firstLoss!)).toBeLessThan(1e-5);
  });
});

describe('refusals are one line and write nothing', () => {
  const dense = () => writeHfFolder(fresh(), LLAMA).folder;
  const sparseModel = () => {
    const path = fresh('sparse');
    const config = tinyConfig(root);
    const model = new LanguageModel(cpu(), modelShape(config, 256), 1);
    writeFinalModel(path, model, config);
    model.free();
    return path;
  };
  const truncated = () => {
    const folder = dense();
    truncateSync(join(folder, 'model.safetensors'), 5000);
    return folder;
  };
  const BAD: Record<string, [() => string, string[], string]> = {
    'a sparse model': [sparseModel, [], 'has sparse attention already (model.attention nsa); give a dense model'],
    'no model': [() => join(root, 'nothing'), [], 'there is no such file or folder'],
    'a truncated file': [truncated, [], 'model.safetensors: '],
    'blocks that do not fit': [dense, ['--set', 'nsa.l=40'], 'nsa.d: 16 does not divide'],
    'a compression block longer than a selection block': [dense, ['--set', 'nsa.l_sel=16'], 'nsa.l: 32 is greater'],
    'another compression': [
      dense,
      ['--set', 'nsa.phi=mlp'],
      'nsa.phi: mlp is not possible; the copied weights need avg',
    ],
    'a key of another section': [dense, ['--set', 'model.dim=8'], '--set model.dim: convert sets keys of nsa only'],
    'two numbers of blocks': [
      dense,
      ['--context', '4096', '--set', 'nsa.n_sel=8'],
      '--context sets nsa.n_sel; leave out one of the two',
    ],
  };

  it.each(Object.keys(BAD))('%s', async (name) => {
    const [model, words, message] = BAD[name];
    const parent = fresh('parent');
    const out = join(parent, 'out');
    const { code, stdout, stderr } = await runCli(['convert', '--sparse', model(), '--out', out, ...words]);
    expect(stderr).toContain(message);
    expect(stderr.trim().split('\n')).toHaveLength(1);
    expect([code, stdout]).toEqual([2, '']);
    expect(existsSync(parent) ? readdirSync(parent) : []).toEqual([]);
  });

  it('a folder that exists', async () => {
    const folder = dense();
    const { code, stderr } = await runCli(['convert', '--sparse', folder, '--out', folder]);
    expect([code, stderr]).toEqual([2, expect.stringContaining('exists already; choose a new folder')]);
  });
});

describe('golden models', () => {
  it.each(denseGoldenModels())('exact start of %s: its golden logits', async (_name, folder) => {
    const golden = readSafetensors(join(folder, 'golden.safetensors')).tensors;
    const values = (tensor: string) => toFloat64(golden.get(tensor)!);
    const sparse = await convert(folder);
    for (const count of [7, 130]) {
      const ids = Array.from(values(`input_ids_${count}`));
      const found = logitsOf(sparse, ids);
      const width = found.length / count;
      const rows = golden.has(`positions_${count}`) ? Array.from(values(`positions_${count}`)) : ids.keys();
      const chosen = [...rows].flatMap((row) => Array.from(found.subarray(row * width, (row + 1) * width)));
      expect(distance(chosen, values(`logits_${count}`)), `${count} tokens`).toBeLessThan(2e-5);
    }
    const long = tokens(1000, 48);
    expect(distance(logitsOf(sparse, long), logitsOf(folder, long))).toBeLessThan(1e-5);
  });
});
