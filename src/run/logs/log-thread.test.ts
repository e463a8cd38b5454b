/** The log thread against files that hang: a FIFO without a reader, whose writer blocks once the pipe is full. */
import { spawnSync } from 'node:child_process';
import { constants, mkdtempSync, openSync, readSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { readCsv, TRAINING_CSV } from './csv.js';
import { readSection } from './heartbeat.js';
import { openCsv, openSection } from './log.js';
import { LogThread } from './log-thread.js';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-logs-'));
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

const schema = { step: 'integer', filler: 'text' } as const;
/** A record whose row has 1000 bytes. */
const record = (i: number) => ({ step: 10_000 + i, filler: 'x'.repeat(993) });

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
  const csv = openCsv(join(folder, 'training.csv'), TRAINING_CSV, { logThread });
  const section = openSection(join(folder, '.section'), 0, { logThread });
  for (let step = 1; step <= 500; step++) csv.write({ step, loss: 1 / step, lr: 1, toks_per_s: 1 });
  section.write({ section: 'step', step: 500 });
  expect(csv.flush()).toBe(true);
  expect(readCsv(csv.path, TRAINING_CSV)).toMatchObject({ badLines: 0, rows: { length: 500 } });
  expect(readSection(join(folder, '.section'))).toMatchObject({ section: 'step', step: 500 });
  csv.write({ step: 501, loss: 1, lr: 1, toks_per_s: 1 });
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
  const hung = logThread.open<ReturnType<typeof record>>(file, { kind: 'csv', schema });
  const started = performance.now();
  const count = 7000; // more than the pipe and the queue hold
  for (let i = 0; i < count; i++) hung.write(record(i));
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
