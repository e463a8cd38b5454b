/** Processes with different host names, before their run has files: only their guards show whether they run. */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { connect, createServer, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { freeStorePort } from '../../testing/store-port.js';
import { Pulse, type Silence } from './pulse.js';
import { storePorts } from './store.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-pulse-'));
const children = new Set<ChildProcess>();
const sockets = new Set<Socket>();
beforeAll(async () => {
  for (const [name, outfile] of [
    ['testing/guarded', 'guarded.js'],
    ['guard-thread', 'guard-thread.js'],
  ]) {
    const source = fileURLToPath(new URL(`./${name}.ts`, import.meta.url));
    const settings = { bundle: true, platform: 'node', format: 'esm', packages: 'external' } as const;
    await build({ entryPoints: [source], outfile: join(folder, outfile), ...settings });
  }
});
afterAll(() => {
  for (const child of children) child.kill('SIGKILL');
  for (const socket of sockets) socket.destroy();
  rmSync(folder, { recursive: true, force: true });
});

/** Far more than a busy machine keeps a thread waiting. */
const LIMIT_S = 10;
/** Seconds that are allowed beyond the limit. */
const PROMISED_S = 30;

type Does = 'waits' | 'busy';

/** Starts a rank for each of `does`, all on hosts of their own; returns their processes and the last line of each. */
async function startRanks(does: readonly Does[], seconds: number) {
  const members = does.map((_, rank) => ({ host: `machine${rank}`, pid: rank + 1 }));
  const ports = storePorts(await freeStorePort());
  let lifeline: unknown = null;
  const ranks: { child: ChildProcess; last: Promise<string> }[] = [];
  for (const [rank, what] of does.entries()) {
    const options = { rank, members, timeoutSeconds: LIMIT_S, ports, lifeline, does: what, seconds, key: 'pulse' };
    const words = [join(folder, 'guarded.js'), JSON.stringify(options)];
    const child = spawn(process.execPath, words, { stdio: ['ignore', 'pipe', 'inherit'] });
    children.add(child);
    const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
    const offered = JSON.parse((await lines.next()).value);
    if (rank === 0) lifeline = offered;
    ranks.push({ child, last: lines.next().then(({ value }) => value) });
  }
  await sleep(2000); // all guards have connected
  return ranks;
}

async function expectNamed(last: Promise<string>, lost: number): Promise<void> {
  const said = await last;
  expect(said).toMatch(
    new RegExp(
      `: rank ${lost} on machine${lost} \\(pid ${lost + 1}, no section known\\): kept the other ranks waiting`,
    ),
  );
  const [, seconds] = said.match(/^after (\d+) s/)!;
  expect(Number(seconds)).toBeGreaterThanOrEqual(LIMIT_S);
}

// Concurrent: all of them mostly wait.
describe.concurrent('a rank on another machine, before the run has files', () => {
  it('is named by all others when it is stopped', async () => {
    const [first, lost, third] = await startRanks(['waits', 'busy', 'waits'], 600);
    lost.child.kill('SIGSTOP');
    const stopped = performance.now();
    for (const { last } of [first, third]) await expectNamed(last, 1);
    expect((performance.now() - stopped) / 1000).toBeLessThan(LIMIT_S + PROMISED_S);
  });

  it('is named when it is stopped and is rank 0, which holds the lifelines', async () => {
    const [lost, second, third] = await startRanks(['busy', 'waits', 'waits'], 600);
    lost.child.kill('SIGSTOP');
    for (const { last } of [second, third]) await expectNamed(last, 0);
  });

  it('is waited for as long as it runs, however busy it is', async () => {
    const ranks = await startRanks(['waits', 'busy', 'waits'], 2.5 * LIMIT_S);
    for (const { last } of ranks) expect(await last).toMatch(/^after \d+ s: no rank was lost$/);
  });

  it('is not named for the time in which the waiting rank was stopped', async () => {
    const [first, , third] = await startRanks(['waits', 'busy', 'busy'], 2.5 * LIMIT_S);
    first.child.kill('SIGSTOP');
    await sleep(1200 * LIMIT_S);
    first.child.kill('SIGCONT');
    for (const { last } of [first, third]) expect(await last).toMatch(/^after \d+ s: no rank was lost$/);
  });
});

it('a closed connection does not count as silence', async () => {
  let heard: Silence | null = null;
  const pulse = new Pulse(20, (longest) => {
    heard = longest;
  });
  const server = createServer((socket) => {
    socket.on('error', () => {}); // 'close' is what counts
    pulse.follow(1, socket); // one that never beats
  });
  server.listen(0, '127.0.0.1');
  await new Promise((resolve) => server.once('listening', resolve));
  const { port } = server.address() as { port: number };
  const other = connect({ host: '127.0.0.1', port }).resume();
  sockets.add(other);
  await expect.poll(() => heard).toMatchObject({ rank: 1 });
  await expect.poll(() => heard!.ms).toBeGreaterThan(200);
  other.destroy();
  await expect.poll(() => heard).toBeNull();
  server.close();
});
