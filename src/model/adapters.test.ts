/** Low-rank adapters of linear layers against float64: logits and gradients; with checkpointing; in the memory estimate. */
import { describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { Tape } from '../tensor/tape.js';
import { cpu, devices } from '../testing/devices.js';
import { modelForward } from '../testing/model-reference.js';
import { dot, randomValues, relativeError } from '../testing/numbers.js';
import { LanguageModel } from './language-model.js';
import { adaptedLayers, linearLayers, targetedLayers } from './linear-layers.js';
import { modelShape } from './shape.js';

const VOCABULARY = 40;
const TOKENS = 70;
const CASES: Record<string, { model?: object; nsa?: object; targets?: string[] }> = {
  'dense, biases and norms of heads': {
    model: { attention: 'dense', qk_norm: true, qkv_bias: true, out_bias: true, mlp_bias: true },
  },
  'dense, some layers': { model: { attention: 'dense' }, targets: ['q_proj', 'v_proj', 'layers.1.mlp.up_proj'] },
  'sparse, silu': { model: { mlp: 'silu' } },
  'sparse, shared keys and values, a window layer': {
    model: { layer_pattern: ['nsa', 'window'] },
    nsa: { shared_kv: true },
  },
};
const RANK = 3;
const ids = Array.from({ length: TOKENS }, (_, t) => (t * 7 + (t % 5) * 3) % VOCABULARY);
const targets = ids.map((id) => (id * 3 + 1) % VOCABULARY);

describe.each(devices())('adapters on $name', ({ device, dtype }) => {
  /** A model whose adapters are away from their start, at which half of their gradients are zero. */
  function createModel({ model: overrides, nsa, targets: named = ['all-linear'] }: (typeof CASES)[string]) {
    const sizes = { dim: 24, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8, mlp: 'swiglu' as const };
    const config = parseConfig({
      model: { ...sizes, mlp_ratio: 2, ...overrides },
      nsa: { l: 8, d: 4, l_sel: 8, n_sel: 4, w: 12, ...nsa },
    });
    const shape = modelShape(config, VOCABULARY);
    const model = new LanguageModel(device(), shape, 1, dtype);
    model.adapt({ rank: RANK, alpha: 5, targets: named });
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
    /** Weights with the adapters added, in float64. */
    const merged = (name: string): Float64Array => {
      const values = weights.get(name)?.slice() ?? expect.fail(`there is no ${name}`);
      for (const { layer, down, up, scale } of model.adapters) {
        if (layer.parameter !== name) continue;
        const [a, b] = [weights.get(down.name)!, weights.get(up.name)!];
        for (let row = 0; row < layer.outputs; row++)
          for (let column = 0; column < layer.inputs; column++)
            for (let r = 0; r < RANK; r++)
              values[(layer.from + row) * layer.inputs + column] +=
                scale * b[row * RANK + r] * a[r * layer.inputs + column];
      }
      return values;
    };
    return { model, shape, weights, merged };
  }

  const lossOf = (model: LanguageModel, checkpointing: boolean) => {
    const tape = new Tape(device());
    const loss = model.loss(tape, tape.from(ids, [TOKENS], 'i32'), tape.from(targets, [TOKENS], 'i32'), {
      lengths: [TOKENS],
      checkpointing,
    });
    tape.backward(loss);
    const value = loss.item();
    tape.end();
    return value;
  };

  it('of phi mlp have the gradients that follow from those of the merged weights', () => {
    const { model, shape, weights, merged } = createModel({ nsa: { phi: 'mlp' } });
    lossOf(model, false);
    const whole = new LanguageModel(device(), shape, 1, dtype);
    for (const parameter of whole.parameters) {
      parameter.value.write(merged(parameter.name));
      parameter.changed();
    }
    lossOf(whole, false);
    const gradients = new Map(whole.parameters.map(({ name, gradient }) => [name, gradient!.read()]));
    for (const { layer, down, up, scale } of model.adapters) {
      const { from, outputs, inputs } = layer;
      const dw = gradients.get(layer.parameter)!.subarray(from * inputs, (from + outputs) * inputs);
      const [a, b] = [weights.get(down.name)!, weights.get(up.name)!];
      const [da, db] = [new Float64Array(a.length), new Float64Array(b.length)];
      for (let row = 0; row < outputs; row++)
        for (let column = 0; column < inputs; column++)
          for (let r = 0; r < RANK; r++) {
            da[r * inputs + column] += scale * b[row * RANK + r] * dw[row * inputs + column];
            db[row * RANK + r] += scale * a[r * inputs + column] * dw[row * inputs + column];
          }
      const limit = dtype === 'f32' ? 1e-4 : 6e-2;
      expect(relativeError(down.gradient!.read(), da), down.name).toBeLessThan(limit);
      expect(relativeError(up.gradient!.read(), db), up.name).toBeLessThan(limit);
    }
    for (const object of [model, whole]) object.free();
  });

  it.each(Object.keys(CASES))('have the logits and gradients of the reference, and no others: %s', (name) => {
    const { model, shape, weights, merged } = createModel(CASES[name]);
    const tape = new Tape(device(), { record: false });
    const rows = ids.map((_, t) => t);
    const logits = model.logits(tape, tape.from(ids, [TOKENS], 'i32'), rows, { lengths: [TOKENS] }).read();
    tape.end();
    expect(relativeError(logits, modelForward(shape, merged, ids).logits)).toBeLessThan(dtype === 'f32' ? 2e-5 : 4e-2);

    const lossAt = () => meanLoss(modelForward(shape, merged, ids).logits);
    expect(Math.abs(lossOf(model, false) - lossAt())).toBeLessThan(dtype === 'f32' ? 2e-4 : 5e-2);
    for (const { down, up } of model.adapters)
      for (const { name: parameter, gradient } of [down, up]) {
        const values = weights.get(parameter)!;
        const direction = randomValues(values.length, 77);
        const start = values.slice();
        const move = (step: number) => values.set(start.map((value, i) => value + step * direction[i]));
        move(1e-5);
        const above = lossAt();
        move(-1e-5);
        const below = lossAt();
        move(0);
        const slope = Float64Array.from(gradient!.read());
        const size = Math.sqrt(dot(slope, slope)) + 1e-6;
        const error = Math.abs(dot(slope, direction) - (above - below) / 2e-5) / (size * Math.sqrt(values.length));
        expect(error, parameter).toBeLessThan(dtype === 'f32' ? 1e-4 : 4e-2);
      }
    const own = new Set(model.adapters.flatMap(({ down, up }) => [down, up]));
    for (const parameter of model.parameters)
      expect(parameter.gradient !== null, parameter.name).toBe(own.has(parameter));
    const before = model.adapters.flatMap(({ down, up }) => [down, up].map(({ gradient }) => gradient!.read()));
    for (const parameter of own) parameter.clearGradient();
    lossOf(model, true);
    const after = model.adapters.flatMap(({ down, up }) => [down, up].map(({ gradient }) => gradient!.read()));
    expect(after, 'with checkpointing').toEqual(before);
    model.free();
  });
});

it('new adapters change no logit', () => {
  const config = parseConfig({ model: { dim: 16, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 8, d_v: 8 } });
  const model = new LanguageModel(cpu(), modelShape(config, VOCABULARY), 1);
  const logits = () => {
    const tape = new Tape(cpu(), { record: false });
    const read = model.logits(tape, tape.from(ids, [TOKENS], 'i32'), [TOKENS - 1], { lengths: [TOKENS] }).read();
    tape.end();
    return read;
  };
  const before = logits();
  model.adapt({ rank: 4, alpha: 8, targets: ['all-linear'] });
  expect(logits()).toEqual(before);
  expect(model.adapters.map(({ layer }) => layer.name)).toEqual([
    'layers.0.self_attn.q_proj',
    'layers.0.self_attn.k_cmp_proj',
    'layers.0.self_attn.v_cmp_proj',
    'layers.0.self_attn.k_sel_proj',
    'layers.0.self_attn.v_sel_proj',
    'layers.0.self_attn.k_win_proj',
    'layers.0.self_attn.v_win_proj',
    'layers.0.self_attn.g_proj',
    'layers.0.self_attn.o_proj',
    'layers.0.mlp.up_proj',
    'layers.0.mlp.down_proj',
  ]);
  model.free();
});

it('a target that names no layer is refused with the names that there are', () => {
  const shape = modelShape(parseConfig({ model: { attention: 'dense', mlp: 'swiglu' } }), VOCABULARY);
  const name = (...targets: string[]) => targetedLayers(linearLayers(shape), targets, 'train.lora.targets');
  expect(() => name('q_proj', 'qproj')).toThrow(
    'train.lora.targets: qproj names no layer of this model; q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, ' +
      'down_proj, all-linear (did you mean q_proj?)',
  );
  expect(() => name('proj')).toThrow('train.lora.targets: proj names no layer of this model');
  expect(name('self_attn.q_proj', 'model.layers.3.mlp.up_proj')).toHaveLength(13);
});

it('a rank that is more than that of every adapted layer is refused', () => {
  const shape = modelShape(parseConfig({ model: { dim: 64, n_heads: 4, attention: 'dense' } }), VOCABULARY);
  expect(() => adaptedLayers(shape, { rank: 65, targets: ['all-linear'] })).toThrow(
    /^train\.lora\.rank: 65 is more than the rank of any layer it adapts; at most 64$/,
  );
  expect(adaptedLayers(shape, { rank: 64, targets: ['o_proj'] }).length).toBeGreaterThan(0);
});

function meanLoss(logits: Float64Array): number {
  const losses = targets.map((target, t) => {
    const row = logits.subarray(t * VOCABULARY, (t + 1) * VOCABULARY);
    const most = Math.max(...row);
    return most + Math.log(row.reduce((sum, value) => sum + Math.exp(value - most), 0)) - row[target];
  });
  return losses.reduce((sum, value) => sum + value, 0) / losses.length;
}
