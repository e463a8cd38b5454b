/** Trainings with `train.scorer_loss`: resume, gradient checkpointing, micro-batches, packed documents, what is recorded. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { readCsv, TRAINING_CSV } from '../run/logs/csv.js';
import { tailHeartbeats } from '../run/logs/heartbeat.js';
import { runPaths } from '../run/paths.js';
import { runTraining, type TinyOverrides, temporaryFolder, tinyConfig } from '../testing/run.js';

let folder: ReturnType<typeof temporaryFolder>;
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

const config = (name: string, overrides: TinyOverrides = {}) =>
  tinyConfig(folder.path, {
    ...overrides,
    nsa: { l: 4, d: 2, l_sel: 4, n_sel: 7, ...overrides.nsa },
    train: {
      steps: 6,
      save_every: 3,
      eval_every: 3,
      scorer_loss: 0.1,
      out_dir: join(folder.path, name),
      ...overrides.train,
    },
  });
const paths = (name: string) => runPaths(join(folder.path, name));
const losses = (name: string) => readCsv(paths(name).training, TRAINING_CSV).rows.map(({ loss }) => loss);
const scorerLosses = (name: string) =>
  tailHeartbeats(paths(name).heartbeat(0), 99)
    .filter(({ msg }) => msg === 'progress')
    .map(({ scorer_loss }) => scorer_loss as number);

it('changes the training, is recorded by layer, and resumes bit for bit', async () => {
  await runTraining(config('without', { train: { scorer_loss: 0 } }));
  await runTraining(config('whole'));
  expect(losses('whole')).not.toEqual(losses('without'));
  expect(scorerLosses('without').every((loss) => loss === undefined)).toBe(true);
  expect(Math.min(...scorerLosses('whole'))).toBeGreaterThan(0);
  const [line] = readFileSync(paths('whole').attention, 'utf8').trim().split('\n');
  const { scorer_loss: byLayer } = JSON.parse(line);
  expect(byLayer).toHaveLength(config('whole').model.n_layers);
  const { coverage, coverage_forced: forced, coverage_best: best } = JSON.parse(line);
  expect(coverage).toHaveLength(byLayer.length);
  coverage.forEach((share: number, i: number) => {
    expect(share).toBeGreaterThan(forced[i]);
    expect(share).toBeLessThanOrEqual(best[i]);
  });

  const isFourth = (said: string) => said.startsWith('step 0004');
  await runTraining(config('broken'), { onLine: (said, signals) => isFourth(said) && signals.emit('SIGTERM') });
  await runTraining(config('broken'), { resume: 'auto' });
  expect(losses('broken')).toEqual(losses('whole'));
});

it('gives the same bits with gradient checkpointing', async () => {
  await runTraining(config('whole'));
  await runTraining(config('checkpointed', { runtime: { gradient_checkpointing: true } }));
  expect(losses('checkpointed')).toEqual(losses('whole'));
  expect(scorerLosses('checkpointed')).toEqual(scorerLosses('whole'));
});

it('counts micro-batches by their targets: two sequences in one batch, or one after the other', async () => {
  await runTraining(config('together'));
  await runTraining(config('apart', { train: { batch_size: 1, accumulate_grad_batches: 2 } }));
  losses('together').forEach((loss, i) => {
    expect(Math.abs(loss! - losses('apart')[i]!)).toBeLessThan(1e-4);
  });
});

it('keeps packed documents apart, in one batch or in micro-batches', async () => {
  // Documents of 700 to 800 bytes in rows of 1,024: most rows hold a part of two, and each chooses among its own blocks.
  const train = { seq_len: 1024, steps: 3, save_every: 0, eval_every: 0 };
  await runTraining(config('masked', { data: { document_mask: true }, train }));
  await runTraining(config('joined', { data: { document_mask: false }, train }));
  for (const name of ['masked', 'joined']) expect(Math.min(...scorerLosses(name))).toBeGreaterThan(0);
  expect(scorerLosses('masked')[0]).not.toBe(scorerLosses('joined')[0]);
  await runTraining(
    config('apart', { data: { document_mask: true }, train: { ...train, batch_size: 1, accumulate_grad_batches: 2 } }),
  );
  losses('masked').forEach((loss, i) => {
    expect(Math.abs(loss! - losses('apart')[i]!)).toBeLessThan(1e-4);
  });
});

it('names what it does not go with', () => {
  const problem = (overrides: object) => () => parseConfig({ train: { scorer_loss: 0.1 }, ...overrides });
  expect(problem({ model: { attention: 'dense' } })).not.toThrow(); // no effect, as the keys of nsa
  expect(problem({ nsa: { score_pool: 'max' } })).toThrow('train.scorer_loss: 0.1 needs nsa.score_pool sum');
  expect(problem({ runtime: { reference_kernels: true } })).toThrow('train.scorer_loss: 0.1 is not computed by');
});
