import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { listCheckpoints, listLeftovers, serializeManifest } from './read.js';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-folder-'));
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

function add(name: string, step: number, sequence?: number): void {
  mkdirSync(join(folder, name));
  if (sequence === undefined) return;
  const manifest = { format_version: 1, trefoil_version: '0', step, sequence, saved_at: '', files: {} };
  writeFileSync(join(folder, name, 'manifest.json'), serializeManifest(manifest));
}

function names(): string[] {
  return listCheckpoints(folder).map(({ path }) => basename(path));
}

test('the newest is the one saved last, not the one of the highest step', () => {
  add('step-10', 10, 2);
  add('step-5', 5, 1);
  // Resumed from step 5 by hand: step 10 belongs to a course that was given up.
  add('step-6', 6, 3);
  expect(names()).toEqual(['step-6', 'step-10', 'step-5']);
});

test('one with a damaged manifest is placed by its step', () => {
  add('step-5', 5, 1);
  add('step-10', 10);
  add('step-20', 20, 4);
  add('step-30', 30);
  add('step-1', 1);
  expect(names()).toEqual(['step-30', 'step-20', 'step-10', 'step-5', 'step-1']);
  expect(String(listCheckpoints(folder)[0].problem)).toContain('is missing');
});

test('a former checkpoint set aside still counts; other names do not', () => {
  add('.old-7-123', 7, 1);
  for (const other of ['step-', 'step-x', 'step-1.bak', '.tmp-8-1', 'x-step-3', '.trash-3-1']) add(other, 1, 9);
  writeFileSync(join(folder, 'latest'), 'step-7\n');
  expect(names()).toEqual(['.old-7-123']);
  expect(listCheckpoints(join(folder, 'none'))).toEqual([]);
});

test('leftovers are those of dead processes and of this one', () => {
  const dead = 2 ** 22 + 1; // Above the highest pid of Linux.
  for (const name of [`.tmp-1-${dead}`, `.trash-2-${dead}`, `.tmp-3-${process.pid}`, `.tmp-4-${process.ppid}`])
    add(name, 1);
  writeFileSync(join(folder, `.latest.tmp-${dead}`), 'step-');
  add('step-9', 9, 1);
  expect(
    listLeftovers(folder)
      .map((path) => basename(path))
      .sort(),
  ).toEqual([`.latest.tmp-${dead}`, `.tmp-1-${dead}`, `.tmp-3-${process.pid}`, `.trash-2-${dead}`].sort());
});
