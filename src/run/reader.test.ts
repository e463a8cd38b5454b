import { appendFileSync, mkdirSync, rmSync, statSync, symlinkSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { temporaryFolder } from '../testing/run.js';
import { readCsv, TRAINING_CSV, tailCsv } from './logs/csv.js';
import { openHeartbeats, openSection } from './logs/log.js';
import { writeHalt } from './paths.js';
import { findRuns, readJsonFile, readRun } from './reader.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

describe('readRun', () => {
  it('sees ranks, heartbeats, sections, rows and marks', () => {
    const { paths } = readRun(folder.path);
    for (const rank of [0, 2]) {
      const writer = openHeartbeats(paths.heartbeat(rank), rank);
      for (let step = 1; step <= 300; step++) writer.write({ step, msg: 'progress', loss: 1 });
      writer.close();
    }
    const section = openSection(paths.section(2), 2);
    section.write({ section: 'eval', step: 300 });
    writeFileSync(paths.training, 'step,loss,lr,toks_per_s\n1,2.5,0.001,100\n2,2.4,0.001,100\n3,2.');
    writeHalt(folder.path, 'lunch');
    const view = readRun(folder.path, { beats: 10 });
    expect(view.ranks.map(({ rank, beats }) => [rank, beats.length, beats.at(-1)!.step])).toEqual([
      [0, 10, 300],
      [2, 10, 300],
    ]);
    expect(view.ranks[1].section).toMatchObject({ section: 'eval', step: 300, pid: process.pid });
    expect(view.training.map(({ step }) => step)).toEqual([1, 2]); // the third is still being written
    expect(view.halt).toBe('lunch');
    expect(view.problems).toEqual([]);
    section.close();
  });

  it('takes an empty folder, truncated and rotated files as they come, and names what cannot be read', () => {
    expect(readRun(folder.path).ranks).toEqual([{ rank: 0, beats: [], section: undefined }]);
    const { paths } = readRun(folder.path);
    const writer = openHeartbeats(paths.heartbeat(0), 0);
    writer.write({ step: 1, msg: 'progress' });
    writer.write({ step: 2, msg: 'progress' });
    truncateSync(paths.heartbeat(0), statSync(paths.heartbeat(0)).size - 5); // inside the second line
    expect(readRun(folder.path).ranks[0].beats.map(({ step }) => step)).toEqual([1]);
    rmSync(paths.heartbeat(0));
    expect(readRun(folder.path).ranks[0].beats).toEqual([]);
    writer.close();
    symlinkSync(paths.val, paths.val); // points to itself: it is there and cannot be opened, even by root
    mkdirSync(paths.training);
    const view = readRun(folder.path);
    expect(view.problems.join('\n')).toMatch(/training\.csv: is a folder/);
    expect(view.problems.join('\n')).toMatch(/val\.csv/);
    expect(() => readRun(join(folder.path, 'none'))).toThrow('there is no such folder');
  });
});

describe('tailCsv', () => {
  it('gives the last rows of a long file as reading all of it does', () => {
    const path = join(folder.path, 'training.csv');
    const rows = Array.from({ length: 20_000 }, (_, i) => `${i + 1},${(i % 97) / 7},0.001,${i}.5\n`);
    writeFileSync(path, `step,loss,lr,toks_per_s\n${rows.join('')}`);
    appendFileSync(path, '20001,3');
    const all = readCsv(path, TRAINING_CSV).rows;
    expect(tailCsv(path, TRAINING_CSV, 50).rows).toEqual(all.slice(-50));
    expect(tailCsv(join(folder.path, 'none.csv'), TRAINING_CSV, 50).rows).toEqual([]);
  });
});

describe('readJsonFile and findRuns', () => {
  it('reads objects and finds run folders', () => {
    const file = join(folder.path, 'metrics.json');
    expect(readJsonFile(file)).toBeUndefined();
    writeFileSync(file, '{"step": 3}');
    expect(readJsonFile(file)).toEqual({ step: 3 });
    writeFileSync(file, '{"step": ');
    expect(readJsonFile(file)).toBeUndefined();
    for (const name of ['a', 'b', 'c']) mkdirSync(join(folder.path, name));
    for (const name of ['a', 'c']) writeFileSync(join(folder.path, name, 'training.csv'), '');
    expect(findRuns(folder.path)).toEqual([join(folder.path, 'a'), join(folder.path, 'c')]);
    expect(findRuns(join(folder.path, 'a'))).toEqual([join(folder.path, 'a')]);
  });
});
