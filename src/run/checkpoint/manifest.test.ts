import { createHash } from 'node:crypto';
import { mkdtempSync, readFileSync, rmSync, unlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { UsageError } from '../../errors.js';
import { type Manifest, readManifest, serializeManifest, UnsupportedCheckpoint, verifyFiles } from './read.js';

let folder: string;
let manifest: Manifest;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-manifest-'));
  const content = Buffer.from('weights');
  const sha256 = createHash('sha256').update(content).digest('hex');
  manifest = {
    format_version: 1,
    trefoil_version: '0.1.0',
    step: 7,
    sequence: 2,
    saved_at: 'now',
    files: { 'model.safetensors': { bytes: content.length, sha256 } },
  };
  writeFileSync(join(folder, 'model.safetensors'), content);
  writeManifest(manifest);
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

function writeManifest(fields: object): void {
  writeFileSync(join(folder, 'manifest.json'), serializeManifest(fields));
}

test('what was written is read and verifies', () => {
  expect(readManifest(folder)).toEqual(manifest);
  verifyFiles(folder, manifest);
});

test('every change of a byte of the manifest is noticed', () => {
  const path = join(folder, 'manifest.json');
  const good = readFileSync(path);
  for (let i = 0; i < good.length; i++) {
    for (const mask of [1, 4, 0x20, 0x80]) {
      const bad = Buffer.from(good);
      bad[i] ^= mask;
      writeFileSync(path, bad);
      expect(() => readManifest(folder), `byte ${i}`).toThrow(UsageError);
    }
  }
  for (const length of [0, 1, good.length - 1]) {
    writeFileSync(path, good.subarray(0, length));
    expect(() => readManifest(folder)).toThrow(`${path}: is damaged`);
  }
});

test('a file that is missing, longer, shorter or changed is named', () => {
  const path = join(folder, 'model.safetensors');
  const complaint = (content: string): (() => void) => {
    writeFileSync(path, content);
    return () => verifyFiles(folder, manifest);
  };
  expect(complaint('weight')).toThrow(`${path}: is damaged: it has 6 bytes, not the recorded 7`);
  expect(complaint('weights!')).toThrow('it has 8 bytes');
  expect(complaint('weightz')).toThrow(`${path}: is damaged: its content does not have the recorded SHA-256`);
  unlinkSync(path);
  expect(() => verifyFiles(folder, manifest)).toThrow(`${path}: cannot read: there is no such file`);
});

test('an older format is refused by name', () => {
  writeManifest({ format_version: 0, trefoil_version: '0.0.1' });
  expect(() => readManifest(folder)).toThrow(UnsupportedCheckpoint);
  expect(() => readManifest(folder)).toThrow('use an older trefoil');
});

test('a newer format is refused by name, whatever else it holds', () => {
  writeManifest({ format_version: 2, trefoil_version: '9.0.0', novelty: true });
  expect(() => readManifest(folder)).toThrow(UnsupportedCheckpoint);
  expect(() => readManifest(folder)).toThrow('format 2, written by trefoil 9.0.0');
});

test('a manifest cannot point outside its folder', () => {
  for (const name of ['../x', '/etc/passwd', 'a/b', '..', '.hidden', '', 'manifest.json']) {
    writeManifest({ ...manifest, files: { [name]: { bytes: 1, sha256: 'x' } } });
    expect(() => readManifest(folder), name).toThrow('is damaged');
  }
});

test('an old folder without a manifest is called incomplete', () => {
  unlinkSync(join(folder, 'manifest.json'));
  expect(() => readManifest(folder)).toThrow('is missing, so the checkpoint is not complete');
});
