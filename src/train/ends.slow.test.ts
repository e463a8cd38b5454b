import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { OutOfMemory, UsageError } from '../errors.js';
import { tailHeartbeats } from '../run/logs/heartbeat.js';
import { readAnomaly, runPaths } from '../run/paths.js';
import { readJsonFile } from '../run/reader.js';
import { type RunOptions, runTraining, temporaryFolder, tinyConfig } from '../testing/run.js';
import * as trainingData from './training-data.js';

vi.mock(import('./training-data.js'), async (original) => ({ ...(await original()) })); // for spyOn

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

const short = (train: object = {}) =>
  tinyConfig(folder.path, { train: { steps: 4, eval_every: 2, save_every: 2, ...train } });

/** The end as the files tell it. */
function endOf(outDir: string) {
  const paths = runPaths(outDir);
  return {
    beat: tailHeartbeats(paths.heartbeat(0), 1)[0],
    metrics: readJsonFile(paths.metrics),
    anomaly: readAnomaly(outDir),
  };
}

function throwAt(step: number): never {
  throw new TypeError(`nothing here in step ${step}\nsecond line`);
}

describe('the end of a run is in its last heartbeat, metrics.json and .anomaly_type', () => {
  it.each<[string, number, RunOptions]>([
    ['step', 3, { onStep: ({ step }) => step === 3 && throwAt(step) }],
    ['save', 2, { onCheckpoint: ({ step }) => throwAt(step) }],
    ['evaluation', 2, { onEvaluation: ({ step }) => throwAt(step) }],
  ])('an exception in a %s', async (_, step, options) => {
    const config = short();
    await expect(runTraining(config, options)).rejects.toThrow('nothing here');
    const error = `TypeError: nothing here in step ${step}`;
    expect(endOf(config.train.out_dir)).toEqual({
      beat: expect.objectContaining({ msg: 'halt', step, status: 'failed', exit_code: 1, detail: error }),
      metrics: expect.objectContaining({ status: 'failed', exit_code: 1, error, step, steps: 4, device: 'cpu' }),
      anomaly: 'failed',
    });
  });

  it.each<[string, Error, RegExp]>([
    [
      'of V8, with the numbers of the machine',
      new RangeError('Array buffer allocation failed'),
      /^RangeError: Array buffer allocation failed; the process holds \d+ MiB, \d+ MiB of \d+ MiB are free$/,
    ],
    [
      'of a device, with its own',
      new OutOfMemory('out of GPU memory: 9 MiB were requested'),
      /^out of GPU memory: 9 MiB/,
    ],
  ])('out of memory %s', async (_, error, detail) => {
    const config = short();
    const onStep = () => {
      throw error;
    };
    await expect(runTraining(config, { onStep })).rejects.toThrow(error.message);
    expect(endOf(config.train.out_dir)).toEqual({
      beat: expect.objectContaining({ status: 'out-of-memory', exit_code: 1, detail: expect.stringMatching(detail) }),
      metrics: expect.objectContaining({ status: 'out-of-memory', error: expect.stringMatching(detail) }),
      anomaly: 'out_of_memory',
    });
  });

  it('a model that does not fit into memory', async () => {
    // The first tensor alone has 15 TiB, which the system refuses at once.
    const model = { dim: 4096, n_layers: 1, n_heads: 64, n_kv_groups: 2, d_k: 64, d_v: 64 };
    const config = tinyConfig(folder.path, { model, data: { source: 'synthetic', vocab_size: 1_000_000_000 } });
    await expect(runTraining(config)).rejects.toThrow('out of memory');
    expect(endOf(config.train.out_dir)).toMatchObject({
      beat: { status: 'out-of-memory', step: 0 },
      metrics: { status: 'out-of-memory' },
      anomaly: 'out_of_memory',
    });
  });

  it('data that cannot be opened by a resumed run, in place of the former end', async () => {
    const config = short();
    await runTraining(config, { onLine: (line, signals) => line.startsWith('step 0003') && signals.emit('SIGTERM') });
    const nothing = join(folder.path, 'nothing-here');
    const given = { ...config, data: { ...config.data, path: nothing } };
    await expect(runTraining(given, { resume: 'auto' })).rejects.toThrow(nothing);
    const { beat, metrics, anomaly } = endOf(config.train.out_dir);
    const end = { status: 'failed', exit_code: 2 };
    expect(beat).toMatchObject({ ...end, msg: 'halt', step: 3, detail: expect.stringContaining(nothing) });
    expect([metrics, anomaly]).toEqual([{ ...end, error: beat.detail, step: 3 }, 'failed']);
    expect(readFileSync(runPaths(config.train.out_dir).config, 'utf8')).not.toContain(nothing);
  });

  it('data of a new run that cannot be opened: a mistake leaves no folder, an error its end and the config', async () => {
    const config = short();
    const given = { ...config, data: { ...config.data, path: join(folder.path, 'nothing-here') } };
    await expect(runTraining(given)).rejects.toThrow(UsageError);
    expect(existsSync(config.train.out_dir)).toBe(false);
    const spy = vi.spyOn(trainingData, 'openTrainingData').mockRejectedValue(new TypeError('in the opening'));
    await expect(runTraining(config)).rejects.toThrow('in the opening');
    spy.mockRestore();
    const paths = runPaths(config.train.out_dir);
    expect(endOf(config.train.out_dir)).toMatchObject({
      beat: { status: 'failed', step: 0, detail: 'TypeError: in the opening' },
      metrics: { status: 'failed', exit_code: 1 },
      anomaly: 'failed',
    });
    expect([existsSync(paths.config), existsSync(paths.lock)]).toEqual([true, false]);
    await expect(runTraining(config)).resolves.toMatchObject({ result: { status: 'done' } });
  });

  it('a final model that cannot be written', async () => {
    const config = short();
    await expect(runTraining(config, { save: '/proc/nowhere/model.safetensors' })).rejects.toThrow('/proc/nowhere');
    const { beat, metrics } = endOf(config.train.out_dir);
    expect(beat).toMatchObject({ msg: 'halt', status: 'failed', detail: expect.stringContaining('/proc/nowhere') });
    expect(metrics).toMatchObject({ status: 'failed', step: 4, error: beat.detail, exit_code: beat.exit_code });
  });

  it('a loss that is not finite', async () => {
    const config = short({ lr: 1e30, grad_clip: 0, warmup_steps: 0, eval_every: 0 });
    const { result } = await runTraining(config);
    const { beat, metrics, anomaly } = endOf(config.train.out_dir);
    expect(beat).toMatchObject({ msg: 'halt', step: result.step + 1, status: 'non-finite', exit_code: 5 });
    expect(metrics).toMatchObject({ status: 'non-finite', exit_code: 5, error: beat.detail });
    expect(anomaly).toMatch(/^nonfinite_/);
  });

  it('all steps, and a signal, which are no anomalies', async () => {
    const config = short();
    await runTraining(config, { onLine: (line, signals) => line.startsWith('step 0003') && signals.emit('SIGTERM') });
    expect(endOf(config.train.out_dir)).toEqual({
      beat: expect.objectContaining({ msg: 'stop', step: 3, status: 'signalled', exit_code: 4, detail: 'SIGTERM' }),
      metrics: expect.objectContaining({ status: 'signalled', exit_code: 4, error: null }),
      anomaly: undefined,
    });
    await runTraining(config, { resume: 'auto' });
    expect(endOf(config.train.out_dir)).toEqual({
      beat: expect.objectContaining({ msg: 'stop', step: 4, status: 'done', exit_code: 0, detail: 'done' }),
      metrics: expect.objectContaining({ status: 'done', exit_code: 0, error: null }),
      anomaly: undefined,
    });
  });
});
