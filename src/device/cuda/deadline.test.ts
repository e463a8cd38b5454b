import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { build } from 'esbuild';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { withDeadline } from './deadline.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-deadline-'));
const bundle = join(folder, 'deadline.mjs');
beforeAll(async () => {
  const source = fileURLToPath(new URL('./deadline.ts', import.meta.url));
  await build({ entryPoints: [source], bundle: true, platform: 'node', format: 'esm', outfile: bundle });
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** Blocks its thread as a library would. */
const run = (ms: number, blockedMs: number) =>
  spawnSync(
    process.execPath,
    [
      '--input-type=module',
      '-e',
      `import { withDeadline } from ${JSON.stringify(pathToFileURL(bundle))};
       const word = new Int32Array(new SharedArrayBuffer(4));
       withDeadline(${ms}, 'rank 1 does not answer', () => Atomics.wait(word, 0, 0, ${blockedMs}));
       console.log('done');`,
    ],
    { encoding: 'utf8', timeout: 60_000 },
  );

it('ends a process whose only thread is blocked, with the reason', () => {
  const { signal, stdout, stderr } = run(1000, 30_000);
  expect({ signal, stdout, stderr }).toEqual({ signal: 'SIGKILL', stdout: '', stderr: 'rank 1 does not answer\n' });
});

it('lets a call that ends in time go on, and the process end', () => {
  const { status, stdout, stderr } = run(20_000, 300);
  expect({ status, stdout, stderr }).toEqual({ status: 0, stdout: 'done\n', stderr: '' });
  expect(withDeadline(1000, '', () => 42)).toBe(42);
  expect(() =>
    withDeadline(1000, '', () => {
      throw new Error('its own');
    }),
  ).toThrow('its own');
});
