import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { hostname } from 'node:os';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { pidExists, processState } from '../../process-identity.js';
import { openSection } from '../../run/logs/log.js';
import { runPaths } from '../../run/paths.js';
import { procAbsence } from '../../testing/cpu-time.js';
import { temporaryFolder } from '../../testing/run.js';
import { RankLost, RankMonitor } from './monitor.js';

const NOW = 1_700_000_000_000;
const DEAD = 2 ** 22 + 1; // above the highest pid of Linux
let folder: ReturnType<typeof temporaryFolder>;
let recorded: boolean[];

beforeEach(() => {
  folder = temporaryFolder();
  recorded = [];
});
afterEach(() => folder.remove());

function monitor(pids: readonly number[] = [process.pid, process.pid, process.pid]): RankMonitor {
  const members = pids.map((pid) => ({ host: hostname(), pid }));
  const one = new RankMonitor({ rank: 0, members, timeoutSeconds: 10, clock: () => NOW });
  one.watch({ paths: runPaths(folder.path), waiting: (isWaiting) => void recorded.push(isWaiting) });
  return one;
}

function section(rank: number, name: 'step' | 'wait' | 'fetch', secondsAgo = 0): void {
  const path = runPaths(folder.path).section(rank);
  openSection(path, rank, { clock: () => NOW - 1000 * secondsAgo }).write({ section: name, step: 7 });
}

test('records repeatedly that it waits, and when it has stopped waiting', () => {
  const one = monitor();
  one.look(500);
  expect(recorded).toEqual([]);
  one.look(1200);
  one.look(1400);
  one.resume();
  one.resume();
  expect(recorded).toEqual([true, true, false]);
});

test('names a rank whose process has exited at once, with host and section', () => {
  section(1, 'fetch');
  const look = () => monitor([process.pid, DEAD, process.pid]).look(300);
  expect(look).toThrow(RankLost);
  expect(look).toThrow(`rank 1 on ${hostname()} (pid ${DEAD}, section fetch at step 7): its process is gone`);
});

test('a process on another host is named only after the time limit', () => {
  const members = [
    { host: hostname(), pid: process.pid },
    { host: 'elsewhere', pid: DEAD },
  ];
  const one = new RankMonitor({ rank: 0, members, timeoutSeconds: 10, clock: () => NOW });
  one.watch({ paths: runPaths(folder.path), waiting: () => {} });
  section(1, 'step', 11);
  expect(() => one.look(9_000)).not.toThrow();
  expect(() => one.look(11_000)).toThrow('rank 1 on elsewhere');
});

test('after the time limit the rank that does not wait is named', () => {
  section(1, 'wait');
  section(2, 'step', 11);
  const look = () => monitor().look(10_500);
  expect(look).toThrow(/^rank 2 on .* section step at step 7\): kept the other ranks waiting for 11 s/);
});

test('a rank that stopped while it waited is found by its old section file', () => {
  section(1, 'wait', 8);
  section(2, 'wait', 1);
  expect(() => monitor().look(10_500)).toThrow(/^rank 1 on/);
});

test('when all wait for each other, all are named', () => {
  section(1, 'wait');
  section(2, 'wait');
  expect(() => monitor().look(10_500)).toThrow(
    /^all ranks have been waiting for each other for 11 s: rank 1 .*; rank 2 /,
  );
});

test('before there is a run no rank is named', () => {
  const one = new RankMonitor({ rank: 0, members: [], timeoutSeconds: 1 });
  expect(() => one.look(60_000)).not.toThrow();
});

describe('without the files of a run', () => {
  const at = (pid: number, host = hostname()) =>
    new RankMonitor({
      rank: 0,
      timeoutSeconds: 10,
      members: [
        { host: hostname(), pid: process.pid },
        { host, pid },
      ],
    });

  test('a rank whose process has exited is named', () => {
    expect(() => at(DEAD).look(300)).toThrow(`(pid ${DEAD}, no section known): its process is gone`);
  });

  test('a zombie process counts as exited', async ({ skip }) => {
    if (procAbsence) return skip(procAbsence);
    // The shell's child ends while the shell, turned into `sleep`, never collects it.
    const shell = spawn('sh', ['-c', 'sleep 0.3 & echo $!; exec sleep 30']);
    const zombie = Number(String((await once(shell.stdout, 'data'))[0]));
    try {
      expect(() => at(zombie).look(300)).not.toThrow();
      await expect.poll(() => processState(zombie)).toBe('gone');
      expect(pidExists(zombie)).toBe(true);
      expect(() => at(zombie).look(300)).toThrow('its process is gone');
    } finally {
      shell.kill('SIGKILL');
    }
  });

  test('a rank on any machine whose lifeline has closed is named', () => {
    let gone: number | null = null;
    const members = [process.pid, process.pid, 1].map((pid, rank) => ({
      host: rank === 2 ? 'elsewhere' : hostname(),
      pid,
    }));
    const one = new RankMonitor({ rank: 0, timeoutSeconds: 10, members, gone: () => gone });
    expect(() => one.look(300)).not.toThrow();
    gone = 2;
    expect(() => one.look(300)).toThrow('rank 2 on elsewhere (pid 1, no section known): its process is gone');
  });

  test('a stopped rank is named after the time limit; a running one is not', async ({ skip }) => {
    if (procAbsence) return skip(procAbsence);
    const other = spawn('sleep', ['60'], { stdio: 'ignore' });
    try {
      expect(() => at(other.pid!).look(60_000)).not.toThrow();
      other.kill('SIGSTOP');
      await expect.poll(() => processState(other.pid!)).toBe('stopped');
      expect(() => at(other.pid!).look(9_000)).not.toThrow();
      expect(() => at(other.pid!).look(11_000)).toThrow('no section known): kept the other ranks waiting for 11 s');
      expect(() => at(other.pid!, 'elsewhere').look(60_000)).not.toThrow();
    } finally {
      other.kill('SIGKILL');
    }
  });
});
