/** Needles from training to measuring: the source in a run, exact resume across the stages, and the shipped small recipe. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { needleVocabulary } from '../src/data/synthetic/needle.js';
import { runPaths } from '../src/run/paths.js';
import { trefoil } from '../src/testing/cli.js';
import { runTraining, temporaryFolder, tinyConfig } from '../src/testing/run.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

const NEEDLE = { source: 'needle', vocab_size: 16, needle_records: 2, needle_facts: 2, needle_questions: 4 };

/** The loss of every step. */
async function losses(name: string, steps: number, resume: string | null = null): Promise<number[]> {
  const config = tinyConfig(folder.path, {
    data: { ...NEEDLE, needle_curriculum: '32:4,32+64:12' },
    train: {
      steps: 9,
      seq_len: 128,
      batch_size: 2,
      lr_schedule: 'constant',
      save_every: 1,
      keep_last: 9,
      eval_every: 0,
      out_dir: join(folder.path, name),
    },
  });
  const seen: number[] = [];
  const stop = { aborted: false };
  await runTraining(config, {
    resume,
    signal: stop,
    onStep: ({ loss, step }) => {
      seen.push(loss);
      stop.aborted = step === steps;
    },
  });
  return seen;
}

describe('training on needles', () => {
  it('goes on bit for bit after a stop, before and after a change of stage', async () => {
    const whole = await losses('whole', 9);
    expect(whole).toHaveLength(9);
    for (const cut of [1, 2, 5, 6]) {
      const first = await losses(`cut-${cut}`, cut);
      const rest = await losses(`cut-${cut}`, 9, 'auto');
      expect([...first, ...rest]).toEqual(whole);
    }
  });

  it('learns to answer from the context: better than anything that does not read it', async () => {
    const config = tinyConfig(folder.path, {
      data: { ...NEEDLE, val_fraction: 0.1 },
      nsa: { w: 4 },
      train: {
        steps: 150,
        seq_len: 32,
        batch_size: 32,
        lr: 1e-2,
        warmup_steps: 10,
        lr_schedule: 'constant',
        betas: [0.9, 0.98],
        eval_every: 150,
        eval_batches: 8,
        save_every: 0,
        log_every: 50,
      },
    });
    const { result } = await runTraining(config);
    // Values are uniform: no model gets below this without the context.
    const blind = Math.log(16 - needleVocabulary(16).values);
    expect(result.valLoss).toBeLessThan(blind - 0.1);
  });
});

it('the recipe for the CPU trains in one run with the scorer loss, resumes, and eval needle measures it', async () => {
  const run = join(folder.path, 'run');
  const train = async (...words: string[]) => {
    const trained = await trefoil(['train', '--config', 'needle_cpu', '--out-dir', run, '--json', ...words]);
    expect(trained.code, trained.stderr).toBe(0);
    return JSON.parse(trained.stdout);
  };
  const quick = ['--set', 'train.warmup_steps=5'];
  const { first_loss: first, last_loss: last } = await train(...quick, '--steps', '20');
  // From guessing among all tokens to guessing among the values and nothing, which is the answer to a quarter of the questions.
  expect(first).toBeGreaterThan(Math.log(128) - 0.3);
  const guess = 0.25 * Math.log(4) + 0.75 * (Math.log(4 / 3) + Math.log(8));
  expect(last).toBeLessThan(guess + 0.7);
  expect(await train(...quick, '--resume', 'auto', '--steps', '24')).toMatchObject({ step: 24 });
  const beats = readFileSync(runPaths(run).heartbeat(0), 'utf8').trim().split('\n');
  expect(beats.some((line) => JSON.parse(line).scorer_loss > 0)).toBe(true);
  const measured = await trefoil([
    ...['eval', 'needle', '--model', run, '--lengths', '64,512', '--depths', '0,100', '--trials', '4'],
    ...['--records', '3', '--facts', '2', '--without', 'sel', '--device', 'cpu', '--json'],
  ]);
  expect(measured.code, measured.stderr).toBe(0);
  expect(JSON.parse(measured.stdout).rows).toHaveLength(8);
});
