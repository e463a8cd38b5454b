import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { UsageError } from '../../errors.js';
import { readSafetensors } from '../safetensors.js';
import { trefoilVersion } from '../version.js';
import { findCheckpoint, readManifest } from './read.js';
import { type CheckpointParts, keepCheckpoint, SaveFailed, saveCheckpoint } from './save.js';

let run: string;
beforeEach(() => {
  run = mkdtempSync(join(tmpdir(), 'trefoil-save-'));
});
afterEach(() => rmSync(run, { recursive: true, force: true }));

function parts(value: number): CheckpointParts {
  const tensor = { name: 'w', dtype: 'U8', shape: [4], data: new Uint8Array(4).fill(value) } as const;
  return { model: [tensor], optimizer: [{ ...tensor, name: 'm' }] };
}

function save(step: number, keepLast?: number): ReturnType<typeof saveCheckpoint> {
  return saveCheckpoint(run, step, parts(step), { step }, keepLast === undefined ? {} : { keepLast });
}

function names(): string[] {
  return readdirSync(join(run, 'checkpoints')).sort();
}

function systemError(code: string): Error {
  return Object.assign(new Error(code), { code, syscall: 'write' });
}

test('a checkpoint has its files, a manifest of them, and latest points to it', () => {
  const saved = saveCheckpoint(run, 12, parts(7), { loss: 1.5, cursor: { shard: 3 } });
  expect(saved.warnings).toEqual([]);
  expect(readdirSync(saved.path).sort()).toEqual([
    'manifest.json',
    'model.safetensors',
    'optimizer.safetensors',
    'state.json',
  ]);
  expect(names()).toEqual(['latest', 'step-12']);
  expect(readFileSync(join(run, 'checkpoints', 'latest'), 'utf8')).toBe('step-12\n');
  expect([...readSafetensors(join(saved.path, 'optimizer.safetensors')).tensors.get('m')!.data]).toEqual([7, 7, 7, 7]);
  const manifest = readManifest(saved.path);
  expect(manifest).toMatchObject({ format_version: 1, trefoil_version: trefoilVersion(), step: 12, sequence: 1 });
  expect(Object.keys(manifest.files).sort()).toEqual(
    readdirSync(saved.path)
      .filter((name) => name !== 'manifest.json')
      .sort(),
  );
  const found = findCheckpoint(run, 'auto');
  expect(found).toMatchObject({ step: 12, path: saved.path, skipped: [], state: { loss: 1.5, cursor: { shard: 3 } } });
});

test('only the last ones are kept, by the time of saving', () => {
  for (const step of [10, 20, 30]) save(step, 2);
  expect(names()).toEqual(['latest', 'step-20', 'step-30']);
  save(5, 2);
  expect(names()).toEqual(['latest', 'step-30', 'step-5']);
  save(6, 1);
  expect(names()).toEqual(['latest', 'step-6']);
  for (const step of [7, 8, 9]) save(step);
  expect(names()).toHaveLength(5);
});

test('a damaged checkpoint does not push out a sound one', () => {
  save(1);
  save(2);
  rmSync(join(run, 'checkpoints', 'step-2', 'manifest.json'));
  save(3, 2);
  expect(names()).toEqual(['latest', 'step-1', 'step-3']);
});

test('the same step can be saved again', () => {
  save(4);
  saveCheckpoint(run, 4, parts(9), { again: true });
  expect(names()).toEqual(['latest', 'step-4']);
  expect(findCheckpoint(run, 'auto')?.state).toEqual({ again: true });
});

test('folders of killed saves are removed by the next one', () => {
  mkdirSync(join(run, 'checkpoints', `.tmp-3-${2 ** 22 + 1}`, 'deep'), { recursive: true });
  mkdirSync(join(run, 'checkpoints', `.trash-1-${2 ** 22 + 1}`));
  save(4);
  expect(names()).toEqual(['latest', 'step-4']);
});

test('a disk that fails at any write leaves the last good one and no litter, and the next save works', () => {
  save(1);
  let writes = 0;
  saveCheckpoint(run, 2, parts(2), {}, { onWrite: () => writes++ });
  rmSync(join(run, 'checkpoints', 'step-2'), { recursive: true });
  expect(writes).toBeGreaterThan(8);
  for (const code of ['ENOSPC', 'EIO']) {
    let failures = 0;
    for (let failing = 1; failing <= writes; failing++) {
      let count = 0;
      const onWrite = (what: string): void => {
        count++;
        if (count === failing && !['latest', 'renamed'].includes(what)) throw systemError(code);
      };
      try {
        saveCheckpoint(run, 2, parts(2), {}, { onWrite });
        rmSync(join(run, 'checkpoints', 'step-2'), { recursive: true });
      } catch (error) {
        failures++;
        expect(error).toBeInstanceOf(SaveFailed);
        expect((error as Error).message).toMatch(/^checkpoint of step 2 was not saved: .*; the last good one is kept$/);
        expect(names()).toEqual(['latest', 'step-1']);
        expect(findCheckpoint(run, 'auto')).toMatchObject({ step: 1, skipped: [] });
      }
    }
    expect(failures).toBe(writes - 2);
  }
  save(2);
  expect(findCheckpoint(run, 'auto')?.step).toBe(2);
});

test('what does not read back is not saved', () => {
  save(1);
  let isDamaged = false;
  const onWrite = (what: string): void => {
    // The disk loses a bit of a file that was already written.
    if (what.endsWith('manifest.json') && !isDamaged) {
      isDamaged = true;
      const path = join(what, '..', 'model.safetensors');
      const content = readFileSync(path);
      content[content.length - 1] ^= 1;
      writeFileSync(path, content);
    }
  };
  expect(() => saveCheckpoint(run, 2, parts(2), {}, { keepLast: 1, onWrite })).toThrow('does not read back');
  expect(names()).toEqual(['latest', 'step-1']);
});

test('a failing replacement of the same step puts the former one back', () => {
  save(1);
  const temporary = join(run, 'checkpoints', `.tmp-1-${process.pid}`);
  const onWrite = (what: string): void => {
    if (what === 'set aside') rmSync(temporary, { recursive: true });
  };
  expect(() => saveCheckpoint(run, 1, parts(2), {}, { onWrite })).toThrow(SaveFailed);
  expect(names()).toEqual(['latest', 'step-1']);
  expect(findCheckpoint(run, 'auto')).toMatchObject({ step: 1, state: { step: 1 } });
});

test('trouble after the checkpoint is safe is a warning', () => {
  mkdirSync(join(run, 'checkpoints', 'latest', 'in the way'), { recursive: true });
  const saved = save(1);
  expect(saved.warnings).toHaveLength(1);
  expect(saved.warnings[0]).toContain('latest');
  expect(findCheckpoint(run, 'auto')?.step).toBe(1);
});

test('mistakes of the program are not taken for a failing disk', () => {
  expect(() => saveCheckpoint(run, 1, parts(1), { best: { loss: Infinity } })).toThrow(
    'cannot hold Infinity (key loss)',
  );
  expect(() => save(-1)).toThrow(UsageError);
  expect(() => save(1.5)).toThrow(UsageError);
  const lost = (): Uint8Array => {
    throw new Error('device lost');
  };
  const tensor = { name: 'w', dtype: 'U8', shape: [4], data: lost } as const;
  expect(() => saveCheckpoint(run, 1, { model: [tensor], optimizer: [] }, {})).toThrow(/^device lost$/);
  expect(existsSync(join(run, 'checkpoints', 'step-1'))).toBe(false);
  expect(names()).toEqual([]);
});

test('a checkpoint that was asked for is not deleted, and pushes no other out', () => {
  save(10, 2);
  save(13, 2);
  keepCheckpoint(run, 13);
  for (const step of [20, 30, 40]) save(step, 2);
  expect(names()).toEqual(['latest', 'step-13', 'step-30', 'step-40']);
  expect(findCheckpoint(run, join(run, 'checkpoints', 'step-13'))?.step).toBe(13); // the mark is no damage
  rmSync(join(run, 'checkpoints', 'step-13', 'keep'));
  save(50, 2);
  expect(names()).toEqual(['latest', 'step-40', 'step-50']);
});
