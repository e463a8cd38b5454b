/** The advice after a number that is not finite, followed to the letter. */
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { runCli } from '../cli/testing/run.js';
import { readRun } from '../run/reader.js';
import { runTraining, temporaryFolder, tinyConfig } from '../testing/run.js';
import { adviceFor } from './advice.js';

let folder: ReturnType<typeof temporaryFolder>;
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

/** Each halves the rate; at 8 and below this model trains to its end. */
const TRIES = 8;

/**
 * Where such a training overflows, and from which checkpoint it survives half the rate, depends on every bit: so only the way
 * to the end is judged, which begins at another place for each rate.
 */
it.each([60, 250])('ends a training whose rate is far too high: %d', async (lr) => {
  const train = { lr, grad_clip: 0, warmup_steps: 40, steps: 60, save_every: 5, eval_every: 0, keep_last: 20 };
  const { result } = await runTraining(tinyConfig(folder.path, { train }));
  expect(result.status).toBe('non-finite');
  let { outDir } = result;
  const plain = await runCli(['train', '--config', join(outDir, 'config.yaml'), '--resume', 'auto']);
  expect([plain.code, readRun(outDir).ranks[0].beats.at(-1)!.step]).toEqual([5, result.step + 1]); // the same step again

  let code: number | null = null;
  for (let tries = 1; code !== 0; tries++) {
    expect(tries).toBeLessThanOrEqual(TRIES);
    const advice = adviceFor({ name: 'halted' }, readRun(outDir));
    const words = /npx trefoil (train .+?) \(half the learning rate/.exec(advice)![1].split(' ');
    ({ code } = await runCli(words));
    expect([0, 5]).toContain(code); // never refused
    if (words.includes('--out-dir')) outDir = words[words.indexOf('--out-dir') + 1];
  }
  expect(readRun(outDir).ranks[0].beats.at(-1)).toMatchObject({ step: 60, status: 'done' });
});

it('never names a folder that is there', async () => {
  const train = { lr: 1e30, grad_clip: 0, warmup_steps: 0 };
  for (const name of ['run', 'run-2'])
    await runTraining(tinyConfig(folder.path, { train: { ...train, out_dir: join(folder.path, name) } }));
  const outDir = join(folder.path, 'run');
  expect(adviceFor({ name: 'halted' }, readRun(outDir))).toContain(` --out-dir ${outDir}-3 `);
});
