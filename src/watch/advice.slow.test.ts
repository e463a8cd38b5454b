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

/** A rate that is far too high: its gradients overflow before the warm-up has ended. */
const trained = async (lr: number) => {
  const train = { lr, grad_clip: 0, warmup_steps: 40, steps: 60, save_every: 5, eval_every: 0, keep_last: 20 };
  const { result } = await runTraining(tinyConfig(folder.path, { train }));
  expect(result.status).toBe('non-finite');
  return result;
};

/** Does what the advice says; the exit code. */
async function follow(outDir: string): Promise<number> {
  const advice = adviceFor({ name: 'halted' }, readRun(outDir));
  const words = /npx trefoil (train .+?) \(half the learning rate/.exec(advice)![1].split(' ');
  return (await runCli(words)).code;
}

it('gets past a step which a plain resume meets again', async () => {
  const { outDir, step } = await trained(150);
  const again = await runCli(['train', '--config', join(outDir, 'config.yaml'), '--resume', 'auto']);
  expect([again.code, readRun(outDir).ranks[0].beats.at(-1)!.step]).toEqual([5, step + 1]);
  expect(await follow(outDir)).toBe(0);
  expect(readRun(outDir).ranks[0].beats.at(-1)).toMatchObject({ step: 60, status: 'done' });
});

it('goes to an earlier checkpoint each time that a resume with half the rate fails too', async () => {
  const { outDir } = await trained(250);
  let code: number | null = null;
  for (let tries = 0; tries < 8 && code !== 0; tries++) code = await follow(outDir);
  expect(code).toBe(0);
});
