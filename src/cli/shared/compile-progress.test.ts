import { closeSync, mkdtempSync, openSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { PassThrough } from 'node:stream';
import { expect, it } from 'vitest';
import { CompileProgressLine } from './compile-progress.js';

function written(isTTY: boolean, clock?: () => number) {
  const stream = Object.assign(new PassThrough(), { isTTY, columns: 60 });
  return { progress: new CompileProgressLine(stream, clock), text: () => String(stream.read() ?? '') };
}

it('rewrites one line on a terminal, with counts, and clears it', () => {
  const { progress, text } = written(true);
  progress.begin('ops/add', 0, 12);
  expect(text()).toBe('\r\x1b[Kcompiling kernels, once per machine: 1 of at most 12 (ops/a');
  progress.end();
  expect(text()).toBe('\r\x1b[K');
  progress.begin('add', 2, null);
  expect(text()).toBe('\r\x1b[Kcompiling kernels, once per machine: 3 (add)');
});

it('prints a line at most every ten seconds elsewhere', () => {
  let now = 0;
  const { progress, text } = written(false, () => now);
  for (let i = 0; i < 8; i++) {
    progress.begin(`ops/k${i}`, i, 8);
    progress.end();
    now += 3000;
  }
  expect(text()).toBe(
    'compiling kernels, once per machine: 1 of at most 8 (ops/k0)\n' +
      'compiling kernels, once per machine: 5 of at most 8 (ops/k4)\n',
  );
});

it('counts the seconds on a terminal while this thread waits for the compiler', () => {
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-progress-'));
  const path = join(folder, 'terminal');
  const fd = openSync(path, 'w');
  const stream = Object.assign(new PassThrough(), { isTTY: true, columns: 50, fd });
  const progress = new CompileProgressLine(stream);
  const cell = new Int32Array(new SharedArrayBuffer(4));
  progress.begin('ops/attention/selected', 0, 12);
  for (let i = 0; i < 600 && !readFileSync(path, 'utf8').includes(', 2 s'); i++) Atomics.wait(cell, 0, 0, 100);
  progress.end();
  const text = readFileSync(path, 'utf8');
  expect(text.split('\r\x1b[K').slice(0, 3)).toEqual([
    '',
    'compiling kernels, once per machine: 1 of at, 1 s',
    'compiling kernels, once per machine: 1 of at, 2 s',
  ]);
  Atomics.wait(cell, 0, 0, 1500);
  expect(readFileSync(path, 'utf8')).toBe(text); // nothing after the end
  closeSync(fd);
  rmSync(folder, { recursive: true });
});
