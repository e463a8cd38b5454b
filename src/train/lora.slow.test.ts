/** `train.lora` in a run: the files it writes, a resume, what it leaves alone, and several ranks. */
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { runCli } from '../cli/testing/run.js';
import { locateModel } from '../infer/load.js';
import { modelLayer } from '../infer/model-layer.js';
import { readCsv, TRAINING_CSV } from '../run/logs/csv.js';
import { runPaths } from '../run/paths.js';
import { openSafetensors, readSafetensors } from '../run/safetensors.js';
import { mpirunAbsence, startLaunch } from '../testing/ranks.js';
import { runTraining, temporaryFolder, tinyConfig } from '../testing/run.js';

let folder: { path: string; remove: () => void };
beforeEach(async () => {
  folder = temporaryFolder();
  await runTraining(
    tinyConfig(folder.path, { train: { steps: 10, eval_every: 0, out_dir: join(folder.path, 'base') } }),
  );
});
afterEach(() => folder.remove());

const STEADY = { lr_schedule: 'constant', warmup_steps: 0, save_every: 3, eval_every: 3, lr: 1e-2 };
const config = (name: string, steps: number, train: object = {}) =>
  tinyConfig(folder.path, {
    train: {
      ...STEADY,
      steps,
      lora: { rank: 2 },
      init_from: join(folder.path, 'base'),
      out_dir: join(folder.path, name),
      ...train,
    },
  });
const adapter = (name: string) => readSafetensors(join(folder.path, name, 'adapter_model.safetensors')).tensors;

describe('a training of adapters', () => {
  it('writes an adapter alone, resumes bit for bit, and leaves the model as it was', async () => {
    const base = join(folder.path, 'base', 'model.safetensors');
    const before = readFileSync(base);
    const { said } = await runTraining(config('whole', 9));
    expect(said.join('\n')).toMatch(/^trained: [\d,]+ of [\d,]+ parameters \(\S+ %\)$/m);
    await runTraining(config('parts', 6));
    await runTraining(config('parts', 9), { resume: 'auto' });
    const [whole, parts] = [adapter('whole'), adapter('parts')];
    expect(whole.size).toBe(2 * 2 * 11); // two layers of 11 linear layers, A and B of each
    for (const [name, { data }] of whole) expect(parts.get(name)!.data, name).toEqual(data);
    expect(readFileSync(base).equals(before)).toBe(true);
    const run = join(folder.path, 'whole');
    expect(existsSync(runPaths(run).model)).toBe(false);
    const saved = openSafetensors(join(run, 'checkpoints', 'step-9', 'model.safetensors'));
    saved.close();
    expect([...saved.entries.keys()].every((name) => /\.lora_[AB]$/.test(name))).toBe(true);
    expect(() => locateModel(run)).toThrow(
      `holds an adapter, not a model; use --model ${join(folder.path, 'base')} --adapter`,
    );
    expect(() => locateModel(join(run, 'checkpoints', 'step-9'))).toThrow('holds an adapter, not a model');
  });

  it('is the same with gradient checkpointing', async () => {
    const plain = await runTraining(config('plain', 3));
    const again = config('again', 3);
    const checkpointed = await runTraining({ ...again, runtime: { ...again.runtime, gradient_checkpointing: true } });
    expect(checkpointed.result.lastLoss).toBe(plain.result.lastLoss);
  });

  it('refuses to go on over other weights, with other settings, and in a file', async () => {
    await runTraining(config('run', 3));
    await expect(runTraining(config('run', 6, { lora: { rank: 3 } }), { resume: 'auto' })).rejects.toThrow(
      /^train\.lora: \{"rank":2,.*\} -> \{"rank":3,.*\} is not allowed on resume/,
    );
    await expect(runTraining(config('other', 3), { save: 'out.safetensors' })).rejects.toThrow(
      '--save out.safetensors: adapters are written as two files; give a folder',
    );
    const longer = { steps: 11, eval_every: 0, out_dir: join(folder.path, 'base') };
    await runTraining(tinyConfig(folder.path, { train: longer }), { resume: 'auto' });
    await expect(runTraining(config('run', 6), { resume: 'auto' })).rejects.toThrow(
      /^train\.init_from: the weights of .*base are not those that this run began with; restore them, or start a new run$/,
    );
  });

  it('takes the shape of its model from --from', () => {
    const keys = modelLayer(join(folder.path, 'base'));
    expect(keys.get('model.dim')).toMatchObject({ value: 32 });
    expect(keys.get('nsa.w')).toMatchObject({ value: 16 });
    expect(keys.get('model.vocab_size')).toMatchObject({ value: 256 });
    expect(keys.get('data.tokenizer')).toMatchObject({ value: 'byte' });
  });

  it('asks for the tokenizer of a model that has none', async () => {
    const text = join(folder.path, 'text.txt');
    writeFileSync(text, 'some words '.repeat(500));
    const model = join(import.meta.dirname, '../../test/golden/hf/llama');
    const words = ['--config', 'lora', '--from', model, '--dataset', 'text', '--local-path', text, '--seq-len', '32'];
    const out = join(folder.path, 'none');
    const { code, stderr } = await runCli(['train', ...words, '--steps', '1', '--out-dir', out]);
    expect(code).toBe(2);
    expect(stderr).toMatch(/^trefoil: data\.tokenizer: ".*llama\/tokenizer\.json" is not one of byte, .*\n$/m);
  });
});

const absence = mpirunAbsence();
if (absence) console.warn(`skipped: ${absence}`);

describe.skipIf(absence)(`on two ranks${absence ? ` (skipped: ${absence})` : ''}`, () => {
  it('trains the same adapters as on one, and the same bits with ZeRO-1', async () => {
    const losses = async (name: string, ranks: number, train: object) => {
      const own = config(name, 6, { batch_size: 2 / ranks, ...train });
      const file = join(folder.path, `${name}.yaml`);
      writeFileSync(file, stringify(own));
      const { ended } = startLaunch(['-n', String(ranks), '--', 'train', '--config', file]);
      const { code, stderr } = await ended;
      expect(code, stderr).toBe(0);
      return readCsv(runPaths(own.train.out_dir).training, TRAINING_CSV).rows.map(({ loss }) => loss);
    };
    const one = await losses('one', 1, {});
    const two = await losses('two', 2, {});
    const sharded = await losses('sharded', 2, { zero: 1 });
    one.forEach((loss, i) => void expect(Math.abs(two[i] - loss)).toBeLessThan(1e-5));
    expect(sharded).toEqual(two);
    const [a, b] = [adapter('two'), adapter('sharded')];
    for (const [name, { data }] of a) expect(b.get(name)!.data, name).toEqual(data);
  }, 300_000);
});
