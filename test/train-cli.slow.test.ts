/** `trefoil train` as a person runs it: exit codes, faults, messages. */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, truncateSync, writeFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { join } from 'node:path';
import { setTimeout } from 'node:timers/promises';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { cudaAbsence } from '../src/device/cuda/cuda.js';
import { findCheckpoint } from '../src/run/checkpoint/read.js';
import { readCsv, TRAINING_CSV } from '../src/run/logs/csv.js';
import { runPaths } from '../src/run/paths.js';
import { ended, startTrefoil, trefoil } from '../src/testing/cli.js';
import { type TinyOverrides, temporaryFolder, tinyConfig } from '../src/testing/run.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

/** Writes a config file; returns its path and the run's folder. */
function prepare(overrides: TinyOverrides = {}) {
  const config = tinyConfig(folder.path, overrides);
  const file = join(folder.path, 'config.yaml');
  writeFileSync(file, stringify(config));
  return { file, outDir: config.train.out_dir };
}

/** Resolves when the child has printed a line that starts so. */
function printed(child: ReturnType<typeof startTrefoil>, start: string): Promise<void> {
  return new Promise((resolve, reject) => {
    let text = '';
    child.stdout!.on('data', (chunk) => {
      text += chunk;
      if (text.split('\n').some((line) => line.startsWith(start))) resolve();
    });
    child.once('close', () => reject(new Error(`ended before "${start}":\n${text}`)));
  });
}

describe('trefoil train', () => {
  it('trains, and generate continues a text with the result', async () => {
    const { file, outDir } = prepare();
    const run = await trefoil(['train', '--config', file, '--json']);
    expect(run.code, run.stderr).toBe(0);
    expect(JSON.parse(run.stdout)).toEqual({
      status: 'done',
      step: 12,
      out_dir: outDir,
      first_loss: expect.any(Number),
      last_loss: expect.any(Number),
      val_loss: expect.any(Number),
    });
    const text = await trefoil([
      'generate',
      '--model',
      outDir,
      '--prompt',
      'line ',
      '--max-new-tokens',
      '8',
      '--seed',
      '1',
      '--json',
    ]);
    expect(text.code, text.stderr).toBe(0);
    expect(JSON.parse(text.stdout)).toMatchObject({ prompt: 'line ', tokens: expect.any(Number) });
  });

  it('stops by SIGTERM with code 4 after a checkpoint, and says how to go on', async () => {
    const { file, outDir } = prepare({ train: { steps: 100_000, save_every: 0, eval_every: 0 } });
    const child = startTrefoil(['train', '--config', file]);
    let output = '';
    child.stdout!.on('data', (chunk) => {
      output += chunk;
    });
    await printed(child, 'step 0003');
    child.kill('SIGTERM');
    expect(await ended(child)).toEqual({ code: 4, signal: null });
    expect(findCheckpoint(outDir, 'auto')!.step).toBeGreaterThanOrEqual(3);
    expect(output).toContain(`continue with: npx trefoil train --config ${outDir}/config.yaml --resume auto`);
  });

  it('takes Ctrl-C and its echo through npm for one request, and saves', async () => {
    const { file, outDir } = prepare({ train: { steps: 100_000, save_every: 0, eval_every: 0 } });
    const child = startTrefoil(['train', '--config', file]);
    await printed(child, 'step 0003');
    child.kill('SIGINT');
    await setTimeout(20);
    child.kill('SIGINT');
    expect(await ended(child)).toEqual({ code: 4, signal: null });
    expect(findCheckpoint(outDir, 'auto')!.step).toBeGreaterThanOrEqual(3);
  });

  it('halts with code 3, and a non-finite loss ends with code 5', async () => {
    const broken = prepare({ train: { lr: 1e30, grad_clip: 0, warmup_steps: 0 } });
    const run = await trefoil(['train', '--config', broken.file]);
    expect(run.code).toBe(5);
    expect(run.stderr).toContain('the update was not applied');
  });

  it('start prints its config as train does, refuses --json, and then trains nothing', async () => {
    const { file, outDir } = prepare();
    const shown = await trefoil(['start', '--config', file, '--print-config']);
    expect(shown.code, shown.stderr).toBe(0);
    expect(shown.stdout).toMatch(/^key +value +origin\n/);
    const refused = await trefoil(['start', '--config', file, '--json']);
    expect([refused.code, refused.stdout]).toEqual([2, '']);
    expect(refused.stderr).toMatch(/^trefoil: start: --json is not supported/);
    expect(existsSync(outDir)).toBe(false);
  });

  it('keeps two runs out of one folder, naming the owner', async () => {
    const { file } = prepare({ train: { steps: 100_000, save_every: 0, eval_every: 0 } });
    const first = startTrefoil(['train', '--config', file]);
    await printed(first, 'step 0002');
    const second = await trefoil(['train', '--config', file, '--resume', 'auto']);
    expect(second.code).toBe(2);
    expect(second.stderr).toContain(String(first.pid));
    const start = await trefoil(['start', '--config', file]);
    expect(start.code).toBe(2);
    expect(start.stderr).toMatch(new RegExp(`the folder is in use by process ${first.pid} on `));
    first.kill('SIGKILL');
    await ended(first);
    const third = startTrefoil(['train', '--config', file, '--resume', 'auto']);
    await printed(third, 'step 0001'); // a dead owner's lock is taken over
    third.kill('SIGKILL');
    await ended(third);
  });

  it('skips a damaged checkpoint by name and takes the one before', async () => {
    const { file, outDir } = prepare({ train: { steps: 12, save_every: 4, eval_every: 0 } });
    expect((await trefoil(['train', '--config', file])).code).toBe(0);
    const checkpoints = runPaths(outDir).checkpoints;
    const model = join(checkpoints, 'step-12', 'model.safetensors');
    const bytes = readFileSync(model);
    bytes[bytes.length - 5] ^= 1;
    writeFileSync(model, bytes);
    truncateSync(join(checkpoints, 'step-8', 'optimizer.safetensors'), 1000);
    const run = await trefoil(['train', '--config', file, '--resume', 'auto', '--steps', '14']);
    expect(run.code, run.stderr).toBe(0);
    expect(run.stderr).toContain('step-12');
    expect(run.stderr).toContain('step-8');
    expect(run.stdout).toContain('at step 4');
    expect(readCsv(runPaths(outDir).training, TRAINING_CSV).rows.map(({ step }) => step)).toEqual(
      Array.from({ length: 14 }, (_, i) => i + 1),
    );
  });

  it('goes on when the disk fills up, and keeps the last good checkpoint', async () => {
    const disk = join(folder.path, 'disk');
    mkdirSync(disk);
    const mounted = spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=1200k', 'tmpfs', disk]);
    if (mounted.status !== 0) {
      console.log('skipped: a small tmpfs cannot be mounted here (needs root)');
      return;
    }
    try {
      const { file, outDir } = prepare({
        model: { dim: 64 }, // a checkpoint takes about 1 MB: the second does not fit
        train: { steps: 9, save_every: 3, eval_every: 0, keep_last: 5, out_dir: join(disk, 'run') },
        runtime: { tensorboard: false },
      });
      const run = await trefoil(['train', '--config', file]);
      expect(run.stderr).toContain('training goes on');
      const checkpoints = readdirSync(runPaths(outDir).checkpoints).filter((name) => name.startsWith('step-'));
      expect(checkpoints).toEqual(['step-3']);
      expect(findCheckpoint(outDir, 'auto')!.step).toBe(3);
      expect(run.stdout).toContain('step 0009');
    } finally {
      spawnSync('umount', [disk]);
    }
  });

  it.each([
    [['train', '--config', 'no-such-config'], 'no-such-config'],
    [['train', '--stepz', '3'], "unknown option '--stepz' (did you mean --steps?)"],
    [['train', '--steps', 'many'], 'train.steps'],
    [['train', '--set', 'train.lr_schedule=cosin'], 'did you mean cosine?'],
    [['train', '--set', 'model.n_kv_groups=5'], 'model.n_kv_groups'],
    [['train', '--dataset', 'text', '--local-path', '/does/not/exist'], '/does/not/exist'],
    [['train', '--config', 'base', '--local-path', '/does/not/exist'], 'no such file or folder: /does/not/exist'],
    [['train', '--dataset', 'synthetic', '--local-path', 'src'], 'data.path: not read by data.source synthetic'],
    [['generate', '--model', '/does/not/exist'], '/does/not/exist'],
    [['frobnicate'], 'frobnicate'],
    ...(cudaAbsence() === null ? [] : [[['train', '--device', 'cuda'], 'cuda'] as [string[], string]]),
  ])('%j: one line, code 2, no stack, nothing created', async (args, message) => {
    const out = join(folder.path, 'new');
    const run = await trefoil(args[0] === 'train' ? [...args, '--out-dir', out] : args);
    expect(run.code).toBe(2);
    expect(run.stderr).toContain(message);
    expect(run.stderr).not.toMatch(/\n {4}at /);
    expect(existsSync(out)).toBe(false);
  });

  it('shows every value of the config and where it came from', async () => {
    const run = await trefoil(['train', '--config', 'small_smoke', '--steps', '7', '--print-config', '--json'], {
      env: { NSA_LR: '0.01' },
    });
    const rows = JSON.parse(run.stdout) as { key: string; value: unknown; origin: string }[];
    const find = (key: string) => rows.find((row) => row.key === key);
    expect(find('train.steps')).toEqual({ key: 'train.steps', value: 7, origin: 'flag --steps' });
    expect(find('train.lr')).toEqual({ key: 'train.lr', value: 0.01, origin: 'env NSA_LR' });
    expect(find('model.dim')!.origin).toContain('small_smoke');
    expect(find('train.eps')!.origin).toBe('default');
  });
});

describe('an empty kernel cache', () => {
  it('is filled by as many compilers as there are cores', async ({ skip }) => {
    if (availableParallelism() === 1) skip('this machine has one core');
    const { file } = prepare();
    const [compiler, log] = [join(folder.path, 'compiler'), join(folder.path, 'log')];
    // Each waits until another one has begun, then fails: compilers that run one after the other would wait in vain.
    const script = `[ "$1" = --version ] && echo 1.0 && exit 0
echo begun >> ${log}
for i in $(seq 600); do [ $(wc -l < ${log}) -gt 1 ] && break; sleep 0.1; done
wc -l < ${log} >&2
exit 1`;
    writeFileSync(compiler, `#!/bin/sh\n${script}\n`, { mode: 0o755 });
    const env = { CXX: compiler, TREFOIL_CACHE: join(folder.path, 'cache') };
    const { code, stderr } = await trefoil(['train', '--config', file], { env });
    expect(code, stderr).not.toBe(0);
    expect(readFileSync(log, 'utf8').split('\n').length, stderr).toBeGreaterThan(2);
    expect(stderr).not.toMatch(/^1$/m);
  });
});
