/**
 * The config that `train` chooses on a machine with a GPU, tested with a GPU that computes nothing
 * (src/testing/idle-gpu.ts).
 */
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { runPaths } from '../src/run/paths.js';
import { trefoil } from '../src/testing/cli.js';
import { describeUnless } from '../src/testing/devices.js';
import { buildIdleGpu, type IdleGpu, idleGpuAbsence } from '../src/testing/idle-gpu.js';
import { temporaryFolder, tinyConfig } from '../src/testing/run.js';

const absence = idleGpuAbsence();

let gpu: IdleGpu;
let folder: { path: string; remove: () => void };
beforeAll(() => {
  if (absence) return;
  gpu = buildIdleGpu();
  folder = temporaryFolder();
});
afterAll(() => {
  gpu?.remove();
  folder?.remove();
});

describeUnless(absence, 'train on a machine with a GPU', () => {
  it.each([
    ['141', [], '125m_80g'],
    ['40', [], '125m_40g'],
    ['24', [], '125m_24g'],
    ['141', ['--device', 'cpu'], 'quickstart'],
  ])('without --config and with %s GiB and %j takes %s', async (gib, words, name) => {
    const run = await trefoil(['train', '--print-config', '--json', ...words], {
      env: { ...gpu.env, IDLE_GPU_GIB: gib },
    });
    expect(run.code, run.stderr).toBe(0);
    const rows = JSON.parse(run.stdout) as { key: string; origin: string }[];
    expect(rows.find(({ key }) => key === 'model.dim')!.origin).toContain(`${name}.yaml`);
  });

  it('launch starts one process per GPU, with the config that they take', async () => {
    const run = await trefoil(['launch', '-n', '1', '--', 'train', '--print-config', '--json'], {
      env: { ...gpu.env, IDLE_GPU_GIB: '141' },
    });
    expect(run).toMatchObject({ code: 0, stderr: 'launch: starting 1 rank\n' });
    expect(run.stdout).toContain('125m_80g.yaml');
  });

  it.each(['bf16', 'fp32'])('metrics.json has the precision of the run: %s', async (precision) => {
    const config = tinyConfig(folder.path, {
      runtime: { device: 'cuda', precision },
      train: { steps: 1, eval_every: 0, save_every: 0, out_dir: join(folder.path, precision) },
    });
    const file = join(folder.path, `${precision}.yaml`);
    writeFileSync(file, stringify(config));
    const run = await trefoil(['train', '--config', file], { env: gpu.env });
    expect(run.code, run.stderr).toBe(0);
    const metrics = JSON.parse(readFileSync(runPaths(config.train.out_dir).metrics, 'utf8'));
    expect(metrics).toMatchObject({ device: 'cuda', dtype: precision });
  });
});
