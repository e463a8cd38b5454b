import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { expect, test } from 'vitest';
import { isAlive, ownIdentity, pidExists } from './process-identity.js';
import { procAbsence } from './testing/cpu-time.js';

test('this process is alive', () => {
  const own = ownIdentity();
  expect(own.pid).toBe(process.pid);
  expect(isAlive(own)).toBe(true);
  if (!procAbsence) expect(own.process_start).toBeGreaterThan(0);
});

test('a process that has ended is not', async () => {
  const child = spawn(process.execPath, ['-e', 'setInterval(() => {}, 1000)']);
  const identity = { ...ownIdentity(), pid: child.pid!, process_start: null };
  expect(isAlive(identity)).toBe(true);
  child.kill('SIGKILL');
  await once(child, 'exit');
  expect(isAlive(identity)).toBe(false);
  expect(pidExists(child.pid!)).toBe(false);
});

test('another process with the same pid is told apart by its start, or by the start of the machine', ({ skip }) => {
  if (procAbsence) return skip(procAbsence);
  const own = ownIdentity();
  expect(isAlive({ ...own, process_start: own.process_start! - 1 })).toBe(false);
  expect(isAlive({ ...own, boot_id: 'another boot' })).toBe(false);
});

test('a zombie does nothing any more', async ({ skip }) => {
  if (procAbsence) return skip(procAbsence);
  // The shell's child ends while the shell, turned into `sleep`, never collects it.
  const shell = spawn('sh', ['-c', 'sleep 0.3 & echo $!; exec sleep 30']);
  const pid = Number(String((await once(shell.stdout, 'data'))[0]));
  try {
    await expect.poll(() => readFileSync(`/proc/${pid}/stat`, 'utf8')).toContain(') Z ');
    expect(pidExists(pid)).toBe(true);
    expect(isAlive({ ...ownIdentity(), pid, process_start: null })).toBe(false);
  } finally {
    shell.kill('SIGKILL');
  }
});

test('nothing is known of another host, and no pid is never alive', () => {
  expect(isAlive({ ...ownIdentity(), host: 'elsewhere' })).toBeUndefined();
  for (const pid of [0, -1, 1.5, Number.NaN]) expect(pidExists(pid)).toBe(false);
});
