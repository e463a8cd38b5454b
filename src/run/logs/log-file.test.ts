import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { UsageError } from '../../errors.js';
import { AppendFile } from './log-file.js';

let folder: string;
let path: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-append-'));
  path = join(folder, 'log');
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

function reopened(content: string, format?: 'lines' | 'binary'): string {
  writeFileSync(path, content);
  new AppendFile(path, format).close();
  return readFileSync(path, 'utf8');
}

test('records are added at the end, over several openings', () => {
  for (const text of ['one\n', 'two\n']) {
    const file = new AppendFile(path);
    file.append(Buffer.from(text));
    file.sync();
    file.close();
  }
  expect(readFileSync(path, 'utf8')).toBe('one\ntwo\n');
});

test('a half line of a crash is removed on opening', () => {
  expect(reopened('a,b\n1,2\n3,')).toBe('a,b\n1,2\n');
  expect(reopened('half')).toBe('');
  expect(reopened('')).toBe('');
  expect(reopened('whole\n')).toBe('whole\n');
  const long = 'x'.repeat(200_000);
  expect(reopened(`kept\n${long}`)).toBe('kept\n');
  expect(reopened(long)).toBe('');
});

test('binary files are left as they are', () => {
  expect(reopened('a\nhalf', 'binary')).toBe('a\nhalf');
});

test('bytes removed by somebody else are not filled with zeros', () => {
  const file = new AppendFile(path);
  file.append(Buffer.from('first\n'));
  writeFileSync(path, '');
  file.append(Buffer.from('second\n'));
  expect(readFileSync(path, 'utf8')).toBe('second\n');
  expect(file.size).toBe(7);
  file.close();
});

test('pipes, devices and folders are refused at once', () => {
  execFileSync('mkfifo', [path]);
  expect(() => new AppendFile(path)).toThrow(UsageError);
  expect(() => new AppendFile('/dev/null')).toThrow('not a regular file');
  expect(() => new AppendFile(folder)).toThrow('is a folder');
  expect(() => new AppendFile(join(folder, 'none', 'log'))).toThrow('no such file or folder');
});
