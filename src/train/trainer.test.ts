import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { TrefoilError } from '../errors.js';
import { LanguageModel } from '../model/language-model.js';
import { modelShape } from '../model/shape.js';
import { AdamW } from '../ops/adamw/op.js';
import { Muon } from '../ops/muon/op.js';
import { cpu } from '../testing/devices.js';
import { runTraining, temporaryFolder, tinyConfig } from '../testing/run.js';
import { NonFiniteStep, SourceFailed } from './anomalies.js';
import type { TokenBatch } from './iterable-loader.js';
import { learningRate } from './schedule.js';
import { HostStepper, type StepContext, type Stepper } from './step.js';
import { detectSpike, Trainer, type TrainerOptions } from './trainer.js';

let folder: { path: string; remove: () => void };
const cleanups: (() => void)[] = [];
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => {
  for (const cleanup of cleanups.splice(0).reverse()) cleanup();
  folder.remove();
});

const LENGTH = 32;
const config = parseConfig({
  model: { dim: 32, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8, mlp_ratio: 2 },
  nsa: { l: 8, d: 4, l_sel: 16, n_sel: 4, w: 16 },
  train: { steps: 40, seq_len: LENGTH, lr: 3e-3, warmup_steps: 2 },
});

/** Batch `k` of an endless text that counts upwards: easy to learn. */
function batchAt(k: number): TokenBatch {
  const tokens = Int32Array.from({ length: LENGTH + 1 }, (_, i) => (7 * k + i) % 16);
  return { inputs: tokens.slice(0, LENGTH), targets: tokens.slice(1), cuSeqlens: Int32Array.of(0, LENGTH) };
}

async function* batches(count = Number.POSITIVE_INFINITY): AsyncGenerator<TokenBatch> {
  for (let k = 0; k < count; k++) yield batchAt(k);
}

function newModel(seed = 1): LanguageModel {
  const model = new LanguageModel(cpu(), modelShape(config, 16), seed);
  cleanups.push(() => model.free());
  return model;
}

function newTrainer(options: Partial<TrainerOptions> = {}): Trainer {
  const trainer = new Trainer({ model: newModel(), data: batches(), config, ...options });
  cleanups.push(() => trainer.free());
  return trainer;
}

async function losses(trainer: Trainer, count = Number.POSITIVE_INFINITY): Promise<number[]> {
  const all: number[] = [];
  for await (const { loss } of trainer) if (all.push(loss) >= count) break;
  return all;
}

describe('Trainer', () => {
  it('trains on any iterable of batches, and the loss falls', async () => {
    const trained = await losses(newTrainer());
    expect(trained).toHaveLength(40);
    expect(trained[0]).toBeGreaterThan(2.5);
    expect(trained.at(-1)!).toBeLessThan(trained[0] - 1);
    const plain = Array.from({ length: 40 }, (_, k) => batchAt(k));
    expect(await losses(newTrainer({ data: plain }))).toEqual(trained);
  });

  it('ends with the data, and without a config trains until then', async () => {
    expect(await losses(newTrainer({ data: batches(3) }))).toHaveLength(3);
    const trainer = new Trainer({ model: newModel(), data: batches(5) });
    cleanups.push(() => trainer.free());
    expect(trainer.steps).toBe(Number.POSITIVE_INFINITY);
    const steps = [];
    for await (const step of trainer) steps.push(step);
    expect(steps.map(({ step }) => step)).toEqual([1, 2, 3, 4, 5]);
    expect(steps.map(({ learningRate }) => learningRate)).toEqual(Array(5).fill(parseConfig({}).train.lr));
  });

  it('gives the losses of train for the same config', async () => {
    const run = tinyConfig(folder.path, { train: { steps: 6, eval_every: 0, save_every: 0 } });
    const recorded: number[] = [];
    await runTraining(run, { onStep: ({ loss }) => recorded.push(loss) });
    const model = new LanguageModel(cpu(), modelShape(run, 256), run.train.seed);
    cleanups.push(() => model.free());
    const trainer = new Trainer({ model, data: run });
    cleanups.push(() => trainer.free());
    expect(await losses(trainer)).toEqual(recorded);
    expect((await trainer.evaluate()).loss).toBeGreaterThan(0);
  });

  it('continues after a break, and resumes from a checkpoint bit for bit', async () => {
    const whole = await losses(newTrainer(), 10);
    const first = newTrainer();
    const before = await losses(first, 4);
    const { path } = await first.save(folder.path);
    expect([...before, ...(await losses(first, 6))]).toEqual(whole);
    for (const which of ['auto', path]) {
      const second = newTrainer({ model: newModel(2) });
      expect(await second.resume(folder.path, which)).toBe(4);
      expect(second.progress).toMatchObject({ step: 4, firstLoss: whole[0], lastLoss: whole[3] });
      expect(await losses(second, 6)).toEqual(whole.slice(4));
    }
    expect(await newTrainer().resume(join(folder.path, 'empty'))).toBeNull();
  });

  it('trains with Muon, resumes bit for bit, and refuses a checkpoint of another optimizer', async () => {
    const muon = { ...config, train: { ...config.train, optimizer: 'muon' as const } };
    const whole = await losses(newTrainer({ config: muon }));
    expect(whole.at(-1)!).toBeLessThan(whole[0] - 1);
    const first = newTrainer({ config: muon });
    expect(first.optimizer).toBeInstanceOf(Muon);
    await losses(first, 4);
    const { path } = await first.save(folder.path);
    const second = newTrainer({ model: newModel(2), config: muon });
    expect(await second.resume(folder.path)).toBe(4);
    expect(await losses(second, 6)).toEqual(whole.slice(4, 10));
    // By the config, and by an optimizer that the caller passes beside a config that says nothing of it.
    await expect(newTrainer().resume(folder.path)).rejects.toThrow('train.optimizer: "muon" -> "adamw" is not allowed');
    const model = newModel();
    const optimizer = new AdamW(
      cpu(),
      model.parameters.map((parameter) => ({ parameter, weightDecay: 0 })),
    );
    cleanups.push(() => optimizer.free());
    const third = newTrainer({ model, config: muon, optimizer });
    await expect(third.resume(folder.path)).rejects.toThrow(
      `${path}: was saved with the optimizer muon, this training uses adamw; set train.optimizer muon`,
    );
  });

  it('takes back the batches of a step that could not be completed', async () => {
    const accumulating = parseConfig({ ...config, train: { ...config.train, accumulate_grad_batches: 2 } });
    const trainer = newTrainer({ data: batches(5), config: accumulating });
    expect(await losses(trainer)).toHaveLength(2);
    expect(trainer.loader.state()).toEqual({ kind: 'iterable', batches: 4 });
  });

  it('evaluates on batches, and refuses without any', async () => {
    const trainer = newTrainer();
    const held = [batchAt(1000), batchAt(1001)];
    const before = await trainer.evaluate(held);
    expect(before).toMatchObject({ targets: 2 * LENGTH, perplexity: Math.exp(before.loss) });
    await losses(trainer);
    expect((await trainer.evaluate(held)).loss).toBeLessThan(before.loss - 1);
    await expect(trainer.evaluate()).rejects.toThrow('no validation data');
  });

  it('takes a schedule, a loss and a step of the caller', async () => {
    const rates: number[] = [];
    const schedule = (step: number) => step / 1000;
    for await (const { step, learningRate } of newTrainer({ schedule })) {
      rates.push(learningRate);
      if (step === 3) break;
    }
    expect(rates).toEqual([0.001, 0.002, 0.003]);

    const model = newModel();
    let calls = 0;
    const own = newTrainer({
      model,
      loss: (tape, { ids, targets }, options) => {
        calls += 1;
        return model.loss(tape, ids, targets, options);
      },
    });
    expect(await losses(own, 2)).toEqual(await losses(newTrainer(), 2));
    expect(calls).toBe(2);
    expect((await own.evaluate([batchAt(9)])).targets).toBe(LENGTH);
    expect(calls).toBe(3);

    let updates = 0;
    const counting = newTrainer({
      stepper: (context): Stepper => {
        const inner = new HostStepper(context);
        return {
          launch: (inputs) => inner.launch({ ...inputs, learningRate: 0 }),
          read: () => inner.read(),
          update: () => {
            updates += 1;
            inner.update();
          },
          free: () => inner.free(),
        };
      },
    });
    const stuck = await losses(counting, 5);
    expect(updates).toBe(5);
    expect((await counting.evaluate([batchAt(0)])).loss).toBeCloseTo(stuck[0], 5); // a rate of 0 learns nothing

    const stepper = (context: StepContext): Stepper => {
      const inner = new HostStepper(context);
      return { launch: (inputs) => inner.launch(inputs), read: () => inner.read(), update: null, free: () => {} };
    };
    const unchanged = await losses(newTrainer({ stepper }), 2);
    expect(unchanged).toEqual(await losses(newTrainer({ schedule: () => 0 }), 2));
    expect(() => newTrainer({ stepper, config: { ...config, train: { ...config.train, spike_skip: true } } })).toThrow(
      'cannot reject a step',
    );
  });

  it('throws at a non-finite loss without changing anything, and at a source that fails', async () => {
    const model = newModel();
    const loss: TrainerOptions['loss'] = (tape, { ids, targets }, options) => {
      const mean = model.loss(tape, ids, targets, options);
      mean.write([Number.NaN]);
      return mean;
    };
    const trainer = newTrainer({ model, loss });
    const weights = model.parameters.map(({ value }) => value.read());
    await expect(trainer.step()).rejects.toThrow(NonFiniteStep);
    expect(trainer.progress.step).toBe(0);
    expect(model.parameters.map(({ value }) => value.read())).toEqual(weights);

    const dead = newTrainer().loader;
    Object.assign(dead, { ready: () => Promise.reject(new TrefoilError('the source gave up')) });
    await expect(newTrainer({ data: dead }).step()).rejects.toThrow(SourceFailed);
  });
});

/** A schedule that decays. */
const base = {
  steps: 100,
  lr: 1,
  lr_min_ratio: 0.1,
  lr_schedule: 'cosine',
  warmup_steps: 10,
  wsd_decay_fraction: 0.2,
} as const;

describe('learning rate', () => {
  it('warms up linearly to the peak at the last warm-up step', () => {
    expect(learningRate(1, base)).toBeCloseTo(0.1);
    expect(learningRate(10, base)).toBe(1);
  });

  it.each(['cosine', 'linear', 'wsd'] as const)(
    '%s falls to the floor at exactly the last step, never below',
    (lr_schedule) => {
      const rates = Array.from({ length: 100 }, (_, i) => learningRate(i + 1, { ...base, lr_schedule }));
      expect(rates[99]).toBeCloseTo(0.1);
      expect(rates[98]).toBeGreaterThan(0.1);
      expect(Math.min(...rates.slice(10))).toBeCloseTo(0.1);
      for (let i = 10; i < 100; i++) expect(rates[i]).toBeLessThanOrEqual(rates[i - 1]);
    },
  );

  it('wsd stays at the peak until the decay', () => {
    expect(learningRate(82, { ...base, lr_schedule: 'wsd' })).toBeCloseTo(1, 12);
    expect(learningRate(91, { ...base, lr_schedule: 'wsd' })).toBeCloseTo(0.55);
  });

  it('constant stays', () => {
    expect(learningRate(100, { ...base, lr_schedule: 'constant' })).toBe(1);
  });

  it('cosine passes the middle half-way', () => {
    expect(learningRate(55, base)).toBeCloseTo(0.55);
  });

  it('never lets a long warm-up take more than half of a short run', () => {
    const short = { ...base, steps: 20, warmup_steps: 2000 };
    expect(learningRate(10, short)).toBe(1);
    expect(learningRate(20, short)).toBeCloseTo(0.1);
    expect(learningRate(1, { ...base, steps: 1 })).toBeCloseTo(0.1);
  });
});

describe('spike detection', () => {
  it('begins after the warm-up of the learning rate', async () => {
    const jumps = (at: number) =>
      async function* (): AsyncGenerator<TokenBatch> {
        for (let k = 0; k < 60; k++)
          yield k === at ? { ...batchAt(k), targets: batchAt(k).targets.map((id) => 15 - id) } : batchAt(k);
      };
    const slow = { ...config, train: { ...config.train, steps: 60, warmup_steps: 28, spike_z: 4 } };
    const spikesOf = async (at: number, trained: typeof config) => {
      const found: number[] = [];
      for await (const { step, spike } of newTrainer({ data: jumps(at)(), config: trained }))
        if (spike) found.push(step);
      return found;
    };
    expect(await spikesOf(24, slow)).not.toContain(25);
    expect(await spikesOf(24, { ...slow, train: { ...slow.train, warmup_steps: 0 } })).toContain(25);
    expect(await spikesOf(54, slow)).toContain(55);
  });

  const values = Array.from({ length: 60 }, (_, i) => 3 + Math.sin(i) * 0.1);

  const noSpikes = () => ({
    loss: { count: 0, mean: 0, variance: 0 },
    gradient: { count: 0, mean: 0, variance: 0 },
  });

  /** Adds steps with these losses; returns the z-score of the last one. */
  function scoreOfLast(losses: readonly number[], spikes = noSpikes()): number {
    const [last] = losses.map((loss) => detectSpike(spikes, { loss, norm: 1 }, Number.NEGATIVE_INFINITY)).slice(-1);
    return last!.loss;
  }

  it('scores 0 until it has seen enough values', () => {
    expect(scoreOfLast([...values.slice(0, 10), 1000])).toBe(0);
  });

  it('scores a value in standard deviations above the running mean', () => {
    expect(Math.abs(scoreOfLast([...values, 3]))).toBeLessThan(1);
    expect(scoreOfLast([...values, 3 + 0.1 * 7])).toBeGreaterThan(6);
    expect(scoreOfLast([...values, 1])).toBeLessThan(-6);
  });

  it('reports a step from the threshold on', () => {
    const detected = (threshold: number) => {
      const spikes = noSpikes();
      return [...values, 3 + 0.1 * 7].map((loss) => detectSpike(spikes, { loss, norm: 1 }, threshold) !== null);
    };
    expect(detected(6)).toEqual([...values.map(() => false), true]);
    expect(detected(100)).not.toContain(true);
  });

  it('gives the same scores after a restore', () => {
    const spikes = noSpikes();
    scoreOfLast(values.slice(0, 30), spikes);
    const restored = JSON.parse(JSON.stringify(spikes));
    expect(scoreOfLast([...values.slice(30), 5], restored)).toBe(scoreOfLast([...values, 5]));
  });
});
