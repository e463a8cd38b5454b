/** The thread that saves checkpoints: the files of a save without it, and the faults of one: kills, a full disk, bad states. */
import { spawn, spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { build } from 'esbuild';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { Tensor } from '../../tensor/tensor.js';
import { cpu } from '../../testing/devices.js';
import { readSafetensors } from '../safetensors.js';
import { findCheckpoint } from './read.js';
import { SaveFailed, saveCheckpoint } from './save.js';
import { SaveThread } from './save-thread.js';

const SIZE = 5000;
let folder: string;
let [program, worker] = ['', ''];

/**
 * Saves one checkpoint after the other, going on from the newest; says so after each. Every number of save N is N, and what
 * is saved changes as soon as it is copied.
 */
const PROGRAM = `
  import { writeSync } from 'node:fs';
  import { findCheckpoint } from './read.js';
  import { SaveThread } from './save-thread.js';
  const [run, file] = process.argv.slice(2);
  const found = findCheckpoint(run, 'auto');
  let save = found ? found.state.save : 0;
  let value = 0;
  const readInto = (target) => new Float32Array(target.buffer, target.byteOffset, ${SIZE}).fill(value);
  const tensors = ['a', 'b', 'c'].map((name) => [name, { bytes: ${4 * SIZE}, shape: [${SIZE}], readInto }]);
  const thread = await SaveThread.start(new URL(file));
  for (;;) {
    value = ++save;
    const { result } = thread.save(run, save, { model: tensors, optimizer: tensors, state: { save } }, 2);
    value = -1;
    await result;
    writeSync(1, save + '\\n');
  }`;

/** The program of the thread, which kills the process at a given write. */
const WORKER = `
  import { readFileSync } from 'node:fs';
  import { parentPort } from 'node:worker_threads';
  import { serveSaves } from './save-tasks.js';
  const killAt = Number(readFileSync(new URL('./kill-at', import.meta.url), 'utf8'));
  let writes = 0;
  serveSaves(parentPort, () => { if (++writes === killAt) process.kill(process.pid, 'SIGKILL'); });`;

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-save-thread-'));
  const bundle = async (name: string, contents: string) => {
    const outfile = join(folder, name);
    const stdin = { contents, resolveDir: import.meta.dirname, loader: 'ts' as const };
    const options = { bundle: true, platform: 'node', format: 'esm', logLevel: 'error' } as const;
    await build({ stdin, outfile, external: ['esbuild'], ...options });
    return outfile;
  };
  program = await bundle('child.mjs', PROGRAM);
  worker = pathToFileURL(await bundle('worker.mjs', WORKER)).href;
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** Runs the program until it is killed; returns the last save it reported. */
function runUntilKilled(run: string, killAtWrite: number, killAfterMs?: number): Promise<number> {
  return new Promise((resolve, reject) => {
    writeFileSync(join(folder, 'kill-at'), String(killAtWrite));
    const child = spawn(process.execPath, [program, run, worker]);
    let [output, errors] = ['', ''];
    // A kill that does not come must not leave it running.
    const limit = setTimeout(() => child.kill('SIGTERM'), 60_000);
    child.once('close', () => clearTimeout(limit));
    child.stdout.on('data', (chunk) => {
      if (output === '' && killAfterMs !== undefined) setTimeout(() => child.kill('SIGKILL'), killAfterMs);
      output += chunk;
    });
    child.stderr.on('data', (chunk) => {
      errors += chunk;
    });
    child.on('close', (_code, signal) => {
      if (signal === 'SIGKILL') resolve(Number(output.trim().split('\n').at(-1)));
      else reject(new Error(`the program ended by itself: ${errors}`));
    });
  });
}

/** The newest checkpoint verifies, is whole, and is no older than the last one that was reported. */
function expectSound(run: string, reported: number): number {
  const found = findCheckpoint(run, 'auto');
  if (!found) {
    expect(reported).toBe(0);
    return 0;
  }
  const save = found.state['save'] as number;
  expect(found.skipped).toEqual([]);
  expect(save === reported || save === reported + 1, `found save ${save} after report of ${reported}`).toBe(true);
  for (const name of ['model.safetensors', 'optimizer.safetensors'])
    for (const { data } of readSafetensors(join(found.path, name)).tensors.values())
      expect(new Float32Array(data.slice().buffer).every((value) => value === save)).toBe(true);
  return save;
}

describe('killed while the thread saves, the next start finds the newest whole checkpoint', () => {
  it('at every kind of write', async () => {
    const run = join(folder, 'writes');
    let save = 0;
    // A save has about 20 writes: first saves, and later ones, which delete.
    for (let killAt = 1; killAt <= 40; killAt++) save = expectSound(run, (await runUntilKilled(run, killAt)) || save);
    expect(save).toBeGreaterThan(20);
  });

  it('at random moments', async () => {
    const run = join(folder, 'moments');
    let save = 0;
    for (let round = 0; round < 15; round++) {
      const reported = await runUntilKilled(run, -1, Math.random() * 60);
      save = expectSound(run, reported || save);
      expect(readdirSync(join(run, 'checkpoints')).length).toBeLessThan(8);
    }
    expect(save).toBeGreaterThan(15);
  });
});

describe('the thread', () => {
  const tensors = (value: number, size = 300) => {
    const tensor = Tensor.from(cpu(), new Float32Array(size).fill(value), [size]);
    return { tensor, named: [['w', tensor] as const] };
  };

  it('writes the files of a save without it, of what was copied, and takes the next', async () => {
    const thread = await SaveThread.start();
    const [aside, direct] = [join(folder, 'aside'), join(folder, 'direct')];
    for (const run of [aside, direct]) mkdirSync(run);
    for (const step of [1, 2, 3]) {
      const { tensor, named } = tensors(step);
      const state = { step, note: 'text' };
      const data = tensor.readBytes();
      const list = [{ name: 'w', dtype: 'F32' as const, shape: [300], data }];
      const expected = saveCheckpoint(direct, step, { model: list, optimizer: list }, state, { keepLast: 2 });
      const written = thread.save(aside, step, { model: named, optimizer: named, state }, 2);
      expect(written.isDone).toBe(false);
      expect(() => thread.save(aside, step, { model: named, optimizer: named, state }, 2)).toThrow(
        'still being written',
      );
      tensor.fill(-1);
      const { path, bytes, warnings } = await written.result;
      expect([written.isDone, bytes, warnings]).toEqual([true, expected.bytes, []]);
      for (const name of ['model.safetensors', 'optimizer.safetensors', 'state.json'])
        expect(readFileSync(join(path, name)).equals(readFileSync(join(expected.path, name))), name).toBe(true);
      tensor.free();
    }
    expect(readdirSync(join(aside, 'checkpoints')).sort()).toEqual(readdirSync(join(direct, 'checkpoints')).sort());
    thread.close();
  });

  it('reports a disk that is full, and saves when there is room again', async (context) => {
    const disk = join(folder, 'disk');
    mkdirSync(disk);
    const mount = spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=300k', 'tmpfs', disk], { encoding: 'utf8' });
    if (mount.status !== 0) {
      const reason = `cannot mount a tmpfs: ${mount.error?.message ?? mount.stderr.trim()}`;
      console.warn(`skipped: ${reason}`);
      context.skip(reason);
    }
    const thread = await SaveThread.start();
    try {
      const save = async (step: number, size: number) => {
        const { tensor, named } = tensors(step, size);
        const { result } = thread.save(disk, step, { model: named, optimizer: [], state: { step } }, 2);
        tensor.free();
        return await result;
      };
      await save(1, 10_000);
      await expect(save(2, 90_000)).rejects.toThrow(SaveFailed);
      expect(findCheckpoint(disk, 'auto')).toMatchObject({ step: 1, skipped: [] });
      expect(readdirSync(join(disk, 'checkpoints')).sort()).toEqual(['latest', 'step-1']);
      await save(3, 10_000);
      expect(findCheckpoint(disk, 'auto')!.step).toBe(3);
    } finally {
      thread.close();
      spawnSync('umount', ['-l', disk]);
    }
  });

  it('passes on an error that is no fault of the disk, and knows when it has ended', async () => {
    const thread = await SaveThread.start();
    const run = join(folder, 'errors');
    mkdirSync(run);
    const parts = { model: [], optimizer: [] };
    const bad = thread.save(run, 1, { ...parts, state: { value: Number.NaN } }, 2).result;
    await expect(bad).rejects.toThrow('the checkpoint state cannot hold NaN (key value)');
    const { result } = thread.save(run, 2, { ...parts, state: {} }, 2);
    thread.close();
    await expect(result).rejects.toThrow('the thread that saves checkpoints has ended');
  });

  it('has room for what is copied already, and not for more than the machine has', async () => {
    const thread = await SaveThread.start();
    expect([thread.hasRoom(1000), thread.hasRoom(1e15)]).toEqual([true, false]);
    thread.close();
  });
});
