import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { CHECKPOINT_FILES, FORMAT_VERSION, serializeManifest } from '../run/checkpoint/read.js';
import type { HeartbeatFields } from '../run/logs/heartbeat.js';
import { runPaths, writeAnomaly } from '../run/paths.js';
import { readRun } from '../run/reader.js';
import { temporaryFolder } from '../testing/run.js';
import { adviceFor } from './advice.js';
import { wallAges } from './ages.js';
import { checkHealth } from './rules.js';
import { runState, stateText } from './state.js';
import { RecordedRun } from './testing/recorded-run.js';
import { resolveThresholds } from './thresholds.js';

let folder: { path: string; remove: () => void };
let run: RecordedRun;
beforeEach(() => {
  folder = temporaryFolder();
  run = new RecordedRun(folder.path);
});
afterEach(() => {
  run.close();
  folder.remove();
});

function look() {
  const view = readRun(folder.path);
  const state = runState(view, wallAges(run.now));
  return { ...state, text: stateText(state), advice: adviceFor(state, view) };
}

function lockOfAnotherHost(): void {
  const start = { process_start: 1, boot_id: 'b', run_start: new Date(run.now * 1000).toISOString() };
  writeFileSync(runPaths(folder.path).lock, JSON.stringify({ pid: 7, host: 'elsewhere', nonce: 'n', ...start }));
}

it('not started, starting, running', () => {
  expect(look()).toMatchObject({ name: 'not started', kind: 'empty' });
  run.lock('alive');
  expect(look()).toMatchObject({ name: 'starting', kind: 'running' });
  run.write({ step: 0, msg: 'boot' });
  expect(look()).toMatchObject({ name: 'starting', kind: 'running' });
  run.steps(1, 2, 1);
  expect(look()).toMatchObject({ name: 'running', kind: 'running', text: `running (pid ${process.pid})`, advice: '' });
});

const end = (fields: Partial<HeartbeatFields>): HeartbeatFields => ({ step: 5, msg: 'halt', ...fields });

it.each<[string, HeartbeatFields, string]>([
  ['done', end({ msg: 'stop', status: 'done', detail: 'done' }), ''],
  ['stopped: SIGTERM', end({ msg: 'stop', status: 'signalled', detail: 'SIGTERM' }), '--resume auto'],
  ['halted: .HALT: lunch', end({ status: 'halted', detail: '.HALT: lunch' }), '--resume auto'],
  [
    'halted: nonfinite_loss at 5',
    end({ status: 'non-finite', detail: 'nonfinite_loss at 5' }),
    'half the learning rate',
  ],
  ['gave up: no answer', end({ status: 'no-data', detail: 'no answer' }), 'check the source'],
  ['failed: Error: broken', end({ status: 'failed', detail: 'Error: broken' }), 'remove the cause'],
  ['failed: CUDA: out of memory', end({ status: 'failed', detail: 'CUDA: out of memory' }), 'train.batch_size'],
  ['stopped: SIGINT', end({ msg: 'stop', detail: 'SIGINT' }), '--resume auto'],
  ['gave up: of an earlier version', end({ msg: 'loader_error', detail: 'of an earlier version' }), 'check the source'],
])('%s', (text, last, advice) => {
  run.steps(1, 5, 1);
  run.write(last);
  run.now += 100_000;
  expect(look()).toMatchObject({ text, kind: 'ended', advice: expect.stringContaining(advice) });
  run.lock('dead', run.now - 200_000);
  expect(look()).toMatchObject({ text, kind: 'ended' }); // the process died after it wrote its end
});

it('after a NaN: a checkpoint from before the trouble, half the rate, and spike_skip only if it helps', () => {
  const { checkpoints, config } = runPaths(folder.path);
  writeFileSync(config, 'train:\n  steps: 90\n  lr: 0.003\n');
  const nan = (step: number) => end({ step, status: 'non-finite', detail: `nonfinite_loss at step ${step}` });
  run.steps(1, 60, 1);
  run.write(nan(61));
  const rest = `(half the learning rate; no spike came before it, so train.spike_skip would not help)`;
  expect(look().advice).toBe(
    `there is no checkpoint: start again with npx trefoil train --config ${config} --out-dir ${folder.path}-2 --lr 0.0015 ${rest}`,
  );
  for (const step of [20, 40, 60]) {
    mkdirSync(join(checkpoints, `step-${step}`), { recursive: true });
    const digest = { bytes: 1, sha256: '0'.repeat(64) };
    const files = Object.fromEntries(Object.values(CHECKPOINT_FILES).map((name) => [name, digest]));
    const facts = { format_version: FORMAT_VERSION, trefoil_version: '0', step, sequence: step, saved_at: '', files };
    writeFileSync(join(checkpoints, `step-${step}`, 'manifest.json'), serializeManifest(facts));
  }
  const resume = (step: number) =>
    `continue from step ${step} with npx trefoil train --config ${config} --resume ${join(checkpoints, `step-${step}`)} --lr 0.0015`;
  expect(look().advice).toBe(`${resume(60)} ${rest}`);
  run.write({ step: 40, msg: 'boot', detail: 'resumed' });
  run.steps(41, 60, 1, (step) => ({ fb_spike: Math.max(0, step - 49) }));
  run.write(nan(61));
  expect(look().advice).toContain(`${resume(40)} --set train.spike_skip=true (half the learning rate; 11 of the last`);
});

it('out of memory is a critical rule with the numbers, also when the kernel probably killed the run', () => {
  const rowOf = () =>
    checkHealth(folder.path, resolveThresholds({}), { now: run.now }).rows.find(({ rule }) => rule === 'out_of_memory');
  run.lock('alive');
  run.steps(1, 5, 1, () => ({ host_mem_rss: 4000, host_mem_free: 9000 }));
  expect(rowOf()).toMatchObject({ level: 'green', value: '9000 MiB of the host free, 4000 MiB in the process' });
  run.steps(6, 6, 1, () => ({ host_mem_rss: 12_900, host_mem_free: 100 }));
  expect(rowOf()).toMatchObject({ level: 'yellow' });
  run.lock('dead');
  expect(rowOf()).toMatchObject({
    level: 'red',
    value: 'probably killed by the kernel: 100 MiB of the host free, 12900 MiB in the process at step 6',
  });
  expect(look().advice).toMatch(/^lower train.batch_size .* --resume auto$/);
  const detail = 'out of GPU memory: 300 MiB were requested, 20 MiB of 80000 MiB are free';
  run.write(end({ status: 'out-of-memory', detail }));
  expect(rowOf()).toMatchObject({ level: 'red', value: detail });
});

it('died: the owner is gone without an end, also when an earlier process wrote one', () => {
  run.steps(1, 5, 1);
  run.write(end({ msg: 'stop', status: 'signalled', detail: 'SIGTERM' }));
  run.now += 10;
  run.lock('dead', run.now);
  expect(look()).toMatchObject({ name: 'died', kind: 'gone', advice: expect.stringContaining('--resume auto') });
});

it('unknown: on another host, after the stale limit, and later within a section without heartbeats', () => {
  lockOfAnotherHost();
  run.steps(1, 5, 1);
  expect(look()).toMatchObject({ name: 'running', reason: 'pid 7 on elsewhere' });
  run.now += 301;
  expect(look()).toMatchObject({ name: 'unknown', kind: 'gone' });
  run.section('eval', 5);
  run.now += 900;
  expect(look().name).toBe('running');
  run.now += 1;
  expect(look().name).toBe('unknown');
});

it('unknown: without a lock and without heartbeats', () => {
  run.steps(1, 5, 1);
  run.now += 300;
  expect(look().name).toBe('running');
  run.now += 1;
  expect(look().name).toBe('unknown');
});

it('names the rank that failed first', () => {
  const other = new RecordedRun(folder.path, { rank: 1 });
  run.steps(1, 5, 1);
  other.now = run.now;
  other.write(end({ status: 'failed', detail: 'Error: broken' }));
  run.now += 2;
  run.write(end({ status: 'failed', detail: 'rank 1 is gone' }));
  expect(look()).toMatchObject({ name: 'failed', reason: 'rank 1: Error: broken' });
  // A clock that is behind does not make the consequence the cause.
  run.now -= 60;
  run.write(end({ status: 'failed', detail: 'rank 1 on host (pid 5, section step at step 5): its process is gone' }));
  expect(look()).toMatchObject({ name: 'failed', reason: 'rank 1: Error: broken' });
  other.close();
});

it('a halt after an anomaly is nothing that somebody asked for', () => {
  run.write(end({ status: 'halted', detail: '.HALT: grad_zero' }));
  expect(look().isAsked).toBe(true);
  writeAnomaly(folder.path, 'grad_zero');
  expect(look().isAsked).toBe(false);
});
