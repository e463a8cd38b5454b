/** The log thread against files that hang: a FIFO without a reader, whose writer blocks once the pipe is full. */
import { spawnSync } from 'node:child_process';
import { constants, mkdtempSync, openSync, readSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { CsvWriter, readCsv, TRAINING_CSV } from './csv.js';
import { readSection, SectionWriter } from './heartbeat.js';
import { LogThread } from './log-thread.js';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-logs-'));
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

const record = (text: string, bytes: number) => Buffer.from(`${text.padEnd(bytes - 1)}\n`);

/** A FIFO that the worker can write until the pipe is full (64 KiB on Linux), and that `drain` empties. */
function hangingFile() {
  const path = join(folder, 'hanging');
  expect(spawnSync('mkfifo', [path]).status).toBe(0);
  const descriptor = openSync(path, constants.O_RDWR);
  const chunk = Buffer.alloc(2 ** 16);
  return { file: { path, descriptor }, drain: () => readSync(descriptor, chunk) };
}

test('writes rows and sections from another thread, and a flush waits for them', async () => {
  const logThread = await LogThread.start();
  const csv = new CsvWriter(join(folder, 'training.csv'), TRAINING_CSV, { logThread });
  const section = new SectionWriter(join(folder, '.section'), 0, { logThread });
  for (let step = 1; step <= 500; step++) csv.append({ step, loss: 1 / step, lr: 1, toks_per_s: 1 });
  section.enter('step', 500);
  expect(csv.flush()).toBe(true);
  expect(readCsv(csv.path, TRAINING_CSV)).toMatchObject({ badLines: 0, rows: { length: 500 } });
  expect(readSection(join(folder, '.section'))).toMatchObject({ section: 'step', step: 500 });
  csv.append({ step: 501, loss: 1, lr: 1, toks_per_s: 1 });
  csv.close();
  section.close();
  logThread.close();
  expect(readCsv(csv.path, TRAINING_CSV).rows.at(-1)!.step).toBe(501);
  expect(readSection(join(folder, '.section'))).toBeUndefined();
  expect(csv.drops).toBe(0);
});

test('a hung file blocks neither writes nor flushes; what exceeds the queue is dropped and counted', async () => {
  const problems: string[] = [];
  const logThread = await LogThread.start({ onProblem: (line) => problems.push(line), waitMs: 2000 });
  const { file, drain } = hangingFile();
  const hung = logThread.open('append', file);
  const started = performance.now();
  const count = 6000; // 6 MB: more than the pipe and the queue hold
  for (let i = 0; i < count; i++) hung.write(record(`r${i}`, 1000));
  const firstFlush = performance.now();
  expect(hung.flush()).toBe(false);
  expect(performance.now() - firstFlush).toBeGreaterThan(1900);
  const secondFlush = performance.now();
  expect(hung.flush()).toBe(false); // known to hang: not waited for again
  expect(performance.now() - secondFlush).toBeLessThan(1900);
  expect(performance.now() - started).toBeLessThan(60_000);
  expect(hung.drops).toBeGreaterThan(1000);
  expect(hung.drops).toBeLessThan(3000);
  expect(logThread.stuck).toBeGreaterThan(3000);
  expect(problems.filter((line) => line.includes('a write does not return'))).toHaveLength(1);

  // When the file system works again, everything that was queued arrives.
  const expected = 1000 * (count - hung.drops);
  for (let received = 0; received < expected; ) received += drain();
  hung.close();
  logThread.close();
  expect(logThread.stuck).toBe(0);
  expect(problems).toContain('log files: writing again');
});
