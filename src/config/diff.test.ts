import { describe, expect, it } from 'vitest';
import { changeLine, checkResume, diffConfigs } from './diff.js';
import { parseConfig } from './parse.js';

const base = parseConfig({});

describe('diffConfigs', () => {
  it('finds nothing between equals', () => expect(diffConfigs(base, parseConfig({}))).toEqual([]));

  it('lists what changed, with both values', () => {
    expect(diffConfigs(base, parseConfig({ train: { betas: [0.9, 0.99], lr: 1 }, model: { dim: 8 } }))).toEqual([
      { key: 'model.dim', before: 768, after: 8, shape: true },
      { key: 'train.lr', before: 2e-4, after: 1, shape: false },
      { key: 'train.betas', before: [0.9, 0.95], after: [0.9, 0.99], shape: false },
    ]);
  });
});

describe('checkResume', () => {
  it.each([
    ['model', { dim: 384 }],
    ['model', { n_layers: 6 }],
    ['model', { n_heads: 6 }],
    ['model', { n_kv_groups: 4 }],
    ['model', { d_k: 32 }],
    ['model', { d_v: 32 }],
    ['model', { mlp: 'swiglu' }],
    ['model', { mlp_ratio: 3 }],
    ['model', { mlp_hidden: 2048 }],
    ['model', { qkv_bias: true }],
    ['model', { qk_norm: true }],
    ['model', { out_bias: true }],
    ['model', { mlp_bias: true }],
    ['model', { tie_embeddings: true }],
    ['model', { attention: 'dense' }],
    ['model', { vocab_size: 300 }],
    ['nsa', { l: 64 }],
    ['nsa', { d: 8 }],
    ['nsa', { l_sel: 128 }],
    ['nsa', { n_sel: 8 }],
    ['nsa', { w: 256 }],
    ['nsa', { shared_kv: true }],
    ['nsa', { phi: 'conv' }],
    ['nsa', { phi_hidden: 8 }],
    ['data', { tokenizer: 'gpt2' }],
    ['data', { vocab_size: 300 }],
  ])('refuses another %s %j', (section, keys) => {
    const after = parseConfig({ [section]: keys });
    const [name, value] = Object.entries(keys)[0];
    expect(() => checkResume(base, after)).toThrow(`${section}.${name}: `);
    expect(() => checkResume(base, after)).toThrow(`${JSON.stringify(value)} is not allowed on resume; keep`);
  });

  it('names every refused key, and only those', () => {
    const after = parseConfig({ model: { dim: 8, n_layers: 1 }, train: { lr: 1 } });
    expect(() => checkResume(base, after)).toThrow(/^model\.dim.*\nmodel\.n_layers[^\n]*$/);
  });

  it('returns the rest for printing', () => {
    const after = parseConfig({ train: { steps: 9 }, model: { rope_scale: 4 }, data: { source: 'hub' } });
    expect(checkResume(base, after).map(changeLine)).toEqual([
      'model.rope_scale: 1 -> 4',
      'data.source: "synthetic" -> "hub"',
      'train.steps: 1000 -> 9',
    ]);
  });
});
