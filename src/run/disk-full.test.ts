/** Fault 5 on a real disk that is full: a tmpfs of a few hundred kilobytes. Needs the right to mount. */
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, type TestContext, test } from 'vitest';
import { writeFileAtomic } from '../files.js';
import { findCheckpoint } from './checkpoint/read.js';
import { SaveFailed, saveCheckpoint } from './checkpoint/save.js';
import { readCsv, TRAINING_CSV } from './logs/csv.js';
import { openCsv, openHeartbeats } from './logs/log.js';
import { AppendFile } from './logs/log-file.js';

let folder: string;
let disk: string;
let reasonToSkip: string | undefined;

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-disk-'));
  disk = join(folder, 'disk');
  mkdirSync(disk);
  const mount = spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=512k', 'tmpfs', disk], { encoding: 'utf8' });
  reasonToSkip =
    mount.status === 0 ? undefined : `cannot mount a tmpfs: ${mount.error?.message ?? mount.stderr.trim()}`;
});
afterEach(() => {
  // Lazily: a test that failed with a file still open must not leave the disk mounted for ever.
  if (reasonToSkip === undefined) expect(spawnSync('umount', ['-l', disk]).status).toBe(0);
  rmSync(folder, { recursive: true, force: true });
});

function needsDisk(context: TestContext): void {
  if (reasonToSkip === undefined) return;
  console.warn(`skipped: ${reasonToSkip}`);
  context.skip(reasonToSkip);
}

/** Leaves not a single byte free. */
function fill(): void {
  const file = new AppendFile(join(disk, 'filler'), 'binary');
  for (const size of [4096, 1]) {
    try {
      for (;;) file.append(new Uint8Array(size));
    } catch (error) {
      expect(String(error)).toContain('no space left');
    }
  }
  file.close();
}

function save(step: number, bytes: number): void {
  const tensor = { name: 'w', dtype: 'U8', shape: [bytes], data: new Uint8Array(bytes).fill(step) } as const;
  saveCheckpoint(disk, step, { model: [tensor], optimizer: [tensor] }, { step }, { keepLast: 1 });
}

test('a checkpoint that does not fit leaves the last good one and the space it tried to take', (context) => {
  needsDisk(context);
  save(1, 50_000);
  for (const bytes of [200_000, 600_000]) {
    expect(() => save(2, bytes)).toThrow(SaveFailed);
    expect(() => save(2, bytes)).toThrow(
      /step 2 was not saved: .*no space left on the disk; free some space.*last good one is kept/,
    );
    expect(readdirSync(join(disk, 'checkpoints')).sort()).toEqual(['latest', 'step-1']);
    expect(findCheckpoint(disk, 'auto')).toMatchObject({ step: 1, skipped: [] });
  }
  save(3, 60_000);
  expect(readdirSync(join(disk, 'checkpoints')).sort()).toEqual(['latest', 'step-3']);
});

test('rows that do not fit wait in memory, no half row is left, and none is lost when space comes back', (context) => {
  needsDisk(context);
  let time = 0;
  const problems: string[] = [];
  const options = { now: () => time, onProblem: (text: string) => problems.push(text) };
  const path = join(disk, 'training.csv');
  const writer = openCsv(path, TRAINING_CSV, options);
  const heartbeat = openHeartbeats(join(disk, 'heartbeat_rank0.jsonl'), 0, options);
  writer.write({ step: 1, loss: 1, lr: 1, toks_per_s: 1 });
  fill();
  for (let step = 2; step <= 2000; step++) {
    writer.write({ step, loss: 1 / step, lr: 1, toks_per_s: 1 });
    heartbeat.write({ step, msg: 'progress' });
    time += 10;
  }
  expect(readFileSync(path, 'utf8').endsWith('\n')).toBe(true);
  expect(problems.filter((text) => text.includes('training.csv: cannot append: no space left'))).toHaveLength(1);
  expect(writer.flush()).toBe(false);
  rmSync(join(disk, 'filler'));
  expect(writer.flush()).toBe(true);
  expect(writer.drops).toBe(0);
  expect(readCsv(path, TRAINING_CSV)).toMatchObject({ badLines: 0, rows: { length: 2000 } });
  writer.close();
  heartbeat.close();
});

test('a record that the disk took half of is taken back', (context) => {
  needsDisk(context);
  const path = join(disk, 'log');
  const file = new AppendFile(path);
  file.append(Buffer.from('whole\n'));
  expect(() => file.append(new Uint8Array(10_000_000).fill(65))).toThrow('no space left');
  expect(readFileSync(path, 'utf8')).toBe('whole\n');
  file.append(Buffer.from('next\n'));
  file.close();
  expect(readFileSync(path, 'utf8')).toBe('whole\nnext\n');
});

test('a file that cannot be replaced keeps its content', (context) => {
  needsDisk(context);
  const path = join(disk, 'metrics.json');
  writeFileAtomic(path, 'old');
  fill();
  expect(() => writeFileAtomic(path, 'n'.repeat(100_000))).toThrow('no space left');
  expect(readFileSync(path, 'utf8')).toBe('old');
  expect(readdirSync(disk).sort()).toEqual(['filler', 'metrics.json']);
  expect(statSync(path).size).toBe(3);
  writeFileSync(join(disk, 'filler'), '');
});
