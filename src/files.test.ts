import {
  closeSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { TrefoilError, UsageError } from './errors.js';
import {
  ensureFolder,
  errorCode,
  fileError,
  isDiskError,
  isFileSystemError,
  namesFile,
  openRegularFile,
  readFully,
  writeFileAtomic,
  writeFully,
} from './files.js';
import { isPlainObject } from './json-values.js';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-files-'));
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

/** An error as Node's file functions throw it. */
function systemError(code: string): Error {
  return Object.assign(new Error(`${code}: made up`), { code, syscall: 'write' });
}

test('a file is replaced whole, and nothing is left beside it', () => {
  const path = join(folder, 'metrics.json');
  writeFileAtomic(path, 'old and long');
  writeFileAtomic(path, 'new');
  expect(readFileSync(path, 'utf8')).toBe('new');
  writeFileAtomic(path, new Uint8Array([1, 2, 3]));
  expect([...readFileSync(path)]).toEqual([1, 2, 3]);
  expect(readdirSync(folder)).toEqual(['metrics.json']);
});

test('a failed replacement keeps the old content and removes the aside file', () => {
  const path = join(folder, 'target');
  mkdirSync(path);
  writeFileSync(join(path, 'inside'), 'kept');
  expect(() => writeFileAtomic(path, 'text')).toThrow(UsageError);
  expect(readdirSync(folder)).toEqual(['target']);
  expect(readFileSync(join(path, 'inside'), 'utf8')).toBe('kept');
});

test('a missing folder is named in one line', () => {
  const path = join(folder, 'absent', 'file');
  expect(() => writeFileAtomic(path, 'x')).toThrow(`${path}: cannot write: there is no such file or folder`);
});

test('disk errors are told apart from bad paths, through causes too', () => {
  const full = fileError('write', '/a', systemError('ENOSPC'));
  expect(full).toBeInstanceOf(TrefoilError);
  expect(full).not.toBeInstanceOf(UsageError);
  expect(isDiskError(full)).toBe(true);
  expect((full as Error).message).toContain('free some space');
  const denied = fileError('write', '/a', systemError('EACCES'));
  expect(denied).toBeInstanceOf(UsageError);
  expect(errorCode(denied)).toBe('EACCES');
  expect(isDiskError(denied)).toBe(false);
  expect([full, denied, new Error('other', { cause: denied })].map(isFileSystemError)).toEqual([true, true, true]);
  expect([new UsageError('bad shape'), undefined, 'text'].map(isFileSystemError)).toEqual([false, false, false]);
});

test('a mistake in the program is not dressed up as a bad file', () => {
  const mistake = new TypeError('x is undefined');
  expect(fileError('write', '/a', mistake)).toBe(mistake);
});

test('folders and devices are refused before they are opened', () => {
  expect(() => openRegularFile(folder)).toThrow('is a folder');
  expect(() => openRegularFile('/dev/null')).toThrow('not a regular file');
  expect(() => openRegularFile(join(folder, 'none'))).toThrow('no such file');
});

test('reading stops at the end of the file and says how far it came', () => {
  const path = join(folder, 'bytes');
  const descriptor = openSync(path, 'w+');
  const pieces: number[] = [];
  writeFully(descriptor, new Uint8Array([9, 8, 7, 6]), (piece) => pieces.push(...piece));
  expect(pieces).toEqual([9, 8, 7, 6]);
  const target = new Uint8Array(8);
  expect(readFully(descriptor, target, 1)).toBe(3);
  expect([...target.subarray(0, 3)]).toEqual([8, 7, 6]);
  closeSync(descriptor);
});

test('a folder is created with its parents, once', () => {
  const path = join(folder, 'a', 'b', 'c');
  expect(ensureFolder(path)).toBe(true);
  expect(existsSync(path)).toBe(true);
  expect(ensureFolder(path)).toBe(false);
});

test('creating a folder throws where a file is in the way, and where the system refuses', () => {
  writeFileSync(join(folder, 'file'), '');
  expect(() => ensureFolder(join(folder, 'file'))).toThrow();
  expect(() => ensureFolder(join(folder, 'file', 'below'))).toThrow();
  if (existsSync('/proc/self')) expect(() => ensureFolder('/proc/trefoil/below')).toThrow('ENOENT');
});

test('lists and null are no objects', () => {
  expect([{}, [], null, 1, 'x'].map(isPlainObject)).toEqual([true, false, false, false, false]);
});

test('a name with an extension is meant as a file, one with a version is not', () => {
  for (const path of ['model.pt', 'a/report.md', 'x.safetensors', 'a.7z.tar']) expect(namesFile(path), path).toBe(true);
  for (const path of ['model', 'a.b/run', 'SmolLM2-1.7B', 'run.2', 'run.v2', '.hidden', 'x.md/'])
    expect(namesFile(path), path).toBe(false);
});
