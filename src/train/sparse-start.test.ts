/** The schedule from dense to sparse attention: what follows from a step, and a run that is resumed in the middle of it. */
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { convertToSparse } from '../exchange/convert.js';
import { loadModel, locateModel } from '../infer/load.js';
import { CLOSED_LOGIT, releasedLogit, releasedShare, selectedBlocks } from '../model/sparse-start.js';
import { readHeartbeats } from '../run/logs/heartbeat.js';
import { runPaths } from '../run/paths.js';
import { readSafetensors } from '../run/safetensors.js';
import { toFloat64 } from '../run/safetensors-format.js';
import { cpu } from '../testing/devices.js';
import { runTraining, type TinyOverrides, temporaryFolder, tinyConfig } from '../testing/run.js';

describe('the schedule', () => {
  const scheduled = (train: object, nSel = 16) => parseConfig({ nsa: { n_sel: nSel }, train });

  it('halves the blocks at equal intervals', () => {
    const config = scheduled({ n_sel_from: 64, n_sel_steps: 10 });
    const blocks = Array.from({ length: 13 }, (_, step) => selectedBlocks(config, step));
    expect(blocks).toEqual([64, 64, 64, 64, 64, 64, 32, 32, 32, 32, 32, 16, 16]);
    const odd = scheduled({ n_sel_from: 100, n_sel_steps: 3 });
    expect([1, 2, 3, 4].map((step) => selectedBlocks(odd, step))).toEqual([100, 50, 25, 16]);
    expect(selectedBlocks(scheduled({}), 1)).toBe(16);
    expect(selectedBlocks(scheduled({ n_sel_from: 16, n_sel_steps: 4 }), 2)).toBe(16);
  });

  it('gives the other branches their share in equal parts', () => {
    const config = scheduled({ gate_release_steps: 4, gate_release_share: 0.5 });
    expect([0, 1, 2, 4, 9].map((step) => releasedShare(config, step))).toEqual([0, 0.125, 0.25, 0.5, 0.5]);
    expect(releasedLogit(config, 0)).toBe(CLOSED_LOGIT);
    for (const step of [1, 2, 4]) {
      const weight = Math.exp(releasedLogit(config, step));
      expect((2 * weight) / (1 + 2 * weight)).toBeCloseTo(releasedShare(config, step), 12);
    }
  });
});

describe('training a converted model', () => {
  let folder: { path: string; remove: () => void };
  let sparse: string;
  const dense = { attention: 'dense', mlp: 'swiglu' };
  const steady = { lr_schedule: 'constant', warmup_steps: 0, eval_every: 2, save_every: 3, steps: 6 };
  const config = (name: string, train: TinyOverrides['train'] = {}, nsa: TinyOverrides['nsa'] = {}) =>
    tinyConfig(folder.path, {
      model: { ...dense, attention: 'nsa' },
      nsa: { n_sel: 3, cmp_rope: 'before', ...nsa },
      train: { ...steady, init_from: sparse, out_dir: join(folder.path, name), ...train },
    });
  const schedule = { gate_release_steps: 4, gate_release_share: 0.5, n_sel_from: 8, n_sel_steps: 4 };
  const weights = (path: string) => readSafetensors(runPaths(path).model).tensors;
  let firstDense: number;

  beforeAll(async () => {
    folder = temporaryFolder();
    const train = { ...steady, steps: 20, out_dir: join(folder.path, 'dense') };
    await runTraining(tinyConfig(folder.path, { model: dense, train }));
    sparse = join(folder.path, 'sparse');
    const located = locateModel(join(folder.path, 'dense'));
    convertToSparse(located, sparse, { nsa: { n_sel: 8 } });
    located.weights.close();
    const again = { ...steady, steps: 1, init_from: join(folder.path, 'dense'), out_dir: join(folder.path, 'again') };
    firstDense = (await runTraining(tinyConfig(folder.path, { model: dense, train: again }))).result.firstLoss!;
  });
  afterAll(() => folder.remove());

  it('starts dense and ends sparse, and a resumed run has the same bits', async () => {
    const { result, said } = await runTraining(config('whole', { ...schedule, gate_release_share: 0.5 }));
    // At step 1 an eighth of the weight is released; the loss is still near that of the dense model.
    expect(Math.abs(result.firstLoss! - firstDense)).toBeLessThan(0.2);
    const lines = said.filter((line) => line.startsWith('step '));
    expect(lines[0]).toMatch(/\| n_sel 8 \| gate_released 12\.5%$/);
    expect(lines[2]).toMatch(/\| n_sel 4 \| gate_released 37\.5%$/);
    expect(lines[4]).not.toContain('n_sel'); // the schedule is over
    const whole = join(folder.path, 'whole');
    const beats = [...readHeartbeats(runPaths(whole).heartbeat(0))].filter(({ msg }) => msg === 'progress');
    expect(beats.map(({ n_sel: count }) => count)).toEqual([8, 8, 4, 4, undefined, undefined]);
    expect(beats[5].gate_branch_shares![1]).toBeLessThan(0.6);

    await runTraining(config('parts', { ...schedule, steps: 3 }));
    const parts = join(folder.path, 'parts');
    // A checkpoint and a final model in the middle of the schedule are models of their own number of blocks.
    for (const path of [parts, join(parts, 'checkpoints', 'step-3')]) {
      using loaded = loadModel(cpu(), path);
      expect([loaded.model.shape.nsa.nSel, loaded.config.nsa.n_sel]).toEqual([4, 4]);
    }
    await runTraining(config('parts', schedule), { resume: 'auto' });
    const resumed = weights(parts);
    for (const [name, { data }] of weights(whole)) expect(resumed.get(name)!.data, name).toEqual(data);
    using loaded = loadModel(cpu(), parts);
    expect(loaded.config.nsa.n_sel).toBe(3);
  });

  it('adds to the bias exactly what the schedule says', async () => {
    // A rate so small that training changes nothing.
    await runTraining(config('still', { ...schedule, lr: 1e-30, steps: 4 }));
    const bias = toFloat64(weights(join(folder.path, 'still')).get('blocks.1.attention.gate.bias')!);
    const expected = Math.log(0.5);
    bias.forEach((value, i) => void expect(Math.abs(value - (i % 3 === 1 ? 0 : expected))).toBeLessThan(1e-5));
  });

  it('without a schedule stays equal to the dense model', async () => {
    const still = { lr: 1e-30, steps: 1, n_sel_from: 8, n_sel_steps: 1 };
    const { result } = await runTraining(config('closed', still));
    expect(Math.abs(result.firstLoss! - firstDense)).toBeLessThan(1e-5);
  });

  it('refuses gates that are open, and another schedule on resume', async () => {
    const open = { ...schedule, init_from: join(folder.path, 'whole') };
    await expect(runTraining(config('open', open))).rejects.toThrow(
      /^train\.gate_release_steps: the gates of .*whole are open already; start from a model that trefoil convert/,
    );
    await expect(runTraining(config('new', { ...schedule, init_from: null }))).rejects.toThrow(
      'train.gate_release_steps: the gates of a new model are open already',
    );
    await expect(
      runTraining(config('parts', { ...schedule, gate_release_steps: 9 }), { resume: 'auto' }),
    ).rejects.toThrow('train.gate_release_steps: 4 -> 9 is not allowed on resume; keep 4');
  });
});
