/** Signals during work that blocks the event loop, in the built program. */
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout } from 'node:timers/promises';
import { pathToFileURL } from 'node:url';
import { afterAll, describe, expect, it } from 'vitest';
import { pidExists } from '../process-identity.js';
import { ended, startProgram, startTrefoil, trefoilMain } from '../testing/cli.js';
import { cpuSeconds, procAbsence } from '../testing/cpu-time.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-interrupt-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** Blocks its only JavaScript thread for ten minutes, longer than this test waits. */
function blockingProgram(): string {
  const path = join(folder, 'blocking.mjs');
  const url = pathToFileURL(join(trefoilMain(), '..', 'shared', 'blocking.js')).href;
  writeFileSync(
    path,
    `import { writeSync } from 'node:fs';
import { runBlocking } from ${JSON.stringify(url)};
process.on('SIGINT', () => console.error('a handler in JavaScript'));
const cell = new Int32Array(new SharedArrayBuffer(4));
runBlocking(() => {
  writeSync(1, 'blocked');
  Atomics.wait(cell, 0, 0, 600_000);
});`,
  );
  return path;
}

function textOf(stream: NodeJS.ReadableStream): { text: string } {
  const heard = { text: '' };
  stream.on('data', (chunk) => {
    heard.text += chunk;
  });
  return heard;
}

describe('a command whose kernels block the event loop', () => {
  it.each([
    ['SIGINT', 'trefoil: interrupted\n'],
    ['SIGTERM', 'trefoil: ended by SIGTERM\n'],
  ] as const)('ends on %s at once, with one line', async (signal, line) => {
    const child = startProgram(process.execPath, [blockingProgram()]);
    const [out, err] = [textOf(child.stdout!), textOf(child.stderr!)];
    while (out.text !== 'blocked') await setTimeout(50);
    child.kill(signal);
    // Ended by the signal itself, which a shell reports as 130 and 143.
    expect(await ended(child)).toEqual({ code: null, signal });
    expect(err.text.replace(/^compiling kernels.*\n/gm, '')).toBe(line);
  });

  it('bench decode says that it was interrupted', async ({ skip }) => {
    if (procAbsence) return skip(procAbsence);
    const child = startTrefoil(['bench', 'decode', '--device', 'cpu', '--lengths', '65536,131072']);
    const [out, err] = [textOf(child.stdout!), textOf(child.stderr!)];
    // Three seconds of computing are past the start of the program and inside the measurement.
    while (cpuSeconds(child.pid!) < 3) await setTimeout(100);
    child.kill('SIGINT');
    expect(await ended(child)).toEqual({ code: null, signal: 'SIGINT' });
    expect(out.text).toBe('');
    expect(err.text).toMatch(/trefoil: interrupted\n$/);
  });
});

describe('a compilation of all kernels', () => {
  it.each(['SIGINT', 'SIGTERM'] as const)('is ended by %s, and the compilers with it', async (signal) => {
    const [slow, pids] = [join(folder, 'slow'), join(folder, `pids-${signal}`)];
    const script = `[ "$1" = --version ] && echo slow 1.0 && exit 0\necho $$ >> ${pids}\nexec sleep 600\n`;
    writeFileSync(slow, `#!/bin/sh\n${script}`, { mode: 0o755 });
    const env = { CXX: slow, TREFOIL_CACHE: join(folder, `cache-${signal}`) };
    const child = startTrefoil(['doctor', '--compile'], env);
    const err = textOf(child.stderr!);
    while (!existsSync(pids)) await setTimeout(50);
    child.kill(signal);
    expect(await ended(child)).toEqual({ code: 4, signal: null });
    expect(err.text).toContain(`interrupted (${signal}) while compiling `);
    for (const pid of readFileSync(pids, 'utf8').trim().split('\n')) expect(pidExists(Number(pid))).toBe(false);
  });
});

describe('train without a terminal', () => {
  it('ignores SIGHUP, because Node resets what nohup has set', async () => {
    const size = ['--config', 'quickstart', '--seq-len', '64', '--batch-size', '1', '--steps', '100000'];
    const child = startTrefoil(['train', ...size, '--set', 'train.log_every=1', '--out-dir', join(folder, 'run')]);
    const [out, err] = [textOf(child.stdout!), textOf(child.stderr!)];
    const until = async (isReached: () => boolean) => {
      while (!isReached() && child.exitCode === null && child.signalCode === null) await setTimeout(50);
    };
    await until(() => out.text.includes('step 0002'));
    child.kill('SIGHUP');
    await until(() => err.text.includes('SIGHUP: ignored'));
    child.kill('SIGTERM');
    expect(await ended(child)).toEqual({ code: 4, signal: null });
    expect(out.text).toContain('by SIGTERM');
    expect(`${out.text}${err.text}`).not.toContain('█');
  });
});
