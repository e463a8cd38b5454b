/**
 * Checkpoints on a slow disk (train.async_save): training goes on while one is written. A SIGTERM or a SIGKILL in the middle
 * of a save costs nothing that was promised: the end is that of an undisturbed run.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { findCheckpoint } from '../src/run/checkpoint/read.js';
import { tailHeartbeats } from '../src/run/logs/heartbeat.js';
import { runPaths } from '../src/run/paths.js';
import { ended, startTrefoil, trefoilMain } from '../src/testing/cli.js';
import { temporaryFolder, tinyConfig } from '../src/testing/run.js';

const SOURCE = fileURLToPath(new URL('../src/testing/slow-writes.cpp', import.meta.url));
const absence = process.platform === 'linux' ? null : 'the library that slows writes is for Linux';
if (absence) console.warn(`skipped: ${absence}`);
const STEPS = 90;

let folder: ReturnType<typeof temporaryFolder>;
let library: string;
beforeAll(() => {
  trefoilMain();
  folder = temporaryFolder();
  library = join(folder.path, 'slow.so');
  const built = spawnSync('g++', ['-shared', '-fPIC', '-O1', '-o', library, SOURCE, '-ldl'], { encoding: 'utf8' });
  expect(built.status, built.stderr).toBe(0);
});
afterAll(() => folder.remove());

describe.skipIf(absence)(`a save on a slow disk${absence ? ` (skipped: ${absence})` : ''}`, () => {
  const run = (name: string, bytesPerSecond: number) => {
    const train = { steps: STEPS, save_every: 20, eval_every: 0, out_dir: join(folder.path, name) };
    const config = tinyConfig(folder.path, { model: { dim: 64 }, train });
    const file = join(folder.path, `${name}.yaml`);
    writeFileSync(file, stringify(config));
    const env = { LD_PRELOAD: library, SLOW_FILES: '/checkpoints/', SLOW_BYTES_PER_S: String(bytesPerSecond) };
    return { outDir: train.out_dir, start: () => startTrefoil(['train', '--config', file, '--resume', 'auto'], env) };
  };
  const isSaving = (outDir: string) => {
    const { checkpoints } = runPaths(outDir);
    return existsSync(checkpoints) && readdirSync(checkpoints).some((name) => /^\.tmp-20-/.test(name));
  };
  const stepOf = (outDir: string) => tailHeartbeats(runPaths(outDir).heartbeat(0), 1).at(-1)?.step ?? 0;

  it.each(['SIGTERM', 'SIGKILL'] as const)(
    'goes on training, and %s in the middle of it loses nothing',
    async (signal) => {
      const calm = run(`calm ${signal}`, 1e9);
      expect(await ended(calm.start())).toEqual({ code: 0, signal: null });

      const slow = run(`slow ${signal}`, 4e5); // some seconds for a checkpoint
      const child = slow.start();
      const ending = ended(child);
      // Steps after the copy, while the files are being written.
      await expect.poll(() => isSaving(slow.outDir) && stepOf(slow.outDir) > 22, { interval: 5 }).toBe(true);
      child.kill(signal);
      const own = signal === 'SIGTERM' ? { code: 4, signal: null } : { code: null, signal };
      expect(await ending).toEqual(own);
      const found = findCheckpoint(slow.outDir, 'auto');
      expect(found?.skipped ?? []).toEqual([]);
      if (signal === 'SIGTERM') {
        expect(found!.step).toBeGreaterThan(22);
        expect(readdirSync(runPaths(slow.outDir).checkpoints)).toContain('step-20');
      } else expect(found).toBeUndefined();

      const rest = run(`slow ${signal}`, 1e9);
      expect(await ended(rest.start())).toEqual({ code: 0, signal: null });
      const [a, b] = [runPaths(calm.outDir), runPaths(slow.outDir)];
      expect(readFileSync(b.model).equals(readFileSync(a.model))).toBe(true);
      const losses = (path: string) =>
        readFileSync(path, 'utf8')
          .split('\n')
          .map((row) => row.split(',').slice(0, 3).join());
      expect(losses(b.training)).toEqual(losses(a.training));
      expect(readdirSync(b.checkpoints).filter((name) => name.startsWith('.'))).toEqual([]);
    },
    600_000,
  );
});
