import {
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { UsageError } from '../../errors.js';
import { findCheckpoint, openCheckpoint, readManifest, serializeManifest, UnsupportedCheckpoint } from './read.js';
import { saveCheckpoint } from './save.js';

let run: string;
beforeEach(() => {
  run = mkdtempSync(join(tmpdir(), 'trefoil-find-'));
  for (const step of [1, 2]) {
    const tensor = { name: 'w', dtype: 'U8', shape: [16], data: new Uint8Array(16).fill(step) } as const;
    const parts = { model: [tensor], optimizer: [tensor] };
    saveCheckpoint(run, step, parts, { step });
  }
});
afterEach(() => rmSync(run, { recursive: true, force: true }));

function folder(step: number): string {
  return join(run, 'checkpoints', `step-${step}`);
}

test('a run without checkpoints has none to resume from', () => {
  expect(findCheckpoint(join(run, 'other'), 'auto')).toBeUndefined();
  mkdirSync(join(run, 'other', 'checkpoints', '.tmp-1-1'), { recursive: true });
  expect(findCheckpoint(join(run, 'other'), 'auto')).toBeUndefined();
});

test('one flipped byte anywhere is detected, the file is named, and the one before is used', () => {
  for (const name of readdirSync(folder(2))) {
    const path = join(folder(2), name);
    const good = readFileSync(path);
    for (let i = 0; i < good.length; i += 7) {
      const bad = Buffer.from(good);
      bad[i] ^= 1 << (i % 8);
      writeFileSync(path, bad);
      const found = findCheckpoint(run, 'auto');
      expect(found?.step, `${name} ${i}`).toBe(1);
      expect(found?.skipped).toHaveLength(1);
      expect(found?.skipped[0].path).toBe(folder(2));
      expect(found?.skipped[0].reason).toContain(path);
    }
    writeFileSync(path, good);
  }
  expect(findCheckpoint(run, 'auto')).toMatchObject({ step: 2, skipped: [] });
});

test('a truncated, empty or missing file is detected', () => {
  for (const name of readdirSync(folder(2))) {
    const path = join(folder(2), name);
    const good = readFileSync(path);
    for (const length of [0, 1, good.length - 1]) {
      truncateSync(path, length);
      expect(findCheckpoint(run, 'auto')).toMatchObject({ step: 1, skipped: [{ path: folder(2) }] });
      writeFileSync(path, good);
    }
    rmSync(path);
    expect(findCheckpoint(run, 'auto')?.step).toBe(1);
    writeFileSync(path, good);
  }
});

test('when all are damaged nothing is started over in silence', () => {
  for (const step of [1, 2]) truncateSync(join(folder(step), 'state.json'), 1);
  expect(() => findCheckpoint(run, 'auto')).toThrow(UsageError);
  expect(() => findCheckpoint(run, 'auto')).toThrow(
    /no checkpoint verifies: step-2.*; step-1.*\. Restore one from a backup/,
  );
});

test('a named checkpoint must verify itself', () => {
  expect(findCheckpoint(run, folder(1))).toMatchObject({ step: 1, state: { step: 1 }, skipped: [] });
  expect(findCheckpoint('/elsewhere', join(run, 'checkpoints', 'latest'))?.step).toBe(2);
  truncateSync(join(folder(2), 'model.safetensors'), 20);
  expect(() => findCheckpoint(run, folder(2))).toThrow(
    `${join(folder(2), 'model.safetensors')}: is damaged: it has 20 bytes`,
  );
});

test('auto, checkpoints/latest and checkpoints/latest.pt mean the same', () => {
  for (const which of ['auto', join(run, 'checkpoints', 'latest'), join(run, 'checkpoints', 'latest.pt')]) {
    expect(findCheckpoint(run, which)).toMatchObject({ step: 2, skipped: [] });
    const good = readFileSync(join(folder(2), 'state.json'));
    truncateSync(join(folder(2), 'state.json'), 1);
    expect(findCheckpoint(run, which)).toMatchObject({ step: 1, skipped: [{ path: folder(2) }] });
    writeFileSync(join(folder(2), 'state.json'), good);
  }
  const fresh = join(run, 'other');
  expect(findCheckpoint(fresh, join(fresh, 'checkpoints', 'latest.pt'))).toBeUndefined();
  expect(() => findCheckpoint(run, join(fresh, 'checkpoints', 'latest'))).toThrow('holds no checkpoint');
  expect(findCheckpoint('/elsewhere', join(run, 'checkpoints', 'latest.pt'))?.step).toBe(2);
});

test('a path that is no checkpoint is refused with what to name instead', () => {
  expect(() => findCheckpoint(run, join(run, 'none'))).toThrow('there is no such checkpoint');
  expect(() => findCheckpoint(run, run)).toThrow('is a run folder');
  expect(() => findCheckpoint(run, join(folder(1), 'state.json'))).toThrow('is not a checkpoint');
  expect(() => findCheckpoint(run, join(run, 'checkpoints'))).toThrow('manifest.json: is missing');
});

test('a newer format stops the search: an older checkpoint would throw training away', () => {
  const manifest = { ...readManifest(folder(2)), format_version: 2, trefoil_version: '9.9.9' };
  writeFileSync(join(folder(2), 'manifest.json'), serializeManifest(manifest));
  expect(() => findCheckpoint(run, 'auto')).toThrow(UnsupportedCheckpoint);
  expect(() => findCheckpoint(run, folder(2))).toThrow('written by trefoil 9.9.9');
});

test('a manifest that leaves out a needed file is refused', () => {
  const { files, ...rest } = readManifest(folder(2));
  const { 'optimizer.safetensors': _left, ...fewer } = files;
  writeFileSync(join(folder(2), 'manifest.json'), serializeManifest({ ...rest, files: fewer }));
  expect(() => openCheckpoint(folder(2))).toThrow('has no optimizer.safetensors');
});

test('a crash between the two renames of a replacement loses nothing', () => {
  renameSync(folder(2), join(run, 'checkpoints', '.old-2-77'));
  expect(findCheckpoint(run, 'auto')).toMatchObject({ step: 2, state: { step: 2 }, skipped: [] });
});
