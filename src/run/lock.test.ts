import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, utimesSync, writeFileSync } from 'node:fs';
import { hostname, tmpdir } from 'node:os';
import { join } from 'node:path';
import { build } from 'esbuild';
import { afterAll, beforeAll, beforeEach, expect, test } from 'vitest';
import { UsageError } from '../errors.js';
import { ownIdentity } from '../process-identity.js';
import { acquireLock, readLockOwner } from './lock.js';

let folder: string;
let path: string;
let program: string;

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-lock-'));
  program = join(folder, 'child.mjs');
  await build({
    stdin: {
      // Says what came of it when told to begin, and holds the lock until it is killed.
      contents: `
        import { acquireLock } from './lock.js';
        console.log('ready');
        process.stdin.once('data', () => {
          try { acquireLock(process.argv[2]); console.log('held'); }
          catch (error) { console.log('refused ' + error.message); }
        });`,
      resolveDir: import.meta.dirname,
      loader: 'ts',
    },
    bundle: true,
    platform: 'node',
    format: 'esm',
    outfile: program,
  });
});
beforeEach(() => {
  path = join(mkdtempSync(join(folder, 'run-')), '.lock');
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

async function startChild(): Promise<ChildProcess> {
  const child = spawn(process.execPath, [program, path], { stdio: ['pipe', 'pipe', 'inherit'] });
  await once(child.stdout!, 'data');
  return child;
}

async function answer(child: ChildProcess): Promise<string> {
  child.stdin!.write('go\n');
  return String((await once(child.stdout!, 'data'))[0]).trim();
}

async function kill(child: ChildProcess): Promise<void> {
  child.kill('SIGKILL');
  await once(child, 'exit');
}

function writeLock(content: object): void {
  const owner = { ...ownIdentity(), run_start: '2024-01-01T00:00:00.000Z', nonce: 'n', ...content };
  writeFileSync(path, JSON.stringify(owner));
}

test('a lock names its owner, refuses a second one, and is gone after release', () => {
  const lock = acquireLock(path);
  expect(readLockOwner(path)).toMatchObject({ pid: process.pid, host: hostname(), alive: true });
  expect(() => acquireLock(path)).toThrow(UsageError);
  expect(() => acquireLock(path)).toThrow(`in use by process ${process.pid} on ${hostname()}`);
  lock.release();
  expect(existsSync(path)).toBe(false);
  expect(readLockOwner(path)).toBeUndefined();
  acquireLock(path).release();
});

test('releasing twice does not remove the lock of the next one', () => {
  const first = acquireLock(path);
  first.release();
  const second = acquireLock(path);
  first.release();
  expect(readLockOwner(path)?.nonce).toBe(second.owner.nonce);
});

test('the lock of another process holds while it lives and is taken over when it was killed', async () => {
  const child = await startChild();
  expect(await answer(child)).toBe('held');
  expect(() => acquireLock(path)).toThrow(`process ${child.pid} on`);
  await kill(child);
  expect(readLockOwner(path)?.alive).toBe(false);
  const lock = acquireLock(path);
  expect(readLockOwner(path)?.pid).toBe(process.pid);
  lock.release();
});

test('a reused pid does not keep the lock', () => {
  writeLock({ process_start: 1 });
  acquireLock(path).release();
});

test('a lock of another host is never taken over, and the message says what to do', () => {
  writeLock({ host: 'node7', pid: 12 });
  expect(() => acquireLock(path)).toThrow('process 12 on node7');
  expect(() => acquireLock(path)).toThrow(`if that run is gone, delete ${path}`);
});

test('an empty or damaged lock is taken over once it is old', () => {
  for (const content of ['', '{"pid":', '{}', '[1]']) {
    writeFileSync(path, content);
    utimesSync(path, 1, 1);
    expect(readLockOwner(path)).toBeUndefined();
    acquireLock(path).release();
  }
});

test('a folder that is not there is named', () => {
  expect(() => acquireLock(join(folder, 'none', '.lock'))).toThrow('no such file or folder');
});

test('a remover that died in the middle does not block the folder', () => {
  writeLock({ process_start: 1 });
  writeFileSync(`${path}.takeover`, readFileSync(path));
  writeFileSync(`${path}.takeover.takeover`, '');
  utimesSync(`${path}.takeover.takeover`, 1, 1);
  acquireLock(path).release();
  expect(readdirSync(join(path, '..'))).toEqual([]);
});

test('of many that take over a dead lock at once exactly one succeeds', async () => {
  for (let round = 0; round < 5; round++) {
    writeLock({ process_start: 1, nonce: `dead ${round}` });
    const children = await Promise.all(Array.from({ length: 6 }, startChild));
    const answers = await Promise.all(children.map(answer));
    expect(answers.filter((text) => text === 'held')).toHaveLength(1);
    const winner = children[answers.indexOf('held')];
    for (const text of answers) if (text !== 'held') expect(text).toContain(`in use by process ${winner.pid} on`);
    expect(readLockOwner(path)?.pid).toBe(winner.pid);
    await Promise.all(children.map(kill));
  }
});
