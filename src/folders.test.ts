import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { ensureFolder } from './folders.js';

const base = mkdtempSync(join(tmpdir(), 'trefoil-folders-'));
afterAll(() => rmSync(base, { recursive: true }));

it('creates a folder with its parents, once', () => {
  const path = join(base, 'a', 'b', 'c');
  expect(ensureFolder(path)).toBe(true);
  expect(existsSync(path)).toBe(true);
  expect(ensureFolder(path)).toBe(false);
});

it('throws where a file is in the way, and where the system refuses', () => {
  writeFileSync(join(base, 'file'), '');
  expect(() => ensureFolder(join(base, 'file'))).toThrow();
  expect(() => ensureFolder(join(base, 'file', 'below'))).toThrow();
  if (existsSync('/proc/self')) expect(() => ensureFolder('/proc/trefoil/below')).toThrow('ENOENT');
});
