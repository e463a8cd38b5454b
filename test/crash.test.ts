/**
 * SIGKILL at random moments, some inside a checkpoint write; after each the run is resumed. At the end its losses,
 * evaluations and weights are those of a run that nothing disturbed, bit for bit.
 *
 * A few kills here; TREFOIL_LONG=1 makes it thirty.
 */
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { readCsv, TRAINING_CSV } from '../src/run/csv.js';
import { runPaths } from '../src/run/run-folder.js';
import { ended, startTrefoil, trefoil } from '../src/testing/cli.js';
import { randomNumbers } from '../src/testing/random.js';
import { temporaryFolder, tinyConfig } from '../src/testing/run.js';

const KILLS = process.env['TREFOIL_LONG'] ? 30 : 6;
const SEED = Number(process.env['TREFOIL_SEED'] ?? Math.floor(Math.random() * 1e9));

let folder: { path: string; remove: () => void };
beforeAll(() => {
  folder = temporaryFolder();
});
afterAll(() => folder.remove());

describe(`kill -9 and resume (${KILLS} kills, seed ${SEED})`, () => {
  it('ends with the files of an undisturbed run', async () => {
    // Large enough that a checkpoint takes a while to write, so that kills fall into writes too.
    const overrides = { model: { dim: 96, n_layers: 3 }, train: { steps: 120, eval_every: 10, save_every: 5 } };
    const run = (name: string) => {
      const config = tinyConfig(folder.path, {
        ...overrides,
        train: { ...overrides.train, out_dir: join(folder.path, name) },
      });
      const file = join(folder.path, `${name}.yaml`);
      writeFileSync(file, stringify(config));
      return { config, args: ['train', '--config', file, '--resume', 'auto'] };
    };
    const calm = run('calm');
    const started = performance.now();
    const whole = trefoil(calm.args);
    expect(whole.code, whole.stderr).toBe(0);
    const duration = performance.now() - started;

    const stormy = run('stormy');
    const random = randomNumbers(SEED);
    for (let kill = 0; kill < KILLS; kill++) {
      const child = startTrefoil(stormy.args);
      const timer = setTimeout(() => child.kill('SIGKILL'), duration * (0.15 + 0.75 * random()));
      const { code, signal } = await ended(child);
      clearTimeout(timer);
      expect([`code ${code}`, `signal ${signal}`]).toContain(signal ? 'signal SIGKILL' : 'code 0');
    }
    const last = trefoil(stormy.args);
    expect(last.code, last.stderr).toBe(0);

    const [a, b] = [runPaths(calm.config.train.out_dir), runPaths(stormy.config.train.out_dir)];
    const losses = (path: string) => readCsv(path, TRAINING_CSV).rows.map(({ step, loss, lr }) => ({ step, loss, lr }));
    expect(losses(b.training)).toEqual(losses(a.training));
    expect(readFileSync(b.val, 'utf8')).toBe(readFileSync(a.val, 'utf8'));
    expect(readFileSync(b.model).equals(readFileSync(a.model))).toBe(true);
  }, 900_000);
});
