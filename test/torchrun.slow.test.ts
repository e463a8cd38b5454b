/**
 * deploy/torchrun.sh with the real torchrun, where there is one: two ranks on a GPU that computes nothing (idle-gpu.cpp), one
 * of which is killed or stopped. torchrun starts both again and they go on from their checkpoint.
 */
import { spawnSync } from 'node:child_process';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { processState } from '../src/process-identity.js';
import { readSection, tailHeartbeats } from '../src/run/logs/heartbeat.js';
import { runPaths } from '../src/run/paths.js';
import { ended, root, startProgram, trefoilMain } from '../src/testing/cli.js';
import { buildIdleGpu, type IdleGpu, idleGpuAbsence } from '../src/testing/idle-gpu.js';
import { temporaryFolder, tinyConfig } from '../src/testing/run.js';
import { freeStorePort } from '../src/testing/store-port.js';

const torchrun = spawnSync('torchrun', ['--help']).status === 0 ? null : 'no torchrun (pip install torch)';
const absence = idleGpuAbsence() ?? torchrun;

let gpu: IdleGpu;
let folder: { path: string; remove: () => void };
beforeAll(() => {
  if (absence) return;
  trefoilMain(); // built, if need be
  gpu = buildIdleGpu();
  folder = temporaryFolder();
});
afterAll(() => {
  gpu?.remove();
  folder?.remove();
});

// torchrun gives a rank 30 s after SIGTERM, and one that is stopped hears nothing.
for (const [signal, verdict] of [
  ['SIGKILL', 'its process is gone'],
  ['SIGSTOP', 'kept the other ranks waiting'],
] as const)
  it(`torchrun starts the ranks again when one gets ${signal}, and they go on`, {
    timeout: 900_000,
  }, async (context) => {
    if (absence) return context.skip(absence);
    const place = join(folder.path, signal);
    mkdirSync(place, { recursive: true });
    const outDir = join(place, 'run');
    const train = { steps: 1500, eval_every: 0, save_every: 200, out_dir: outDir };
    writeFileSync(join(place, 'config.yaml'), stringify(tinyConfig(place, { runtime: { device: 'cuda' }, train })));
    const port = await freeStorePort();
    const child = startProgram(join(root, 'deploy', 'torchrun.sh'), ['--config', join(place, 'config.yaml')], {
      ...gpu.env,
      TREFOIL_SHARE_GPU: '1',
      NPROC_PER_NODE: '2',
      MAX_RESTARTS: '1',
      MASTER_PORT: `${port}`,
      NSA_PG_TIMEOUT_MIN: '0.3',
    });
    let output = '';
    for (const stream of [child.stdout!, child.stderr!])
      stream.setEncoding('utf8').on('data', (text: string) => {
        output += text;
      });
    const done = ended(child);
    const lost = await second(outDir, 300);
    process.kill(lost, signal);
    try {
      const { code } = await done;
      expect(code, output).toBe(0);
    } finally {
      child.kill('SIGKILL');
      if (processState(lost) === 'stopped') process.kill(lost, 'SIGKILL');
    }
    expect(output).toMatch(new RegExp(`rank 1 on \\S+ \\(pid ${lost}, section \\w+ at step \\d+\\): ${verdict}`));
    expect(output).toMatch(/resumed from \S+ at step \d+/);
    const beats = tailHeartbeats(runPaths(outDir).heartbeat(0), 5);
    expect(beats.at(-1)).toMatchObject({ msg: 'stop', detail: 'done', step: 1500 });
    const steps = readFileSync(runPaths(outDir).training, 'utf8').trim().split('\n').slice(1);
    expect(steps.map((row) => Number(row.split(',')[0]))).toEqual(Array.from({ length: 1500 }, (_, i) => i + 1));
  });

/** The process of rank 1, once it has come to a step. */
async function second(outDir: string, step: number): Promise<number> {
  for (let i = 0; i < 6000; i++) {
    const section = readSection(runPaths(outDir).section(1));
    if (section && section.step >= step) return section.pid;
    await sleep(50);
  }
  throw new Error(`rank 1 did not come to step ${step}`);
}
