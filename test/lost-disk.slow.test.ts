/**
 * Disks that fail under a training that goes on: the file system of the run becomes read-only, files of the data are
 * removed. Nothing that was written is lost, the end is in one line, and the run continues as if nothing had been.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, renameSync, truncateSync, writeFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { findCheckpoint } from '../src/run/checkpoint/read.js';
import { readCsv, TRAINING_CSV } from '../src/run/logs/csv.js';
import { runPaths } from '../src/run/paths.js';
import { trefoil } from '../src/testing/cli.js';
import { type TinyOverrides, temporaryFolder, tinyConfig } from '../src/testing/run.js';
import { Life } from './chaos/supervisor.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

function prepare(name: string, outDir: string, { train, ...others }: TinyOverrides = {}) {
  const config = tinyConfig(folder.path, { ...others, train: { eval_every: 0, ...train, out_dir: outDir } });
  const file = join(folder.path, `${name}.yaml`);
  writeFileSync(file, stringify(config));
  return ['train', '--config', file];
}

async function completes(args: readonly string[]): Promise<void> {
  const { code, stderr } = await trefoil(args);
  expect(code, stderr).toBe(0);
}

const losses = (outDir: string) => readCsv(runPaths(outDir).training, TRAINING_CSV).rows.map(({ loss }) => loss);

function expectSame(outDir: string, calm: string): void {
  expect(losses(outDir)).toEqual(losses(calm));
  expect(readFileSync(runPaths(outDir).model).equals(readFileSync(runPaths(calm).model))).toBe(true);
  expect(readdirSync(outDir).sort()).toEqual(readdirSync(calm).sort());
}

const system = (program: string, ...words: string[]) => spawnSync(program, words, { encoding: 'utf8' });

it('a file system that becomes read-only', async ({ skip }) => {
  const [image, disk, calm] = ['image', 'disk', 'calm'].map((name) => join(folder.path, name));
  writeFileSync(image, '');
  truncateSync(image, 2 ** 26);
  mkdirSync(disk);
  if (system('mkfs.ext4', '-q', image).status !== 0) skip('no mkfs.ext4 (Debian: apt-get install e2fsprogs)');
  const mounted = system('mount', '-o', 'loop,errors=remount-ro', image, disk);
  if (mounted.status !== 0) skip(`cannot mount a disk: ${mounted.stderr.trim()}`);
  try {
    // As the kernel does after an error of the disk; a remount by hand is refused while files are open.
    const device = basename(system('findmnt', '-no', 'SOURCE', disk).stdout.trim());
    const trigger = `/sys/fs/ext4/${device}/trigger_fs_error`;
    if (!existsSync(trigger)) skip(`no ${trigger}`);
    const train = { steps: 400, save_every: 5 };
    const outDir = join(disk, 'run');
    const args = prepare('run', outDir, { train });
    await completes(prepare('calm', calm, { train }));

    const life = new Life(args, {});
    await life.progress(12);
    // A thread writes checkpoints while training goes on.
    await expect.poll(() => findCheckpoint(outDir, 'auto')?.step).toBeGreaterThanOrEqual(10);
    writeFileSync(trigger, 'a test');
    await life.progress(life.steps + 8);
    life.send('SIGTERM');
    expect(await life.ending).toEqual({ code: 1, signal: null }); // the checkpoint of the end cannot be saved
    expect(life.stderr).toContain(
      'the file system is read-only; remount it or choose another out_dir; training goes on',
    );
    expect(life.stderr).toMatch(/checkpoint of step \d+ was not saved: .*; the last good one is kept/);
    expect(life.stderr).not.toMatch(/\n {4}at |writing again/);
    expect(findCheckpoint(outDir, 'auto')!.step).toBeGreaterThanOrEqual(10);
    expect((await trefoil(['health', '--dir', outDir])).stdout).toMatch(/^died: /);

    expect(system('umount', disk).status).toBe(0);
    expect(system('mount', '-o', 'loop', image, disk).status).toBe(0);
    await completes([...args, '--resume', 'auto']);
    expectSame(outDir, calm);
  } finally {
    expect(system('umount', '-l', disk).status).toBe(0);
  }
});

it('data files that are removed', async () => {
  const texts = join(folder.path, 'texts');
  mkdirSync(texts);
  for (const file of 'abcdef') {
    const lines = Array.from({ length: 400 }, (_, i) =>
      JSON.stringify({ text: `${file}: a text with the number ${i}.` }),
    );
    writeFileSync(join(texts, `${file}.jsonl`), `${lines.join('\n')}\n`);
  }
  const overrides = {
    data: { source: 'files', path: texts, workers: 1, prefetch: false, val_fraction: 0, loader_timeout: 30 },
    train: { steps: 400, save_every: 5 },
  };
  const [calm, outDir] = ['calm', 'run'].map((name) => join(folder.path, name));
  await completes(prepare('calm', calm, overrides));
  const args = prepare('run', outDir, overrides);
  const life = new Life(args, {});
  await life.progress(6);
  renameSync(texts, `${texts}-away`);
  expect(await life.ending).toEqual({ code: 6, signal: null });
  expect(life.stderr).toMatch(/[a-f]\.jsonl/);
  expect(life.stderr).not.toMatch(/\n {4}at /);
  const gone = await trefoil([...args, '--resume', 'auto']);
  expect(gone.code).toBe(2);
  expect(gone.stderr).toContain(texts);
  renameSync(`${texts}-away`, texts);
  await completes([...args, '--resume', 'auto']);
  expectSame(outDir, calm);
});
