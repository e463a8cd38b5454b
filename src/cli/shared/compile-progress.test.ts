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
