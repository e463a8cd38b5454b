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

const SOURCE = fileURLToPath(new URL('../src/testing/hanging-writes.cpp', import.meta.url));

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

/** The environment in which writes to `files` hang while the file `marker` exists. */
function hangingWrites(context: TestContext, files: string) {
  if (process.platform !== 'linux') context.skip('LD_PRELOAD needs Linux');
  const library = join(folder.path, 'hanging-writes.so');
  const built = spawnSync('g++', ['-shared', '-fPIC', '-O1', SOURCE, '-o', library, '-ldl'], { encoding: 'utf8' });
  if (built.error) context.skip('no g++');
  expect(built.status, built.stderr).toBe(0);
  const marker = join(folder.path, 'hanging');
  return { marker, env: { LD_PRELOAD: library, HANGING_FILES: files, HANGING_WHILE: marker } };
}

function start(env: Record<string, string>, steps: number) {
  const config = tinyConfig(folder.path, { train: { steps, eval_every: 0, save_every: 10, log_every: 10 } });
  const file = join(folder.path, 'config.yaml');
  writeFileSync(file, stringify(config));
  const child = startTrefoil(['train', '--config', file], env);
  const output = { stdout: '', stderr: '' };
  const waiting: { text: string; resolve: () => void }[] = [];
  child.stdout!.on('data', (chunk) => {
    output.stdout += chunk;
    for (const { text, resolve } of waiting) if (output.stdout.includes(text)) resolve();
  });
  child.stderr!.on('data', (chunk) => {
    output.stderr += chunk;
  });
  const printed = (text: string) => new Promise<void>((resolve) => waiting.push({ text, resolve }));
  return { output, printed, outDir: config.train.out_dir, ending: ended(child) };
}

it('trains to the end, ends the process, and reports how many records were lost', async (context) => {
  const { marker, env } = hangingWrites(context, 'run/heartbeat_rank0.jsonl');
  const run = start(env, 60);
  await run.printed('step 0010');
  writeFileSync(marker, '');
  expect(await run.ending, run.output.stderr).toEqual({ code: 0, signal: null });
  expect(run.output.stdout).toContain('step 0060');
  expect(run.output.stderr).toContain('a write does not return; training goes on');
  expect(run.output.stderr).toMatch(/warning: \d+ log records were dropped/);
  const paths = runPaths(run.outDir);
  expect(findCheckpoint(run.outDir, 'auto')!.step).toBe(60);
  const metrics = JSON.parse(readFileSync(paths.metrics, 'utf8'));
  expect(metrics).toMatchObject({ status: 'done', step: 60 });
  expect(metrics.dropped_log_lines).toBeGreaterThan(10);
});

it('loses nothing when the file system comes back in time', async (context) => {
  const { marker, env } = hangingWrites(context, 'run/heartbeat_rank0.jsonl');
  const run = start(env, 60);
  await run.printed('step 0010');
  writeFileSync(marker, '');
  await run.printed('step 0030');
  rmSync(marker);
  expect(await run.ending, run.output.stderr).toEqual({ code: 0, signal: null });
  const paths = runPaths(run.outDir);
  const steps = [...readHeartbeats(paths.heartbeat(0))].filter(({ msg }) => msg === 'progress').map(({ step }) => step);
  expect(steps).toEqual(Array.from({ length: 60 }, (_, i) => i + 1));
  expect(readCsv(paths.training, TRAINING_CSV).rows.map(({ step }) => step)).toEqual([1, 10, 20, 30, 40, 50, 60]);
  expect(JSON.parse(readFileSync(paths.metrics, 'utf8')).dropped_log_lines).toBe(0);
});
