/** Options of models (biases, norms of heads, scaled rotary positions, forced blocks, …) against float64: logits, gradients, decoding. */
import { describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { prefill, readTokens } from '../infer/decode.js';
import { Sequences } from '../ops/common/sequences.js';
import { Tape } from '../tensor/tape.js';

import { cacheBytes } from '../testing/cache-bytes.js';
import { cpu, devices, tolerance } from '../testing/devices.js';
import { modelForward } from '../testing/model-reference.js';
import { dot, randomValues, relativeError } from '../testing/numbers.js';
import { DecodeCache } from './cache.js';
import { LanguageModel } from './language-model.js';
import { headShapeOf, modelShape, sparseLayers } from './shape.js';

const VOCABULARY = 40;
const TOKENS = 70;
const LLAMA3 = { rope_type: 'llama3', rope_factor: 8, rope_original_context: 32, rope_theta: 100 };
const DENSE: Record<string, object> = {
  'a feed-forward of 37': { mlp_hidden: 37 },
  'bias of queries, keys and values': { qkv_bias: true },
  'norms of heads': { qk_norm: true, norm_eps: 1e-3 },
  'all biases': { qkv_bias: true, out_bias: true, mlp_bias: true },
  'heads wider than the model, tied': { n_heads: 8, d_k: 12, d_v: 12, tie_embeddings: true },
  '32 heads in a group': { n_heads: 32, n_kv_groups: 1, d_k: 4, d_v: 4 },
  'rope linear': { rope_type: 'linear', rope_factor: 3 },
  'rope llama3': LLAMA3,
  'rope yarn, norms and bias': {
    rope_type: 'yarn',
    rope_factor: 4,
    rope_original_context: 64,
    rope_theta: 1000,
    qk_norm: true,
    qkv_bias: true,
  },
};
const SPARSE: Record<string, object> = {
  'sparse, its own block forced': { nsa: { n_sel: 3, init_blocks: 0, local_blocks: 1 } },
  'sparse, two first and one last block forced': { nsa: { init_blocks: 2, local_blocks: 1 } },
  'sparse, shared keys and values': { nsa: { shared_kv: true } },
  'sparse, shared keys and values, rope before, as fla has it': {
    nsa: { shared_kv: true, cmp_rope: 'before', gate: 'sigmoid', l: 8, d: 8, l_sel: 8 },
  },
  'sparse, shared keys and values, no rope, norms and bias': {
    model: { qk_norm: true, qkv_bias: true },
    nsa: { shared_kv: true, cmp_rope: 'none' },
  },
  'a window layer below a sparse one': { model: { layer_pattern: ['window', 'nsa'] } },
  'a window layer above a sparse one with shared keys and values, norms and bias': {
    model: { layer_pattern: ['nsa', 'window'], qk_norm: true, qkv_bias: true },
    nsa: { shared_kv: true },
  },
  'two window layers after each sparse one': { model: { n_layers: 4, layer_pattern: ['nsa', 'window', 'window'] } },
};
const CASES: Record<string, { model?: object; nsa?: object }> = {
  ...Object.fromEntries(
    Object.entries(DENSE).map(([name, model]) => [name, { model: { attention: 'dense', ...model } }]),
  ),
  ...SPARSE,
};

const ids = Array.from({ length: TOKENS }, (_, t) => (t * 7 + (t % 5) * 3) % VOCABULARY);

describe.each(devices())('models on $name', ({ device, dtype }) => {
  /** A model with every parameter away from its start: norms of 1 and biases of 0 would hide mistakes. */
  function createModel({ model: overrides, nsa }: { model?: object; nsa?: object }) {
    const config = parseConfig({
      model: {
        dim: 24,
        n_layers: 2,
        n_heads: 4,
        n_kv_groups: 2,
        d_k: 8,
        d_v: 8,
        mlp: 'swiglu',
        mlp_ratio: 2,
        ...overrides,
      },
      nsa: { l: 8, d: 4, l_sel: 8, n_sel: 4, w: 12, ...nsa },
    });
    const shape = modelShape(config, VOCABULARY);
    const model = new LanguageModel(device(), shape, 1, dtype);
    const weights = new Map<string, Float64Array>();
    model.parameters.forEach((parameter, k) => {
      const isNorm = /norm$/.test(parameter.name);
      const values = randomValues(parameter.value.size, k + 1).map((value) =>
        Math.fround(isNorm ? 1 + 0.2 * value : 0.3 * value),
      );
      parameter.value.write(values);
      parameter.changed();
      weights.set(parameter.name, values);
    });
    return { model, shape, weights };
  }

  const weightOf = (weights: ReadonlyMap<string, Float64Array>) => (name: string) =>
    weights.get(name) ?? expect.fail(`there is no ${name}`);

  it.each(Object.keys(CASES))('have the logits of the reference, and decode as they prefill: %s', (name) => {
    const { model, shape, weights } = createModel(CASES[name]);
    const { logits: expected } = modelForward(shape, weightOf(weights), ids);
    const tape = new Tape(device(), { record: false });
    const tokens = new Sequences(device(), [TOKENS]);
    const rows = ids.map((_, t) => t);
    const logits = model.logits(tape, tape.from(ids, [TOKENS], 'i32'), rows, { lengths: tokens }).read();
    tape.end();
    const limit = dtype === 'f32' ? 2e-5 : 3e-2;
    expect(relativeError(logits, expected)).toBeLessThan(limit);

    const cache = new DecodeCache(device(), shape, dtype);
    const sequence = cache.sequence();
    let [next] = prefill(model, [sequence], [ids.slice(0, 33)]);
    const errors: number[] = [];
    for (let t = 33; t < TOKENS; t++) {
      errors.push(relativeError(next, expected.slice((t - 1) * VOCABULARY, t * VOCABULARY)));
      [next] = readTokens(model, [sequence], [[ids[t]]]);
    }
    // Rounding to bf16 turns near ties of blocks: a few tokens read another block than in float64.
    const most = dtype === 'f32' ? 0 : errors.length / 5;
    expect(errors.filter((error) => error >= limit).length, `${errors}`).toBeLessThanOrEqual(most);
    for (const object of [sequence, tokens, model]) object.free();
  });

  it.each(Object.keys(CASES))('have the gradients of the reference: %s', (name) => {
    const { model, shape, weights } = createModel(CASES[name]);
    const targets = ids.map((id) => (id * 3 + 1) % VOCABULARY);
    const tape = new Tape(device());
    const loss = model.loss(tape, tape.from(ids, [TOKENS], 'i32'), tape.from(targets, [TOKENS], 'i32'), {
      lengths: [TOKENS],
    });
    tape.backward(loss);
    const lossAt = () => meanLoss(modelForward(shape, weightOf(weights), ids).logits, targets);
    expect(Math.abs(loss.read()[0] - lossAt())).toBeLessThan(tolerance(dtype) * 10);
    // One direction for each parameter of the first block and of the last norm.
    for (const { name: parameter, gradient } of model.parameters) {
      if (!/^blocks\.0|^norm$/.test(parameter)) continue;
      const values = weightOf(weights)(parameter);
      const direction = randomValues(values.length, 77);
      const start = values.slice();
      const move = (step: number) => values.set(start.map((value, i) => value + step * direction[i]));
      const step = 1e-5;
      move(step);
      const above = lossAt();
      move(-step);
      const below = lossAt();
      move(0);
      const slope = Float64Array.from(gradient!.read());
      const analytic = dot(slope, direction);
      const size = Math.sqrt(dot(slope, slope)) + 1e-6;
      const error = Math.abs(analytic - (above - below) / (2 * step)) / (size * Math.sqrt(values.length));
      expect(error, parameter).toBeLessThan(dtype === 'f32' ? 1e-4 : 3e-2);
    }
    tape.end();
    model.free();
  });
});

it('shared keys and values take no pages for the window', () => {
  const shapeOf = (shared_kv: boolean) => modelShape(parseConfig({ nsa: { shared_kv } }), VOCABULARY);
  const device = cpu();
  const [shared, own] = [true, false].map((isShared) => cacheBytes(shapeOf(isShared), device, 8192));
  // The window keeps 512 of 8,192 tokens, in pages of 128.
  const { groups, dk, dv } = headShapeOf(shapeOf(false));
  const perToken = 4 * groups * (dk + dv) * shapeOf(false).nLayers;
  expect((own - shared) / perToken).toBe(512);
});

it('window layers have no gate, no phi, one pair of keys and values, and only pages of the window', () => {
  const shapeOf = (layer_pattern: ('nsa' | 'window')[], nsa: object = {}) =>
    modelShape(parseConfig({ model: { n_layers: 3, layer_pattern }, nsa: { phi: 'mlp', ...nsa } }), VOCABULARY);
  const mixed = shapeOf(['window', 'nsa']);
  expect(sparseLayers(mixed)).toEqual([1]);
  const model = new LanguageModel(cpu(), mixed, 1);
  const named = (layer: number) => model.parameters.filter(({ name }) => name.startsWith(`blocks.${layer}.attention.`));
  expect(named(0).map(({ name }) => name)).toEqual(['blocks.0.attention.qkv', 'blocks.0.attention.out']);
  expect(named(1).length).toBeGreaterThan(6);
  const { heads, groups, dk, dv } = headShapeOf(mixed);
  expect(named(2)[0].value.shape).toEqual([heads * dk + groups * (dk + dv), mixed.dim]);
  model.free();
  const bytes = (pattern: ('nsa' | 'window')[], nsa: object) => cacheBytes(shapeOf(pattern, nsa), cpu(), 8192);
  for (const nsa of [{}, { shared_kv: true }]) {
    // A window layer keeps 512 of 8,192 tokens.
    const window = 4 * groups * (dk + dv) * 512;
    expect(bytes(['window', 'nsa'], nsa)).toBe(bytes(['nsa'], nsa) / 3 + 2 * window);
  }
});

function meanLoss(logits: Float64Array, targets: readonly number[]): number {
  const losses = targets.map((target, t) => {
    const row = logits.subarray(t * VOCABULARY, (t + 1) * VOCABULARY);
    const most = Math.max(...row);
    return most + Math.log(row.reduce((sum, value) => sum + Math.exp(value - most), 0)) - row[target];
  });
  return losses.reduce((sum, value) => sum + value, 0) / losses.length;
}
