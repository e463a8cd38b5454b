/**
 * The losses of a deterministic 50-step run against a stored curve, exactly. A change to the curve must be deliberate:
 * run with TREFOIL_UPDATE_CURVE=1 and say in the commit why the numbers moved.
 *
 * Machines with a fused multiply-add give the same bits (docs/explain/determinism.md); others are compared within what rounding
 * can do over 50 steps.
 */
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { formatFloat32, readCsv, TRAINING_CSV } from '../src/run/logs/csv.js';
import { runPaths } from '../src/run/paths.js';
import { root } from '../src/testing/cli.js';
import { runTraining, temporaryFolder, tinyConfig } from '../src/testing/run.js';

const file = join(root, 'test', 'golden', 'loss-curve.json');

function hasFusedProducts(): boolean {
  if (process.arch !== 'x64' || !existsSync('/proc/cpuinfo')) return true;
  return /\bfma\b/.test(readFileSync('/proc/cpuinfo', 'utf8'));
}

let folder: { path: string; remove: () => void };
beforeAll(() => {
  folder = temporaryFolder();
});
afterAll(() => folder.remove());

it('gives the stored losses', async () => {
  const config = tinyConfig(folder.path, {
    model: { n_layers: 3, mlp: 'swiglu' },
    nsa: { phi: 'conv' },
    data: { split_seed: 7 }, // as it was when the curve was stored: the seed of the training
    train: { steps: 50, eval_every: 0, save_every: 0, seed: 7 },
  });
  await runTraining(config);
  const losses = readCsv(runPaths(config.train.out_dir).training, TRAINING_CSV).rows.map(({ loss }) =>
    formatFloat32(loss),
  );
  if (process.env['TREFOIL_UPDATE_CURVE']) writeFileSync(file, `${JSON.stringify({ losses }, null, 2)}\n`);
  const stored = JSON.parse(readFileSync(file, 'utf8')) as { readonly losses: readonly string[] };
  if (hasFusedProducts()) {
    expect(losses).toEqual(stored.losses);
    return;
  }
  console.log('loss curve: this processor has no fused multiply-add: compared within 1e-3');
  for (const [i, loss] of losses.entries())
    expect(Math.abs(Number(loss) - Number(stored.losses[i]))).toBeLessThan(1e-3);
});
