import { spawnSync } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { mkdirSync, mkdtempSync, readFileSync, renameSync, symlinkSync, unlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { runCli } from '../cli/testing/run.js';
import { findCheckpoint } from '../run/checkpoint/read.js';
import { saveCheckpoint } from '../run/checkpoint/save.js';
import { runPaths } from '../run/paths.js';
import { temporaryFolder } from '../testing/run.js';
import { backupRun } from './backup.js';

let folder: { path: string; remove: () => void };
let run: string;
beforeEach(() => {
  folder = temporaryFolder();
  run = join(folder.path, 'run');
  mkdirSync(join(run, 'tb'), { recursive: true });
  writeFileSync(join(run, 'tb', 'events'), 'events');
  writeFileSync(join(run, '.lock'), 'of this machine only');
  writeFileSync(runPaths(run).training, 'step,loss,lr,toks_per_s\n1,2,3,4\n2,3,');
});
afterEach(() => folder.remove());

const BYTES = 1_000_000;

function save(step: number, keepLast: number): void {
  const data = Uint8Array.from({ length: BYTES }, (_, i) => (i * step) % 251);
  const tensor = { name: 'w', dtype: 'U8', shape: [BYTES], data } as const;
  saveCheckpoint(run, step, { model: [tensor], optimizer: [tensor] }, { step }, { keepLast });
}

/** Unpacks an archive; returns the run's folder and the names in it. */
function unpacked(archive: string): { path: string; names: string[] } {
  const out = mkdtempSync(join(folder.path, 'out-'));
  const { status, stdout, stderr } = spawnSync('tar', ['-xvzf', archive, '-C', out], { encoding: 'utf8' });
  expect(status, stderr).toBe(0);
  return { path: join(out, 'run'), names: stdout.trim().split('\n').sort() };
}

it('takes the newest checkpoint or all or none, whole lines, and nothing of this machine only', async () => {
  save(1, 5);
  save(2, 5);
  const archive = (choice: string) => join(folder.path, `${choice}.tar.gz`);
  for (const [choice, steps] of [
    ['latest', [2]],
    ['all', [2, 1]],
    ['none', []],
  ] as const) {
    const result = await backupRun(run, archive(choice), choice);
    expect(result).toMatchObject({ checkpoints: steps, missed: [] });
    const { path, names } = unpacked(archive(choice));
    expect(names).toHaveLength(result.files);
    expect(names.filter((name) => !name.includes('checkpoints'))).toEqual(['run/tb/events', 'run/training.csv']);
    expect(readFileSync(runPaths(path).training, 'utf8')).toBe('step,loss,lr,toks_per_s\n1,2,3,4\n');
    expect(findCheckpoint(path, 'auto')?.step).toBe(steps[0]);
    if (steps.length > 0) expect(findCheckpoint(path, join(runPaths(path).checkpoints, 'latest'))?.step).toBe(2);
  }
});

it('has the log, and names what a restored run needs from elsewhere', async () => {
  writeFileSync(runPaths(run).log, 'step 0001 | loss 5\n');
  const tokenizer = join(folder.path, 'tokenizer.json');
  writeFileSync(tokenizer, '{}');
  writeFileSync(runPaths(run).config, `data: {source: jsonl, path: texts, tokenizer: ${tokenizer}}\n`);
  const archive = join(folder.path, 'log.tar.gz');
  const { elsewhere } = await backupRun(run, archive, 'none');
  expect(elsewhere).toEqual(['data.path texts', `data.tokenizer ${tokenizer}`]);
  expect(unpacked(archive).names).toEqual(expect.arrayContaining(['run/config.yaml', 'run/run.log']));
});

it('follows no symbolic links: names those of the run, and is refused for those of checkpoints', async () => {
  save(1, 5);
  const secret = join(folder.path, 'secret');
  writeFileSync(secret, 'of the user');
  symlinkSync(secret, join(run, 'notes'));
  symlinkSync(folder.path, join(run, '\u001b[31mabove'));
  symlinkSync('.', join(run, 'tb', 'around'));
  const archive = join(folder.path, 'links.tar.gz');
  const { elsewhere, files } = await backupRun(run, archive, 'latest');
  expect(elsewhere).toEqual(
    ['run/\u001b[31mabove', 'run/notes', 'run/tb/around'].map((name) => `${name}, a symbolic link`),
  );
  expect(unpacked(archive).names).toHaveLength(files);
  const shown = await runCli(['backup', '--dir', run, '--out', join(folder.path, 'shown.tar.gz')]);
  expect(shown.stdout).toContain('not in the archive: run/\u241b[31mabove, a symbolic link\n');
  expect(files).toBe(7); // four of the checkpoint, latest, training.csv and events

  const { checkpoints } = runPaths(run);
  const refused = (path: string) =>
    expect(backupRun(run, join(folder.path, 'refused.tar.gz'), 'all')).rejects.toMatchObject({
      exitCode: 2,
      message: expect.stringContaining(`${path}: is a symbolic link`),
    });
  const weights = join(checkpoints, 'step-1', 'model.safetensors');
  for (const path of [weights, join(checkpoints, 'step-1'), checkpoints]) {
    const aside = join(folder.path, 'aside');
    renameSync(path, aside);
    symlinkSync(aside, path);
    await refused(path);
    unlinkSync(path);
    renameSync(aside, path);
  }
});

it('leaves no listeners behind, however many writes wait', async () => {
  writeFileSync(join(run, 'large.bin'), randomBytes(24 * 1024 * 1024)); // 24 writes that do not compress
  const warnings: Error[] = [];
  const onWarning = (warning: Error) => void warnings.push(warning);
  process.on('warning', onWarning);
  try {
    await backupRun(run, join(folder.path, 'large.tar.gz'), 'none');
    await new Promise((resolve) => setImmediate(resolve)); // warnings are emitted on the next tick
  } finally {
    process.off('warning', onWarning);
  }
  expect(warnings).toEqual([]);
});

it('holds a whole checkpoint also when the run deletes it while it is read', async () => {
  save(1, 1);
  let isOver = false;
  const archive = join(folder.path, 'moving.tar.gz');
  const backup = backupRun(run, archive, 'latest').finally(() => {
    isOver = true;
  });
  // A run that saves as fast as it can and keeps only the newest.
  let step = 1;
  while (!isOver) {
    save(++step, 1);
    await new Promise((resolve) => setImmediate(resolve));
  }
  const { checkpoints, missed } = await backup;
  expect(step).toBeGreaterThan(checkpoints[0] + 1); // what was taken is gone
  expect(missed).toEqual([]);
  expect(findCheckpoint(unpacked(archive).path, 'auto')).toMatchObject({ step: checkpoints[0], skipped: [] });
});
