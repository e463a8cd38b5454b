/** `--from`: what the model decides, what a config may change, and what contradicts it. */
import { describe, expect, it } from 'vitest';
import { parseTrainFlags } from '../cli/shared/train-flags.js';
import type { Layer } from './layer.js';
import { loadConfig } from './load.js';

const origin = 'model m';
const MODEL: Layer = new Map(
  Object.entries({
    'model.dim': 64,
    'model.n_layers': 3,
    'model.attention': 'dense',
    'model.rope_theta': 500_000,
    'data.tokenizer': 'm/tokenizer.json',
  }).map(([key, value]) => [key, { value, origin, where: origin }]),
);
const load = (...words: string[]) => {
  const { layer, config } = parseTrainFlags(words);
  return loadConfig({ env: {}, flags: layer, config, modelLayer: () => MODEL });
};

describe('--from', () => {
  it('gives shape and tokenizer, also over a shipped config', () => {
    for (const words of [[], ['--config', 'base'], ['--config', 'text_cpu', '--local-path', 'x']]) {
      const { config, origins } = load('--from', 'm', ...words);
      expect([config.model.dim, config.model.n_layers, config.model.rope_theta]).toEqual([64, 3, 500_000]);
      expect([config.data.tokenizer, origins.get('model.dim')]).toEqual(['m/tokenizer.json', 'model m']);
      // Not the shape of text_cpu, with which the model was not made.
      expect([config.model.mlp, config.nsa.w]).toEqual(['silu', 512]);
    }
    expect(load('--from', 'm', '--config', 'text_cpu', '--local-path', 'x').config.train.steps).toBe(1400);
  });

  it('is on top of nothing else: a config changes what no weight depends on', () => {
    const { config } = load('--from', 'm', '--set', 'model.rope_theta=1e6', '--tokenizer', 'byte', '--lr', '1e-4');
    expect([config.model.rope_theta, config.data.tokenizer, config.train.lr]).toEqual([1e6, 'byte', 1e-4]);
  });

  it('names a shape that conflicts by its key, with both values', () => {
    expect(() => load('--from', 'm', '--set', 'model.dim=128', '--set', 'model.n_layers=3')).toThrow(
      /^model\.dim: 128, but 64 in m; leave it out \[flag --set model\.dim\]$/,
    );
  });

  it('is needed by adapters, whose settings are refused in one line', () => {
    const refuse = (lora: string) => () => load('--from', 'm', '--set', `train.lora=${lora}`);
    expect(() => load('--set', 'train.lora={rank: 4}')).toThrow(/^train\.lora: adapters need a model .*--from/);
    expect(refuse('{rank: 0}')).toThrow(
      /^train\.lora: \{"rank":0\} is not allowed; a mapping of rank \(an integer >= 1\), alpha/,
    );
    expect(refuse('{alpha: .nan}')).toThrow(/^train\.lora: \{"alpha":"NaN"\} is not allowed; .*alpha \(a number > 0\)/);
    expect(refuse('{ranks: 4}')).toThrow(/^train\.lora: \{"ranks":4\} is not allowed; a mapping of rank/);
    expect(refuse('{dropout: 0.1}')).toThrow(
      /^train\.lora: \{"dropout":0\.1\} is not allowed; .* dropout \(0\), or null/,
    );
    expect(() => load('--from', 'm', '--set', 'train.lora={}', '--set', 'train.trainable=[norm]')).toThrow(
      /^train\.lora: only adapters are trained, which contradicts train\.trainable/,
    );
  });
});
