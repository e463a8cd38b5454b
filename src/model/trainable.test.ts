/** `train.trainable` freezes all other parameters. */
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { runPaths } from '../run/paths.js';
import { openSafetensors, readSafetensors } from '../run/safetensors.js';
import { Tape } from '../tensor/tape.js';
import { Tensor } from '../tensor/tensor.js';
import { cpu, devices } from '../testing/devices.js';
import { runTraining, temporaryFolder, tinyConfig } from '../testing/run.js';
import { LanguageModel } from './language-model.js';
import { modelShape } from './shape.js';
import { trainedParameters } from './trainable.js';

const TOKENS = 48;
const ids = Array.from({ length: TOKENS }, (_, t) => (t * 7 + (t % 5) * 3) % 40);
const targets = ids.map((id) => (id * 3 + 1) % 40);
const PATTERNS: string[][] = [
  ['blocks.1.*'],
  ['*norm'],
  ['embedding'],
  ['norm', 'head'],
  ['*.gate.*'],
  ['*.phi_k.*', '*.mlp.up'],
  ['blocks.0.attention.qkv'],
];

describe.each(devices())('train.trainable on $name', ({ device, dtype }) => {
  const create = (phi: string, checkpointing: boolean) => {
    const model = { dim: 24, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8, mlp: 'swiglu' as const };
    const nsa = { l: 8, d: 4, l_sel: 8, n_sel: 4, w: 12, phi: phi as 'mlp' };
    const runtime = { gradient_checkpointing: checkpointing };
    const config = parseConfig({ model: { ...model, qk_norm: true, mlp_bias: true }, nsa, runtime });
    return new LanguageModel(device(), modelShape(config, 40), 5, dtype);
  };
  const gradients = (model: LanguageModel, checkpointing: boolean) => {
    const tape = new Tape(device());
    const loss = model.loss(tape, tape.from(ids, [TOKENS], 'i32'), tape.from(targets, [TOKENS], 'i32'), {
      lengths: [TOKENS],
      checkpointing,
    });
    tape.backward(loss);
    tape.end();
    return new Map(model.parameters.map(({ name, gradient }) => [name, gradient && Array.from(gradient.read())]));
  };

  it.each([false, true])(
    'has the gradients of a training of all parameters, bit for bit (checkpointing %s)',
    (checkpointing) => {
      const whole = create('mlp', checkpointing);
      const all = gradients(whole, checkpointing);
      whole.free();
      for (const patterns of PATTERNS) {
        const model = create('mlp', checkpointing);
        const before = device().pool.bytesInUse;
        const trained = trainedParameters(model.parameters, {
          train: { ...parseConfig({}).train, trainable: patterns },
        });
        const own = gradients(model, checkpointing);
        const names = new Set(trained.map(({ name }) => name));
        for (const { name } of model.parameters)
          expect(own.get(name), `${patterns}: ${name}`).toEqual(names.has(name) ? all.get(name) : null);
        // Copies in bf16 are no gradients.
        if (dtype === 'f32') {
          const taken = device().pool.bytesInUse - before;
          const same = trained.map(({ value }) => Tensor.empty(device(), value.shape));
          expect(device().pool.bytesInUse - before).toBe(2 * taken);
          for (const tensor of same) tensor.free();
        }
        model.free();
      }
    },
  );
});

describe('a training with train.trainable', () => {
  let folder: { path: string; remove: () => void };
  beforeEach(() => {
    folder = temporaryFolder();
  });
  afterEach(() => folder.remove());
  const TRAINABLE = ['*.gate.*', 'norm'];

  it('leaves the bytes of frozen parameters, keeps no moments of them, and resumes bit for bit', async () => {
    const steady = { lr_schedule: 'constant', warmup_steps: 0, eval_every: 0, save_every: 3, trainable: TRAINABLE };
    const config = (name: string, steps: number, train: object = {}) =>
      tinyConfig(folder.path, { train: { ...steady, steps, out_dir: join(folder.path, name), ...train } });
    await runTraining(config('whole', 6));
    await runTraining(config('parts', 3));
    await runTraining(config('parts', 6), { resume: 'auto' });
    const weights = (name: string) => readSafetensors(runPaths(join(folder.path, name)).model).tensors;
    const after = weights('whole');
    for (const [name, { data }] of weights('parts')) expect(data, name).toEqual(after.get(name)!.data);
    const model = new LanguageModel(cpu(), modelShape(config('start', 1), 256), config('start', 1).train.seed);
    for (const { name, value } of model.parameters) {
      const isTrained = name.includes('.gate.') || name === 'norm';
      expect(Buffer.from(value.readBytes()).equals(after.get(name)!.data), name).toBe(!isTrained);
    }
    model.free();
    const optimizer = openSafetensors(join(folder.path, 'whole', 'checkpoints', 'step-6', 'optimizer.safetensors'));
    optimizer.close();
    const moments = [...optimizer.entries.keys()].map((name) => name.replace(/\.[mv]$/, ''));
    expect(new Set(moments)).toEqual(new Set([...after.keys()].filter((name) => /\.gate\.|^norm$/.test(name))));
    await expect(runTraining(config('parts', 7, { trainable: ['norm'] }), { resume: 'auto' })).rejects.toThrow(
      /^train\.trainable: \["\*\.gate\.\*","norm"\] -> \["norm"\] is not allowed on resume/,
    );
  });

  it('refuses a pattern that names nothing', async () => {
    await expect(runTraining(tinyConfig(folder.path, { train: { trainable: ['gates'] } }))).rejects.toThrow(
      /^train\.trainable: gates names no parameter of this model; names are such as embedding, blocks\.0\.attention_norm, /,
    );
  });
});
