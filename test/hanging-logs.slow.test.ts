/** Fault 14: a file system that hangs under the log files of a run stops neither the training nor the end of the process. */
import { spawnSync } from 'node:child_process';
import { readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterEach, beforeEach, expect, it, type TestContext } from 'vitest';
import { stringify } from 'yaml';
import { findCheckpoint } from '../src/run/checkpoint/read.js';
import { readCsv, TRAINING_CSV } from '../src/run/logs/csv.js';
import { readHeartbeats } from '../src/run/logs/heartbeat.js';
import { runPaths } from '../src/run/paths.js';
import { ended, startTrefoil } from '../src/testing/cli.js';
import { temporaryFolder, tinyConfig } from '../src/testing/run.js';

const SOURCE = fileURLToPath(new URL('../src/testing/faulty-files.cpp', import.meta.url));

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

/** The environment in which writes to the heartbeats hang from the first few on, while the file `marker` exists, as it does. */
function hangingWrites(context: TestContext) {
  if (process.platform !== 'linux') context.skip('LD_PRELOAD needs Linux');
  const library = join(folder.path, 'faulty-files.so');
  const built = spawnSync('g++', ['-shared', '-fPIC', '-O1', SOURCE, '-o', library, '-ldl'], { encoding: 'utf8' });
  if (built.error) context.skip('no g++');
  expect(built.status, built.stderr).toBe(0);
  const marker = join(folder.path, 'hanging');
  writeFileSync(marker, '');
  const files = { FAULTY_FILES: 'run/heartbeat_rank0.jsonl', HANGING_FROM: '3000', FAULTY_WHILE: marker };
  return { marker, env: { LD_PRELOAD: library, ...files } };
}

function start(env: Record<string, string>, steps: number) {
  const config = tinyConfig(folder.path, { train: { steps, eval_every: 0, save_every: 10, log_every: 10 } });
  const file = join(folder.path, 'config.yaml');
  writeFileSync(file, stringify(config));
  const child = startTrefoil(['train', '--config', file], env);
  const output = { stdout: '', stderr: '' };
  child.stdout!.on('data', (chunk) => {
    output.stdout += chunk;
  });
  child.stderr!.on('data', (chunk) => {
    output.stderr += chunk;
  });
  return { child, output, outDir: config.train.out_dir, ending: ended(child) };
}

const STALLED = 'a write does not return; training goes on';

it('trains to the end, ends the process, and reports how many records were lost', async (context) => {
  const { env } = hangingWrites(context);
  const run = start(env, 60);
  expect(await run.ending, run.output.stderr).toEqual({ code: 0, signal: null });
  expect(run.output.stdout).toContain('step 0060');
  expect(run.output.stderr).toContain(STALLED);
  expect(run.output.stderr).toMatch(/warning: \d+ log records were dropped/);
  const paths = runPaths(run.outDir);
  expect(findCheckpoint(run.outDir, 'auto')!.step).toBe(60);
  const metrics = JSON.parse(readFileSync(paths.metrics, 'utf8'));
  expect(metrics).toMatchObject({ status: 'done', step: 60 });
  expect(metrics.dropped_log_lines).toBeGreaterThan(10);
});

it('loses nothing when the file system comes back in time', async (context) => {
  const { marker, env } = hangingWrites(context);
  const run = start(env, 100_000);
  const says = (text: string) =>
    expect.poll(() => run.child.exitCode !== null || run.output.stderr.includes(text)).toBe(true);
  await says(STALLED);
  rmSync(marker);
  await says('log files: writing again');
  run.child.kill('SIGTERM');
  expect(await run.ending, run.output.stderr).toEqual({ code: 4, signal: null });
  const paths = runPaths(run.outDir);
  const { step: last, dropped_log_lines: dropped } = JSON.parse(readFileSync(paths.metrics, 'utf8'));
  expect(dropped).toBe(0);
  const steps = [...readHeartbeats(paths.heartbeat(0))].filter(({ msg }) => msg === 'progress').map(({ step }) => step);
  expect(steps).toEqual(Array.from({ length: last }, (_, i) => i + 1));
  const logged = readCsv(paths.training, TRAINING_CSV).rows.map(({ step }) => step);
  expect(logged).toEqual(expect.arrayContaining(Array.from({ length: Math.floor(last / 10) }, (_, i) => 10 * (i + 1))));
});
