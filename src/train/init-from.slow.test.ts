/** `train.init_from`: a run that starts from the weights of another model. */
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { runPaths } from '../run/paths.js';
import { readSafetensors } from '../run/safetensors.js';
import { runTraining, type TinyOverrides, temporaryFolder, tinyConfig } from '../testing/run.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

describe('train.init_from', () => {
  const config = (name: string, train: TinyOverrides['train'], model: TinyOverrides['model'] = {}) =>
    tinyConfig(folder.path, { model, train: { out_dir: join(folder.path, name), ...train } });
  const weights = (name: string) => readSafetensors(runPaths(join(folder.path, name)).model).tensors;

  it('starts from the weights of a model', async () => {
    const { result: first } = await runTraining(config('first', { steps: 30 }));
    const from = { init_from: join(folder.path, 'first') };
    const { result: second } = await runTraining(config('second', { steps: 1, seed: 99, lr: 1e-30, ...from }));
    expect(second.firstLoss!).toBeLessThan(first.firstLoss! - 0.3);
    const [before, after] = [weights('first'), weights('second')];
    for (const [name, { data }] of before) expect(after.get(name)!.data, name).toEqual(data);
  });

  it('resumes from its own checkpoint, not from the model again', async () => {
    await runTraining(config('first', { steps: 2 }));
    const steady = { lr_schedule: 'constant', warmup_steps: 0, save_every: 2 };
    const own = { steps: 4, ...steady, init_from: join(folder.path, 'first') };
    await runTraining(config('undisturbed', own));
    await runTraining(config('resumed', { ...own, steps: 2 }));
    const rest = { ...own, init_from: join(folder.path, 'gone') }; // no longer needed
    await runTraining(config('resumed', rest), { resume: 'auto' });
    const resumed = weights('resumed');
    for (const [name, { data }] of weights('undisturbed')) expect(resumed.get(name)!.data, name).toEqual(data);
  });

  it('names what differs, and what is missing', async () => {
    await runTraining(config('first', { steps: 1 }));
    const from = { steps: 1, init_from: join(folder.path, 'first') };
    await expect(runTraining(config('other', from, { n_layers: 1 }))).rejects.toThrow(
      /^train\.init_from: .*first.* is of another shape: model\.n_layers is 1, but 2 there; take the shape from the model with --from$/,
    );
    const none = { steps: 1, init_from: join(folder.path, 'none') };
    await expect(runTraining(config('none-run', none))).rejects.toThrow(
      /^train\.init_from: .*none: there is no such file/,
    );
  });
});
