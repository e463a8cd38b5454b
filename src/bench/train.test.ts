import { describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { defineKernels } from '../device/device.js';
import { trainingFlops } from '../model/flops.js';
import { add } from '../ops/add/op.js';
import { linear } from '../ops/linear/op.js';
import { Tape } from '../tensor/tape.js';
import { Tensor } from '../tensor/tensor.js';
import { cpu } from '../testing/devices.js';
import { benchTraining } from './train.js';
import { type CaseChoice, caseLengths, caseShape, SMALL_GPT, type TrainCase, trainCases } from './train-cases.js';
import { kernelFlops } from './train-flops.js';
import { TimedDevice } from './train-profile.js';

const SMALL = {
  model: { dim: 32, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8, mlp_ratio: 2 },
  nsa: { l: 8, d: 4, l_sel: 16, n_sel: 3, w: 24 },
  train: { seq_len: 96, batch_size: 2, accumulate_grad_batches: 3 },
};

function smallCase(attention: 'nsa' | 'dense' = 'nsa'): TrainCase {
  return { name: 'small', config: parseConfig({ ...SMALL, model: { ...SMALL.model, attention } }) };
}

describe('cases', () => {
  it('are the 125m shape with both attentions and the small GPT by default', () => {
    const cases = trainCases({}, {});
    expect(cases.map(({ name, config }) => [name, config.model.attention, config.train.seq_len])).toEqual([
      ['base', 'nsa', 2048],
      ['base', 'dense', 2048],
      [SMALL_GPT, 'dense', 256],
    ]);
    expect(cases.map(caseShape).map(({ vocabSize }) => vocabSize)).toEqual([256, 256, 1024]);
    expect(caseLengths(cases[2])).toEqual([256, 256, 256, 256]);
  });

  it('are the product of the requested values', () => {
    const cases = trainCases({ config: 'base', attention: 'both', lengths: [128, 256], batchSizes: [1, 2] }, {});
    const seen = cases.map(({ config: { model, train } }) => `${model.attention} ${train.seq_len}x${train.batch_size}`);
    const sizes = ['128x1', '128x2', '256x1', '256x2'];
    expect(seen).toEqual(['nsa', 'dense'].flatMap((kind) => sizes.map((size) => `${kind} ${size}`)));
  });

  it.each(['cpu', 'cuda'] as const)(
    'have the same models and precision with --seq-len and --batch-size on %s',
    (device) => {
      const models = (choice: CaseChoice) => [
        ...new Set(
          trainCases({ device, ...choice }, {}).map(({ name, config }) =>
            JSON.stringify([name, config.model, config.nsa, config.data.tokenizer, config.runtime.precision]),
          ),
        ),
      ];
      const sizes = [{ batchSizes: [1, 4] }, { lengths: [512] }, { batchSizes: [2], lengths: [512, 1024] }];
      for (const size of sizes) {
        expect(models(size)).toEqual(models({}));
        expect(models({ ...size, attention: 'both' })).toEqual(models({ attention: 'both' }));
      }
    },
  );

  it('on a GPU are the 125m shape in bf16 with the GPT-2 vocabulary, 65,536 tokens per step', () => {
    const seen = (choice: CaseChoice) =>
      trainCases({ device: 'cuda', ...choice }, {}).map(({ name, config: { data, runtime, train } }) => {
        expect([name, data.tokenizer, runtime.precision]).toEqual(['125m', 'gpt2', 'bf16']);
        return `${train.seq_len}x${train.batch_size} ${runtime.selection_kernel}`;
      });
    const kernels = ['adaptive', 'v1', 'v2'];
    expect(seen({})).toEqual([
      ...['512x128', '1024x64', '2048x32'].flatMap((size) => kernels.map((kernel) => `${size} ${kernel}`)),
      ...['8192x8', '32768x2', '65536x1'].map((size) => `${size} adaptive`),
    ]);
    expect(seen({ lengths: [2048], batchSizes: [1, 4], kernels: ['adaptive'] })).toEqual([
      ...['2048x1 adaptive', '2048x4 adaptive'],
    ]);
    expect(seen({ lengths: [131_072] })).toEqual(['131072x1 adaptive']);
    // Dense attention has no kernel of a selected branch to choose.
    expect(seen({ lengths: [2048], attention: 'dense', kernels: ['v1', 'v2'] })).toEqual(['2048x32 adaptive']);
  });

  it('follow the config by default', () => {
    expect(trainCases({ config: SMALL_GPT }, {}).map(({ config }) => config.model.attention)).toEqual(['dense']);
    expect(trainCases({ config: 'base' }, {}).map(({ config }) => config.model.attention)).toEqual(['nsa']);
    expect(trainCases({ config: SMALL_GPT, attention: 'nsa' }, {}).map(({ config }) => config.model.attention)).toEqual(
      ['nsa'],
    );
    expect(trainCases({ attention: 'nsa' }, {})).toHaveLength(1);
    expect(() => trainCases({ config: 'nothing' }, {})).toThrow('nothing: no such file and no shipped config');
  });
});

describe('measured steps', () => {
  it.each(['nsa', 'dense'] as const)(
    'of %s attention count all micro-batches and give the memory back',
    (attention) => {
      const device = cpu();
      const held = device.pool.bytesInUse;
      const benchCase = smallCase(attention);
      const time = benchTraining(device, benchCase, { least: 3, ms: 0 });
      const { used, palm } = trainingFlops(caseShape(benchCase), [96, 96]);
      expect(time).toMatchObject({ attention, S: 96, batch: 6, steps: 3, flops: { used: 3 * used, palm: 3 * palm } });
      expect(time.kernel).toBe(attention === 'nsa' ? 'v1' : 'tiled');
      expect(time.ms).toBeGreaterThan(0);
      // Values, gradients and both moments of every parameter, at the least.
      expect(time.peakBytes).toBeGreaterThan(4 * 4 * time.params);
      expect(device.pool.bytesInUse).toBe(held);
    },
  );

  it('go on while they fit the budget', () => {
    const { steps, ms } = benchTraining(cpu(), smallCase(), { least: 1, ms: 60 });
    expect(steps).toBeGreaterThanOrEqual(Math.min(2, Math.floor(60 / ms)));
    expect(steps).toBeLessThanOrEqual(100);
  });
});

describe('profile', () => {
  it('sees every kernel of a step, and shares add up', () => {
    const benchCase = smallCase();
    const device = new TimedDevice(cpu(), kernelFlops(caseShape(benchCase), caseLengths(benchCase)));
    let rows: ReturnType<TimedDevice['rows']> = [];
    benchTraining(
      device,
      benchCase,
      { least: 2, ms: 0 },
      {
        onWarm: () => device.restart(),
        onDone: (steps) => {
          rows = device.rows(steps);
        },
      },
    );
    const calls = Object.fromEntries(rows.map((row) => [row.name, row.calls]));
    // Three micro-batches of two layers: five linear layers each, and the head.
    expect(calls).toMatchObject({ linear_forward: 3 * (2 * 5 + 1), window_backward: 6, select_forward: 6 });
    expect(calls['adamw_step']).toBeGreaterThan(0);
    expect(rows.reduce((sum, { share }) => sum + share, 0)).toBeCloseTo(1, 6);
    expect(rows.map(({ ms }) => ms)).toEqual(rows.map(({ ms }) => ms).sort((a, b) => b - a));
    for (const { name, gflops } of rows)
      expect(gflops === null, name).toBe(!/^(linear|window|select_|selected|compressed)/.test(name));
  });

  it('changes no result', () => {
    const values = Float32Array.from({ length: 12 }, (_, i) => i - 5);
    const run = (device: ReturnType<typeof cpu> | TimedDevice) => {
      const tape = new Tape(device);
      const w = tape.watch(tape.from(values, [4, 3]));
      const y = linear(tape, tape.from(values.slice(0, 6), [2, 3]), w);
      tape.backward(add(tape, y, y), new Float32Array(8).fill(1));
      const gradient = [...tape.gradient(w)!.read()];
      tape.end();
      return gradient;
    };
    expect(run(new TimedDevice(cpu(), () => 0))).toEqual(run(cpu()));
  });

  it('counts what a kernel multiplies', () => {
    const flops = kernelFlops(caseShape(smallCase()), [96, 96]);
    expect(flops('linear_forward', [null, null, null, 10, 20, 30, 0])).toBe(2 * 10 * 20 * 30);
    const pairs = 2 * ((96 * 97) / 2) * 4;
    expect(flops('dense_forward', [])).toBe(pairs * 2 * (8 + 8));
    expect(flops('dense_backward', [])).toBe(pairs * 2 * (3 * 8 + 2 * 8));
    expect(flops('adamw_step', [])).toBe(0);
  });

  it('forwards all other calls of a device', () => {
    const device = new TimedDevice(cpu(), () => 0);
    expect([device.kind, device.name, device.pool]).toEqual(['cpu', cpu().name, cpu().pool]);
    expect(device.scratchBytes).toBe(cpu().scratchBytes);
    const from = Tensor.from(device, [1, 2, 3], [3]);
    const to = Tensor.zeros(device, [3]);
    to.copyFrom(from);
    expect([...to.read()]).toEqual([1, 2, 3]);
    const seen = device.rows(1).map(({ name }) => name);
    for (const name of ['(upload)', '(zero)', '(copy)', '(download)', '(host)']) expect(seen).toContain(name);
    device.restart();
    expect(device.rows(1).map(({ name }) => name)).toEqual(['(host)']);
    from.free();
    to.free();
    const missing = defineKernels(import.meta.url, { nothing: [] });
    expect(() => device.kernels(missing)).toThrow();
  });
});
