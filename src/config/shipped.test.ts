/** Every file in configs/: it loads, and it holds the values the runbooks promise. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { parse } from 'yaml';
import { parseTrainFlags } from '../cli/shared/train-flags.js';
import { configKeys } from './keys.js';
import { loadConfig } from './load.js';
import { parseConfig } from './parse.js';
import { packageRoot, shippedConfigs } from './shipped.js';

const CONFIGS = [
  'base',
  'toy',
  '125m_24g',
  '125m_40g',
  '125m_80g',
  '125m_1m',
  '125m_fast_log',
  '125m_2xa100_production',
  '125m_1xa100_production',
  '125m_2k_test',
  'small_smoke',
  'quickstart',
  'text_cpu',
  'lora',
  'needle_h200',
  'needle_cpu',
  '1b',
];
const PROFILES = ['a100', 'cpu', 'h200', 'rtx4090'];

/** Settings that a config leaves to the user. */
const GIVEN: Readonly<Record<string, readonly string[]>> = {
  text_cpu: ['--local-path', 'texts'],
  lora: ['--from', 'model', '--local-path', 'chats.jsonl'],
};
const load = (name: string, env: Record<string, string> = {}) =>
  loadConfig({ env, config: name, flags: parseTrainFlags(GIVEN[name] ?? []).layer }).config;
const text = (name: string) => readFileSync(join(packageRoot, 'configs', `${name}.yaml`), 'utf8');

it('ships exactly the promised files', () => {
  expect(shippedConfigs()).toEqual([...CONFIGS].sort());
  expect(shippedConfigs('configs/profiles')).toEqual(PROFILES);
});

describe.each(CONFIGS)('%s', (name) => {
  it('loads', () => expect(load(name).train.steps).toBeGreaterThan(0));
  it('says at the top what it is for', () => expect(text(name)).toMatch(/^# .{20,}\n/));
});

describe.each(PROFILES)('profile %s', (name) => {
  it('loads over the defaults and sets something', () => {
    const env = {};
    const flags = new Map([['runtime.profile', { value: name, origin: 'test', where: 'test' }]]);
    const { origins } = loadConfig({ env, flags });
    expect([...origins.values()]).toContain(`profile ${name}`);
  });
  it('says at the top what it is for', () => expect(text(`profiles/${name}`)).toMatch(/^# .{15,}\n/));
});

describe('text_cpu', () => {
  it('asks for the text', () => {
    expect(() => loadConfig({ env: {}, config: 'text_cpu' })).toThrow(/^data\.path: .*--local-path/);
  });

  it('has the recipe for models that use their context', () => {
    const { nsa, train } = load('text_cpu');
    expect(nsa).toMatchObject({ rope: 'window', cmp_rope: 'none', gate_temp: 10 });
    expect(train).toMatchObject({ optimizer: 'muon', scorer_loss: 0.1 });
  });

  it('suits any text: positions, a window of words, a folder of its own', () => {
    const { model, nsa, data, train } = load('text_cpu');
    expect([data.source, data.tokenizer, model.rope_scale]).toEqual(['text', 'byte', 1]);
    expect(nsa.w).toBeGreaterThanOrEqual(64);
    expect(CONFIGS.filter((name) => load(name).train.out_dir === train.out_dir)).toEqual(['text_cpu']);
  });
});

describe('base', () => {
  it('is the defaults', () => expect(load('base')).toEqual(parseConfig({})));

  it('shows every key with its default', () => {
    // Keys that are commented out must show their default too.
    const open = text('base').replace(/^ {2}# (?=\w+: )/gm, '  ');
    const tree = parse(open) as Record<string, Record<string, unknown>>;
    for (const key of configKeys) {
      const [section, name] = key.path.split('.');
      expect(tree[section][name], key.path).toEqual(key.default);
    }
    expect(Object.values(tree).flatMap(Object.keys)).toHaveLength(configKeys.length);
  });
});

describe('the 125m configs', () => {
  const names = CONFIGS.filter((name) => name.startsWith('125m'));
  it.each(names)('%s has the 125m shape, bf16 and gradient checkpointing', (name) => {
    const { model, nsa, runtime } = load(name);
    expect(model).toMatchObject({ dim: 768, n_layers: 12, n_heads: 12, n_kv_groups: 2, d_k: 64, d_v: 64 });
    expect(nsa).toMatchObject({ l: 32, d: 16, l_sel: 64, n_sel: 16, w: 512 });
    expect(runtime).toMatchObject({ precision: 'bf16', gradient_checkpointing: true, fused: true });
  });

  it.each(['125m_24g', '125m_40g', '125m_80g'])('%s takes 16 sequences a step', (name) => {
    const { batch_size, accumulate_grad_batches } = load(name).train;
    expect(batch_size * accumulate_grad_batches).toBe(16);
  });

  it('125m_1m takes sequences of a million tokens, in FP8', () => {
    const { train, runtime } = load('125m_1m');
    expect(train).toMatchObject({ seq_len: 2 ** 20, batch_size: 1, accumulate_grad_batches: 1 });
    expect(runtime.fp8).toBe(true);
  });

  it.each([
    ['125m_2xa100_production', { batch_size: 2, accumulate_grad_batches: 1 }],
    ['125m_1xa100_production', { batch_size: 1, accumulate_grad_batches: 4 }],
  ])('%s is the production run', (name, keys) => {
    expect(load(name).train).toMatchObject({ seq_len: 2048, steps: 50000, save_every: 5000, ...keys });
  });

  it('the single-GPU runbook overrides the production config by environment', () => {
    const { train } = load('configs/m7c_125m_2xa100_production.yaml', { NSA_BATCH_SIZE: '1', NSA_ACCUM: '4' });
    expect(train).toMatchObject({ batch_size: 1, accumulate_grad_batches: 4 });
  });
});

it('toy is the toy of the runbooks', () => {
  const { runtime, train } = load('toy');
  expect(runtime).toMatchObject({ precision: 'fp32', gradient_checkpointing: false, fused: false });
  expect(train).toMatchObject({ seq_len: 128, save_every: 0 });
});

it('every config but those of one model by GPU memory has a folder of its own', () => {
  const bySize = ['125m_24g', '125m_40g', '125m_80g', '125m_fast_log'];
  const folders = CONFIGS.filter((name) => !bySize.includes(name)).map((name) => load(name).train.out_dir);
  expect(new Set(folders).size).toBe(folders.length);
});

it('quickstart needs neither GPU nor network nor any file', () => {
  const { runtime, data } = load('quickstart');
  expect(runtime.device).toBe('cpu');
  expect(data).toMatchObject({ source: 'stories', tokenizer: 'stories', path: null });
});

it('profile a100 leaves the choice of attention kernels at its defaults: nothing was measured on that card', () => {
  const profile = parse(text('profiles/a100')) as { runtime: Record<string, unknown> };
  expect(Object.keys(profile.runtime).filter((key) => key.startsWith('fused'))).toEqual([]);
});
