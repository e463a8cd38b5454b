/** Processes whose main thread is blocked, as CUDA or NCCL would block it, and their guard. */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { hostname, tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { build } from 'esbuild';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { tailHeartbeats } from '../../run/logs/heartbeat.js';
import { openHeartbeats, openSection } from '../../run/logs/log.js';
import { readAnomaly, runPaths } from '../../run/paths.js';
import { readJsonFile } from '../../run/reader.js';
import { ended } from '../../testing/cli.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-guard-'));
const DEAD = 2 ** 22 + 1; // above the highest pid of Linux
// Far more than a busy machine keeps a thread waiting.
const QUIET_MS = 4000;
const LIMIT_S = 8;
const LEAVE_MS = 12_000;

beforeAll(async () => {
  for (const name of ['guard', 'guard-thread']) {
    const source = fileURLToPath(new URL(`./${name}.ts`, import.meta.url));
    const settings = { bundle: true, platform: 'node', format: 'esm', packages: 'external' } as const;
    await build({ entryPoints: [source], outfile: join(folder, `${name}.js`), ...settings });
  }
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

interface Ended {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
  readonly stdout: string;
  readonly stderr: string;
  readonly seconds: number;
}

/** A process of rank 0 that does `work` with its guard and `block(ms)`; rank 1 is the process `pid` on `host`. */
function start(work: string, pid: number, host = hostname()): { child: ChildProcess; result: Promise<Ended> } {
  const members = [
    { host: hostname(), pid: process.pid },
    { host, pid },
  ];
  const options = { rank: 0, members, timeoutSeconds: LIMIT_S, quietMs: QUIET_MS, leaveMs: LEAVE_MS, key: 'unused' };
  const program = `
    import { RankGuard } from ${JSON.stringify(pathToFileURL(join(folder, 'guard.js')))};
    const block = (ms) => Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);
    const guard = await RankGuard.start(${JSON.stringify(options)});
    ${work}
    guard.close();
    console.log('done');`;
  const started = performance.now();
  const child = spawn(process.execPath, ['--input-type=module', '-e', program], { stdio: ['ignore', 'pipe', 'pipe'] });
  let [stdout, stderr] = ['', ''];
  child.stdout.setEncoding('utf8').on('data', (text: string) => {
    stdout += text;
  });
  child.stderr.setEncoding('utf8').on('data', (text: string) => {
    stderr += text;
  });
  const result = ended(child).then((end) => ({
    ...end,
    stdout,
    stderr,
    seconds: (performance.now() - started) / 1000,
  }));
  return { child, result };
}

const LONG = 'block(300_000);';

// Concurrent: all of them mostly wait.
describe.concurrent('the guard of a blocked process', () => {
  it('names a rank that has exited and kills the process, in every phase', async () => {
    const all = await Promise.all(
      ['join', 'exchange'].map((phase) => start(`guard.begin('${phase}'); ${LONG}`, DEAD).result),
    );
    for (const { signal, stdout, stderr, seconds } of all) {
      expect({ signal, stdout }).toEqual({ signal: 'SIGKILL', stdout: '' });
      const who = `rank 1 on ${hostname()} (pid ${DEAD}, no section known)`;
      expect(stderr).toBe(`trefoil: rank 0: ${who}: its process is gone (this rank was blocked and is killed)\n`);
      expect(seconds).toBeLessThan(150);
    }
  });

  it('names the section of the lost rank from the files of the run, and writes the end', async () => {
    const paths = runPaths(folder);
    openSection(paths.section(1), 1).write({ section: 'save', step: 12 });
    const beats = openHeartbeats(paths.heartbeat(0), 0, { world: 2 });
    beats.write({ step: 12, msg: 'progress' });
    beats.close();
    const watch = `guard.watch(${JSON.stringify(paths)});`;
    const { signal, stderr } = await start(`${watch} guard.begin('exchange'); ${LONG}`, process.pid).result;
    expect(signal).toBe('SIGKILL');
    expect(stderr).toMatch(
      /rank 1 on \S+ \(pid \d+, section save at step 12\): kept the other ranks waiting for \d+ s/,
    );
    expect(readAnomaly(folder)).toBe('rank_stall');
    const end = { status: 'failed', exit_code: 137 };
    const error = expect.stringMatching(/^rank 1 on .*kept the other ranks waiting/);
    expect(tailHeartbeats(paths.heartbeat(0), 1)[0]).toMatchObject({ msg: 'halt', step: 12, ...end, detail: error });
    expect(readJsonFile(paths.metrics)).toEqual({ ...end, error, step: 12 });
  });

  it('kills a process that waits too long although no rank is known to be lost', async () => {
    const calls = [
      ['join', `NCCL did not reach the other ranks within ${LIMIT_S} s`],
      ['exchange', `a CUDA or NCCL call did not return within ${LIMIT_S} s`],
      ['leave', `leaving NCCL took longer than ${LEAVE_MS / 1000} s`],
    ];
    const all = await Promise.all(
      calls.map(([phase]) => start(`guard.begin('${phase}'); ${LONG}`, 1, 'elsewhere').result),
    );
    all.forEach(({ signal, stderr }, i) => {
      expect(signal).toBe('SIGKILL');
      expect(stderr).toContain(calls[i][1]);
    });
  });

  it('leaves a process alone that does not wait, that makes progress, or whose peers have finished', async () => {
    const all = await Promise.all([
      start('block(12_000);', DEAD).result,
      start("guard.begin('exchange'); guard.end(); block(12_000);", DEAD).result,
      start("guard.begin('exchange'); for (let i = 0; i < 50; i++) { guard.moved(); block(200); }", DEAD).result,
      start("guard.begin('leave'); block(1000);", DEAD).result,
    ]);
    for (const { code, stdout, stderr } of all)
      expect({ code, stdout, stderr }).toEqual({ code: 0, stdout: 'done\n', stderr: '' });
  });

  it('does not count the time in which its own process was stopped', async () => {
    const { child, result } = start(
      "console.log('on'); guard.begin('exchange'); block(1500); guard.end();",
      1,
      'elsewhere',
    );
    await new Promise<void>((resolve) => child.stdout!.once('data', () => resolve()));
    child.kill('SIGSTOP');
    await sleep(1000 * LIMIT_S + QUIET_MS + 1500);
    child.kill('SIGCONT');
    expect(await result).toMatchObject({ code: 0, stdout: 'on\ndone\n', stderr: '' });
  });
});
