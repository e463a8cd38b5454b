import { describe, expect, it } from 'vitest';
import { configSchema } from '../config/schema.js';
import { cudaAbsence } from '../device/cuda/cuda.js';
import { Sequences } from '../ops/common/sequences.js';
import { Tape, withTape } from '../tensor/tape.js';
import { Tensor } from '../tensor/tensor.js';
import { cpu, cuda } from '../testing/devices.js';
import { randomValues } from '../testing/numbers.js';
import { exportedBy, RecordingCuda } from '../testing/recording-cuda.js';
import { type ForwardOptions, LanguageModel } from './language-model.js';
import { ParameterStore } from './parameters.js';
import { headShapeOf, type ModelShape, modelShape, sparseShapeOf } from './shape.js';

type Overrides = { model?: Record<string, unknown>; nsa?: Record<string, unknown> };

function shape({ model = {}, nsa = {} }: Overrides = {}, vocabulary = 31): ModelShape {
  const config = configSchema.parse({
    model: { dim: 24, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8, mlp_ratio: 2, ...model },
    nsa: { l: 4, d: 2, l_sel: 8, n_sel: 3, w: 6, ...nsa },
  });
  return modelShape(config, vocabulary);
}

function step(model: LanguageModel, lengths: number[], checkpointing = false) {
  const { device } = model;
  const sequences = new Sequences(device, lengths);
  const ids = Tensor.from(
    device,
    randomValues(sequences.total, 5).map((v) => Math.floor((v + 1) * 15)),
    [sequences.total],
    'i32',
  );
  const tape = new Tape(device);
  sequences.compressed(model.shape.nsa); // outside of what is measured
  device.pool.resetPeak();
  const before = device.pool.bytesInUse;
  const loss = model.loss(tape, ids, ids, { lengths: sequences, checkpointing });
  const value = loss.item();
  tape.backward(loss);
  tape.end();
  const peak = device.pool.peakBytesInUse - before;
  const gradients = model.parameters.map((parameter) => parameter.gradient!.read());
  for (const parameter of model.parameters) parameter.clearGradient();
  sequences.free();
  ids.free();
  return { value, gradients, peak };
}

describe('what a model is given', () => {
  const withModel = (use: (model: LanguageModel, tape: Tape, ids: Tensor) => void) => {
    const model = new LanguageModel(cpu(), shape(), 3);
    const tape = new Tape(cpu());
    use(model, tape, tape.from(new Int32Array(12), [12], 'i32'));
    tape.end();
    model.free();
  };

  it('must have the lengths of as many tokens', () => {
    withModel((model, tape, ids) => {
      const sequences = tape.hold(new Sequences(cpu(), [7, 4]));
      for (const lengths of [[11], sequences])
        expect(() => model.loss(tape, ids, ids, { lengths })).toThrow(
          'the lengths sum to 11, but 12 tokens were given: they must be equal',
        );
    });
  });

  it('must have lengths at all', () => {
    withModel((model, tape, ids) => {
      for (const options of [undefined, {}] as unknown as ForwardOptions[])
        expect(() => model.loss(tape, ids, ids, options)).toThrow('a forward pass needs { lengths }');
    });
  });

  it.each([false, true])(
    'can be lengths or their Sequences, with checkpointing %s; nothing is left in memory',
    (checkpointing) => {
      withModel((model, _, ids) => {
        const losses = (lengths: ForwardOptions['lengths']) =>
          withTape(cpu(), (tape) => {
            const loss = model.loss(tape, ids, ids, { lengths, checkpointing });
            tape.backward(loss);
            return loss.item();
          });
        const sequences = new Sequences(cpu(), [7, 5]);
        const expected = losses(sequences);
        sequences.free();
        const before = cpu().pool.bytesInUse;
        expect(losses([7, 5])).toBe(expected);
        expect(cpu().pool.bytesInUse).toBe(before);
      });
    },
  );

  it('must have names that differ', () => {
    const store = new ParameterStore(cpu(), 1, 1);
    store.zeros('up', [2]);
    expect(() => store.matrix('up', [2, 2])).toThrow('this model already has a parameter named up');
    store.free();
  });
});

describe('language model in bf16 on CUDA', () => {
  const missing = cudaAbsence();
  // Trained gates are computed with the projection, the debugging ones apart: both must agree with the CPU.
  it.for<[string, Overrides]>([
    ['softmax gate', {}],
    ['sigmoid gate, tied', { model: { tie_embeddings: true }, nsa: { gate: 'sigmoid', gate_temp: 2 } }],
    ['a gate that is not trained', { nsa: { stopgrad_gates: true } }],
    ['a forced branch', { nsa: { force_branch: 'win' } }],
    ['window layers', { model: { n_layers: 2, layer_pattern: ['window', 'nsa'] } }],
  ])('%s: loss and gradients are near those of the CPU', ([, overrides], context) => {
    if (missing) context.skip(missing);
    const models = [
      new LanguageModel(cpu(), shape(overrides), 3),
      new LanguageModel(cuda(), shape(overrides), 3, 'bf16'),
    ];
    const [exact, rounded] = models.map((model) => {
      model.parameters.forEach((parameter, i) => {
        if (!parameter.name.includes('gate')) return; // zero at the start
        parameter.value.write(randomValues(parameter.value.size, 70 + i));
        parameter.changed();
      });
      return step(model, [50, 33, 1]);
    });
    expect(Math.abs(rounded.value / exact.value - 1)).toBeLessThan(1e-2);
    models[0].parameters.forEach(({ name }, i) => {
      const error = Math.hypot(...rounded.gradients[i].map((value, at) => value - exact.gradients[i][at]));
      expect(error, name).toBeLessThanOrEqual(0.1 * Math.hypot(...exact.gradients[i]));
    });
    for (const model of models) model.free();
  });
});

describe('language model', () => {
  it('has the parameters of the 125m shape', () => {
    const count = (vocabulary: number) => {
      const full = modelShape(configSchema.parse({}), vocabulary);
      const model = new LanguageModel(cpu(), { ...full, nLayers: 1 }, 1);
      const one = model.parameterCount;
      model.free();
      const outside = 2 * full.vocabSize * full.dim + full.dim;
      return (one - outside) * full.nLayers + outside;
    };
    expect(count(256)).toBe(78_601_392);
    expect(count(50_257)).toBe(155_402_928 + 2 * 47 * 768); // 50,304 rows: 47 beyond GPT-2's tokens
  });

  const variants: [string, Overrides][] = [
    ['nsa', {}],
    ['dense', { model: { attention: 'dense' } }],
    ['swiglu and tied embeddings', { model: { mlp: 'swiglu', tie_embeddings: true } }],
    ['phi conv, sigmoid gate', { nsa: { phi: 'conv', gate: 'sigmoid' } }],
    ['phi mlp, rope before', { nsa: { phi: 'mlp', cmp_rope: 'before' } }],
    ['no rope on compressed keys', { nsa: { cmp_rope: 'none' } }],
  ];

  it.each(variants)('%s: gradients agree with finite differences of the loss', (_, overrides) => {
    const model = new LanguageModel(cpu(), shape(overrides), 3);
    const lengths = [19, 12];
    const { value, gradients } = step(model, lengths);
    expect(Math.abs(value - Math.log(31))).toBeLessThan(0.6);
    model.parameters.forEach((parameter, p) => {
      // Along the gradient the loss changes by ‖g‖ per unit: a float32 loss resolves that, single entries it does not.
      const gradient = gradients[p];
      const norm = Math.hypot(...gradient);
      if (norm < 1e-4) return;
      const values = parameter.value.read();
      const h = 2e-2;
      const at = (sign: number) => {
        parameter.value.write(values.map((v, i) => v + (sign * h * gradient[i]) / norm));
        return step(model, lengths).value;
      };
      const slope = (at(1) - at(-1)) / (2 * h);
      parameter.value.write(values);
      expect(Math.abs(slope - norm) / norm, parameter.name).toBeLessThan(0.03);
    });
    model.free();
  });

  it('gives the same bits with gradient checkpointing, in less memory', () => {
    const model = new LanguageModel(cpu(), shape({ model: { n_layers: 6 } }), 3);
    const plain = step(model, [200]);
    const checkpointed = step(model, [200], true);
    expect(checkpointed.value).toBe(plain.value);
    expect(checkpointed.gradients).toEqual(plain.gradients);
    expect(checkpointed.peak).toBeLessThan(plain.peak * 0.6);
    model.free();
  });

  it('runs a checkpointed block again without its last product', () => {
    const own = shape({ model: { n_layers: 6 } });
    const products = (checkpointing: boolean) => {
      const device = new RecordingCuda(exportedBy({ heads: headShapeOf(own), sparse: sparseShapeOf(own) }));
      const model = new LanguageModel(device, own, 3);
      step(model, [200], checkpointing);
      model.free();
      return device.launches.filter(({ kernel }) => kernel === 'linear_forward').length;
    };
    const [once, again] = [products(false), products(true)];
    const inBlock = (once - 1) / 6; // one is the head's
    expect(inBlock).toBeGreaterThanOrEqual(4);
    expect(again - once).toBe(6 * (inBlock - 1));
  });

  it('allocates nothing in a step of steady state and frees all it took', () => {
    const model = new LanguageModel(cpu(), shape(), 3);
    const { pool, threads } = cpu();
    cpu().threads = 1; // with more, a thread may get its first task of a kind, and scratch memory for it, in any step
    step(model, [64]);
    const [allocations, inUse] = [pool.systemAllocations, pool.bytesInUse];
    const scratch = cpu().scratchBytes;
    for (let i = 0; i < 3; i++) step(model, [64]);
    expect(pool.systemAllocations).toBe(allocations);
    expect(pool.bytesInUse).toBe(inUse);
    expect(cpu().scratchBytes).toBe(scratch);
    cpu().threads = threads;
    model.free();
  });

  it('starts with a uniform gate and shows gates and selections to an observer', () => {
    const model = new LanguageModel(cpu(), shape(), 3);
    const tape = new Tape(cpu(), { record: false });
    const seen: number[] = [];
    model.hidden(tape, tape.zeros([20], 'i32'), {
      lengths: [20],
      observer: {
        gates: (layer, gates) => {
          seen.push(layer);
          expect(gates.read().every((g) => Math.abs(g - 1 / 3) < 1e-6)).toBe(true);
        },
        selected: (_, selected) => expect(selected.shape).toEqual([20, 2, 3]),
      },
    });
    expect(seen).toEqual([0, 1]);
    tape.end();
    model.free();
  });
});
