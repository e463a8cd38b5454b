/** Sparse models of other codes (fla, LlamaNSA): exported, imported, used directly, and the golden ones where they are present. */
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { runCli } from '../cli/testing/run.js';
import { prefill, readTokens } from '../infer/decode.js';
import { loadModel, writeFinalModel } from '../infer/load.js';
import { tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import { DecodeCache } from '../model/cache.js';
import { readSafetensors, writeSafetensors } from '../run/safetensors.js';
import { toFloat64 } from '../run/safetensors-format.js';
import { Tape } from '../tensor/tape.js';
import { cpu } from '../testing/devices.js';
import { goldenFolders, sharedGoldenAbsence } from '../testing/golden.js';
import { parseHfConfig } from './hf-config.js';
import { distance, logitsOf } from './testing/logits.js';

const root = mkdtempSync(join(tmpdir(), 'trefoil-nsa-'));
afterAll(() => rmSync(root, { recursive: true, force: true }));
let folders = 0;
const fresh = (name = 'folder') => join(root, `${name}-${++folders}`);
const run = async (...args: string[]) => {
  const { code, stderr } = await runCli(args);
  expect(code, `${args.join(' ')}: ${stderr}`).toBe(0);
};
const weights = (path: string) => readFileSync(join(path, 'model.safetensors'));

const MODEL = { dim: 32, n_heads: 16, n_kv_groups: 1, d_k: 4, d_v: 4, mlp: 'swiglu', mlp_hidden: 40, attention: 'nsa' };
const NSA = {
  l: 8,
  d: 8,
  l_sel: 8,
  n_sel: 4,
  w: 12,
  phi: 'avg',
  cmp_rope: 'before',
  gate: 'sigmoid',
  shared_kv: true,
};
const FORCED_OWN = { init_blocks: 0, local_blocks: 1 };
/** As many blocks as a block has tokens: the selection by chunks. */
const FOUR_BY_FOUR = { l: 4, d: 4, l_sel: 4 };

/** The folder of a model of this program with random weights. */
function written(model: object = {}, nsa: object = {}, change?: (name: string) => number | undefined): string {
  const config = tinyConfig({ model: { ...MODEL, ...model }, nsa: { ...NSA, ...nsa } });
  using made = tinyModel(config);
  for (const { name, value } of made.parameters) {
    const fill = change?.(name);
    if (fill !== undefined) value.write(new Float32Array(value.size).fill(fill));
  }
  const path = fresh('own');
  writeFinalModel(path, made, config);
  return path;
}

describe.each([
  ['NSAForCausalLM', { qkv_bias: true }, {}],
  ['NSAForCausalLM', { tie_embeddings: true }, {}],
  ['LlamaNSAForCausalLM', { rope_type: 'linear', rope_factor: 2 }, FORCED_OWN],
  ['LlamaNSAForCausalLM', {}, { ...FORCED_OWN, ...FOUR_BY_FOUR, selection: 'chunked' }],
] as const)('%s with %j, %j', (architecture, model, nsa) => {
  const own = written(model, nsa);
  const exported = fresh('exported');
  const ids = Array.from({ length: 90 }, (_, t) => (t * 7 + (t % 5) * 3) % 256);

  it('is exported by its names', async () => {
    await run('export', 'hf', own, '--out', exported);
    const config = JSON.parse(readFileSync(join(exported, 'config.json'), 'utf8'));
    const { l_sel: size } = { ...NSA, ...nsa };
    expect(config).toMatchObject({ architectures: [architecture], block_size: size, block_counts: 4, window_size: 12 });
    const names = [...readSafetensors(join(exported, 'model.safetensors')).tensors.keys()];
    const isFla = architecture === 'NSAForCausalLM';
    const layer = isFla ? 'model.layers.1.attn' : 'model.layers.1.self_attn';
    expect(names).toEqual(
      expect.arrayContaining([
        ...[`${layer}.g_proj.weight`, `${layer}.q_proj.weight`, `${layer}.o_proj.weight`, 'model.norm.weight'],
        ...(isFla
          ? ['model.embeddings.weight', 'model.layers.0.attn_norm.weight', 'model.layers.0.mlp_norm.weight']
          : ['model.embed_tokens.weight', 'model.layers.0.input_layernorm.weight']),
      ]),
    );
    expect(names.filter((name) => name.includes('gate.bias'))).toEqual([]);
  });

  it('eval logits reads the folder', async () => {
    const [given, out] = [fresh('ids.safetensors'), fresh('logits.safetensors')];
    const bytes = new Uint8Array(Int32Array.from(ids).buffer);
    writeSafetensors(given, [{ name: 'input_ids', dtype: 'I32', shape: [ids.length], data: bytes }]);
    await run('eval', 'logits', '--model', exported, '--in', given, '--out', out, '--device', 'cpu');
    const logits = readSafetensors(out).tensors.get('logits')!;
    expect([logits.dtype, logits.shape]).toEqual(['F32', [ids.length, 256]]);
    expect(Float32Array.from(toFloat64(logits))).toEqual(logitsOf(own, ids));
  });

  it('has the same logits used directly, and the same bytes after import, export and import', async () => {
    expect(logitsOf(exported, ids)).toEqual(logitsOf(own, ids));
    const [imported, again, third] = [fresh('imported'), fresh('exported'), fresh('imported')];
    await run('import', 'hf', exported, '--out', imported);
    await run('export', 'hf', imported, '--out', again);
    await run('import', 'hf', again, '--out', third);
    expect(weights(third).equals(weights(imported))).toBe(true);
    expect(logitsOf(third, ids)).toEqual(logitsOf(own, ids));
  });
});

describe('export', () => {
  it.each<[string, object, object]>([
    ['the branches have keys and values of their own (nsa.shared_kv false)', {}, { shared_kv: false }],
    ['blocks are compressed by nsa.phi conv', {}, { phi: 'conv' }],
    ['compressed keys are rotated as nsa.cmp_rope after says', {}, { cmp_rope: 'after' }],
    ['the gate is no plain sigmoid', {}, { gate: 'softmax' }],
    ['nsa.l 8, d 4 and l_sel 8 differ', {}, { d: 4 }],
    ['nsa.n_sel 3 is not a power of two', {}, { n_sel: 3 }],
    ['nsa.n_sel 8 is more than half of nsa.l_sel 8', {}, { n_sel: 8 }],
    ['2 first and 2 last blocks are forced', {}, { init_blocks: 2 }],
    ['chunks of nsa.n_sel 4 blocks are not as long as nsa.l_sel 8', {}, { ...FORCED_OWN, selection: 'chunked' }],
    ['rotary positions are scaled', { rope_type: 'linear', rope_factor: 2 }, {}],
    ['other layers than queries, keys and values have biases', { mlp_bias: true }, {}],
    ['8 heads in a group are no multiple of 16', { n_kv_groups: 2 }, {}],
    ['some layers have only a window (model.layer_pattern)', { layer_pattern: ['nsa', 'window'] }, {}],
    ['a feed-forward without a gate', { mlp: 'silu' }, {}],
  ])('refuses: %s', async (reason, model, nsa) => {
    const out = fresh('out');
    const { code, stderr } = await runCli(['export', 'hf', written(model, nsa), '--out', out]);
    expect([code, stderr.trim().split('\n').length]).toEqual([2, 1]);
    expect(stderr).toContain(reason);
    expect(existsSync(out)).toBe(false);
  });

  it('refuses a bias of the gate', async () => {
    const own = written({}, {}, (name) => (name.endsWith('1.attention.gate.bias') ? 0.5 : undefined));
    const { code, stderr } = await runCli(['export', 'hf', own, '--out', fresh('out')]);
    expect([code, stderr]).toEqual([2, expect.stringContaining('blocks.1.attention.gate.bias is not zero')]);
  });
});

describe('import', () => {
  const FLA = {
    architectures: ['NSAForCausalLM'],
    vocab_size: 32,
    hidden_size: 64,
    num_hidden_layers: 1,
    num_heads: 16,
    num_kv_heads: 1,
    head_dim: 4,
    block_size: 32,
    block_counts: 3,
    window_size: 64,
    intermediate_size: null,
  };
  it('rounds the number of blocks, and computes a width that is null', () => {
    const { model, nsa } = parseHfConfig('config.json', FLA);
    expect(nsa).toMatchObject({ n_sel: 4, l: 32, d: 32, l_sel: 32, init_blocks: 1, local_blocks: 2, shared_kv: true });
    expect(model).toMatchObject({ attention: 'nsa', mlp_hidden: 256, d_k: 4 });
    expect(parseHfConfig('config.json', { ...FLA, hidden_size: 1024, hidden_ratio: 3 }).model.mlp_hidden).toBe(2048);
  });
  it('selects by chunks where the kernels of LlamaNSA do', () => {
    const { num_heads: heads, num_kv_heads: groups, ...rest } = FLA;
    const llama = {
      ...rest,
      architectures: ['LlamaNSAForCausalLM'],
      num_attention_heads: heads,
      num_key_value_heads: groups,
    };
    const nsaOf = (sizes: object) => parseHfConfig('config.json', { ...llama, intermediate_size: 44, ...sizes }).nsa;
    expect(nsaOf({ block_size: 16, block_counts: 16 })).toMatchObject({
      n_sel: 16,
      selection: 'chunked',
      init_blocks: 0,
    });
    expect(nsaOf({ block_size: 32, block_counts: 16 })).toMatchObject({ n_sel: 16, selection: 'best' });
    expect(() => nsaOf({ block_size: 16, block_counts: 17 })).toThrow('block_counts 32 with block_size 16');
  });
  it.each<[string, object]>([
    ['block_counts 32 with block_size 32 is not supported', { block_counts: 20 }],
    ['a model without a window (window_size) is not supported', { window_size: null }],
    ['attnres_block_size 4 is not supported', { attnres_block_size: 4 }],
    ['elementwise_affine false is not supported', { elementwise_affine: false }],
    ['hidden_act powlu is not supported', { hidden_act: 'powlu' }],
  ])('refuses: %s', (reason, change) => {
    expect(() => parseHfConfig('config.json', { ...FLA, ...change })).toThrow(reason);
  });
});

const SPARSE = goldenFolders('config.json', /"(NSA|LlamaNSA)ForCausalLM"/);

describe('golden models', () => {
  it('are present', ({ skip }) => {
    const absence = sharedGoldenAbsence('hf');
    if (absence) skip(absence);
    expect(SPARSE).toHaveLength(3);
  });

  describe.each(SPARSE)('%s', (name, folder) => {
    const golden = readSafetensors(join(folder, 'golden.safetensors')).tensors;
    const values = (tensor: string) => Array.from(toFloat64(golden.get(tensor)!));

    it.each([1, 200, 513])('logits of %i tokens', (count) => {
      const found = logitsOf(folder, values(`input_ids_${count}`));
      const width = found.length / count;
      const chosen = values(`positions_${count}`).flatMap((row) => [...found.subarray(row * width, (row + 1) * width)]);
      const error = distance(chosen, values(`logits_${count}`));
      console.log(`${name}, ${count} tokens: distance of the logits ${error.toExponential(1)}`);
      expect(error).toBeLessThan(2e-5);
    });

    it('selects the same blocks', () => {
      using loaded = loadModel(cpu(), folder, 'f32');
      const { model } = loaded;
      const tape = new Tape(cpu(), { record: false });
      const found: number[][] = [];
      const observer = {
        selected: (_: number, selected: { read(): ArrayLike<number> }) => void found.push(Array.from(selected.read())),
      };
      model.hidden(tape, tape.from(values('input_ids_513'), [513], 'i32'), { lengths: [513], observer });
      tape.end();
      expect(found).toHaveLength(model.shape.nLayers);
      found.forEach((blocks, layer) => void expect(blocks).toEqual(values(`blocks_513.${layer}`)));
    });

    it('decodes as it prefills', () => {
      using loaded = loadModel(cpu(), folder, 'f32');
      const { model } = loaded;
      using sequence = new DecodeCache(cpu(), model.shape, 'f32').sequence();
      const ids = values('input_ids_513').slice(0, 330); // beyond the first 256, where 16 blocks of 16 are no choice
      const whole = logitsOf(folder, ids);
      const width = whole.length / ids.length;
      let [logits] = prefill(model, [sequence], [ids.slice(0, 200)]);
      for (let t = 200; t < ids.length; t++) {
        expect(distance(logits, whole.subarray((t - 1) * width, t * width)), `token ${t}`).toBeLessThan(2e-5);
        [logits] = readTokens(model, [sequence], [[ids[t]]]);
      }
    });

    it('import, export and import keep every byte', async () => {
      const [imported, exported, again] = [fresh('imported'), fresh('exported'), fresh('again')];
      await run('import', 'hf', folder, '--out', imported);
      await run('export', 'hf', imported, '--out', exported);
      await run('import', 'hf', exported, '--out', again);
      expect(weights(again).equals(weights(imported))).toBe(true);
      const tensors = (path: string) => readSafetensors(join(path, 'model.safetensors')).tensors;
      const sorted = (path: string) => [...tensors(path)].sort(([a], [b]) => (a < b ? -1 : 1));
      expect(sorted(exported)).toEqual(sorted(folder));
      expect(logitsOf(again, values('input_ids_200'))).toEqual(logitsOf(folder, values('input_ids_200')));
    });
  });
});
