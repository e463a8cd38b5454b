/** Fault 1: the process is killed at any write while a checkpoint is saved. */
import { spawn } from 'node:child_process';
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { build } from 'esbuild';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { readSafetensors } from '../safetensors.js';
import { findCheckpoint } from './read.js';

let folder: string;
let program: string;

/**
 * Saves one checkpoint after the other, going on from the newest; says so after each. Every byte of step N is N modulo 256.
 * Every fifth save replaces the one before it under the same step, with another mark. Kills itself at a given write.
 */
const PROGRAM = `
  import { writeSync } from 'node:fs';
  import { findCheckpoint } from './read.js';
  import { saveCheckpoint } from './save.js';
  const [run, killAt] = process.argv.slice(2);
  let writes = 0;
  const onWrite = () => { if (++writes === Number(killAt)) process.kill(process.pid, 'SIGKILL'); };
  const found = findCheckpoint(run, 'auto');
  let save = found ? found.state.save : 0;
  for (;;) {
    save++;
    const step = save % 5 === 0 ? save - 1 : save;
    const data = () => new Uint8Array(20000).fill(save);
    const tensors = ['a', 'b', 'c'].map((name) => ({ name, dtype: 'U8', shape: [20000], data }));
    saveCheckpoint(run, step, { model: tensors, optimizer: tensors }, { save }, { keepLast: 2, onWrite });
    writeSync(1, save + '\\n');
  }`;

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-kill-'));
  program = join(folder, 'child.mjs');
  await build({
    stdin: { contents: PROGRAM, resolveDir: import.meta.dirname, loader: 'ts' },
    bundle: true,
    platform: 'node',
    format: 'esm',
    outfile: program,
  });
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** Runs the program until it is killed; returns the last save it reported. */
function runUntilKilled(run: string, killAtWrite: number, killAfterMs?: number): Promise<number> {
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, [program, run, String(killAtWrite)], { stdio: ['ignore', 'pipe', 'pipe'] });
    let output = '';
    let errors = '';
    child.stdout.on('data', (chunk) => {
      // The clock starts with the first save, so that the start of Node does not count.
      if (output === '' && killAfterMs !== undefined) setTimeout(() => child.kill('SIGKILL'), killAfterMs);
      output += chunk;
    });
    child.stderr.on('data', (chunk) => {
      errors += chunk;
    });
    child.on('close', (_code, signal) => {
      if (signal !== 'SIGKILL') reject(new Error(`the program ended by itself: ${errors}`));
      else resolve(Number(output.trim().split('\n').at(-1)));
    });
  });
}

/** The newest checkpoint must verify, be whole, and be no older than the last one that was reported. */
function expectSound(run: string, reported: number): number {
  const found = findCheckpoint(run, 'auto');
  if (!found) {
    expect(reported).toBe(0);
    return 0;
  }
  const save = found.state['save'] as number;
  expect(found.skipped).toEqual([]);
  expect(save === reported || save === reported + 1, `found save ${save} after report of ${reported}`).toBe(true);
  for (const name of ['model.safetensors', 'optimizer.safetensors']) {
    const { tensors } = readSafetensors(join(found.path, name));
    expect([...tensors.keys()]).toEqual(['a', 'b', 'c']);
    for (const { data } of tensors.values()) expect(data.every((byte) => byte === save % 256)).toBe(true);
  }
  return save;
}

test('killed at every kind of write, the next start finds the newest whole checkpoint', async () => {
  const run = join(folder, 'writes');
  let save = 0;
  // A save has about 20 writes: 1 to 40 reaches each of them, in first saves and in later ones that delete and replace.
  for (let killAt = 1; killAt <= 40; killAt++) {
    const reported = await runUntilKilled(run, killAt);
    save = expectSound(run, reported || save);
  }
  expect(save).toBeGreaterThan(20);
});

test('killed at random moments', async () => {
  const run = join(folder, 'moments');
  let save = 0;
  for (let round = 0; round < 25; round++) {
    const reported = await runUntilKilled(run, -1, Math.random() * 60);
    const before = save;
    save = expectSound(run, reported || save);
    expect(save).toBeGreaterThan(before);
    // Whatever was left behind is cleaned up by the next process: it does not pile up.
    expect(readdirSync(join(run, 'checkpoints')).length).toBeLessThan(8);
  }
});
