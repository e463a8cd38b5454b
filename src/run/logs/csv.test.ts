import { appendFileSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { UsageError } from '../../errors.js';
import { FALLBACK_COUNTERS_CSV, K_STATS_CSV, readCsv, TRAINING_CSV, VAL_CSV } from './csv.js';
import { openCsv } from './log.js';

let folder: string;
let path: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-csv-'));
  path = join(folder, 'training.csv');
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

function row(step: number, loss = 2.5): { step: number; loss: number; lr: number; toks_per_s: number } {
  return { step, loss, lr: 3e-4, toks_per_s: 51234.567 };
}

function text(): string {
  return readFileSync(path, 'utf8');
}

/** A clock that stands still: a busy machine must not look like a slow disk, after which writers pause. */
const steady = { now: () => 0 };

test('the files have the columns of the contract', () => {
  openCsv(path, TRAINING_CSV).close();
  expect(text()).toBe('step,loss,lr,toks_per_s\n');
  expect(Object.keys(VAL_CSV).join()).toBe('step,val_loss,ppl');
  expect(Object.keys(K_STATS_CSV).join()).toBe('step,sel_k_mean,sel_k_max,sel_pct_at_max');
});

test('a row is there as soon as it was appended, and the header only once', () => {
  for (const step of [1, 2]) {
    const writer = openCsv(path, TRAINING_CSV, steady);
    writer.write(row(step, Math.fround(1 / 3)));
    expect(text().endsWith(`${step},0.33333334,0.0003,51234.6\n`)).toBe(true);
    writer.close();
  }
  expect(text().match(/step/g)).toHaveLength(1);
});

test('a loss reads back as the same float32, NaN and infinity too', () => {
  const losses = [Math.fround(Math.PI), Math.fround(1e-30), Number.NaN, Infinity, -Infinity, 0];
  const writer = openCsv(path, TRAINING_CSV);
  for (const [index, loss] of losses.entries()) writer.write(row(index, loss));
  writer.close();
  const { rows, badLines } = readCsv(path, TRAINING_CSV);
  expect(rows.map(({ loss }) => Math.fround(loss))).toEqual(losses);
  expect(badLines).toBe(0);
});

test('resuming removes the rows after the checkpoint and goes on from there', () => {
  const writer = openCsv(path, TRAINING_CSV);
  for (let step = 1; step <= 12; step++) writer.write(row(step));
  writer.close();
  const resumed = openCsv(path, TRAINING_CSV, { keepThrough: 10 });
  resumed.write(row(11, 9));
  resumed.close();
  const { rows } = readCsv(path, TRAINING_CSV);
  expect(rows.map(({ step }) => step)).toEqual([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
  expect(rows.at(-1)?.loss).toBe(9);
});

test('a resumed file equals that of an undisturbed run byte for byte', () => {
  const undisturbed = openCsv(join(folder, 'other.csv'), TRAINING_CSV);
  for (let step = 1; step <= 9; step++) undisturbed.write(row(step, Math.fround(1 / step)));
  undisturbed.close();
  const first = openCsv(path, TRAINING_CSV);
  for (let step = 1; step <= 7; step++) first.write(row(step, Math.fround(1 / step)));
  first.close();
  appendFileSync(path, '8,0.1');
  const second = openCsv(path, TRAINING_CSV, { keepThrough: 4 });
  for (let step = 5; step <= 9; step++) second.write(row(step, Math.fround(1 / step)));
  second.close();
  expect(text()).toBe(readFileSync(join(folder, 'other.csv'), 'utf8'));
});

test('truncating to the beginning keeps the header; truncating beyond the end keeps all', () => {
  const writer = openCsv(path, TRAINING_CSV, steady);
  writer.write(row(1));
  writer.close();
  const before = text();
  openCsv(path, TRAINING_CSV, { keepThrough: 100 }).close();
  expect(text()).toBe(before);
  openCsv(path, TRAINING_CSV, { keepThrough: 0 }).close();
  expect(text()).toBe('step,loss,lr,toks_per_s\n');
});

test('a half row, and a half header, of a crash are repaired', () => {
  writeFileSync(path, 'step,loss,lr,toks_per_s\n1,2,3,4\n2,2.');
  openCsv(path, TRAINING_CSV).close();
  expect(text()).toBe('step,loss,lr,toks_per_s\n1,2,3,4\n');
  writeFileSync(path, 'step,lo');
  openCsv(path, TRAINING_CSV).close();
  expect(text()).toBe('step,loss,lr,toks_per_s\n');
});

test('a file with other columns is refused, by name, and left alone', () => {
  writeFileSync(path, 'a,b\n1,2\n');
  expect(() => openCsv(path, TRAINING_CSV)).toThrow(UsageError);
  expect(() => openCsv(path, TRAINING_CSV)).toThrow(`${path}: its columns are "a,b"`);
  expect(text()).toBe('a,b\n1,2\n');
  expect(() => readCsv(path, TRAINING_CSV)).toThrow('no column step');
});

test('the reader takes whole rows only, counts damage, and takes a missing file for an empty one', () => {
  expect(readCsv(path, TRAINING_CSV)).toEqual({ rows: [], badLines: 0 });
  writeFileSync(path, 'step,loss,lr,toks_per_s\n1,2,3,4\n2,x,3,4\n3,,3,4\n4,5\n\0\0\n5,6,7,8\n6,7,8,9');
  const { rows, badLines } = readCsv(path, TRAINING_CSV);
  expect(rows).toEqual([
    { step: 1, loss: 2, lr: 3, toks_per_s: 4 },
    { step: 5, loss: 6, lr: 7, toks_per_s: 8 },
  ]);
  expect(badLines).toBe(4);
});

test('a later column: files of earlier versions are read and go on, unknown values are empty cells', () => {
  const schema = { ...TRAINING_CSV, share: 'float32?' } as const;
  const old = 'step,loss,lr,toks_per_s\n1,2,3,4\n2,2,3,4\n3,2';
  writeFileSync(path, old);
  expect(readCsv(path, schema)).toEqual({
    rows: [1, 2].map((step) => ({ step, loss: 2, lr: 3, toks_per_s: 4 })),
    badLines: 0,
  });
  expect(text()).toBe(old);
  const writer = openCsv(path, schema, { keepThrough: 1 });
  writer.write({ ...row(2, 1), share: 0.25 });
  writer.write(row(3, 1));
  writer.close();
  expect(text()).toBe('step,loss,lr,toks_per_s,share\n1,2,3,4,\n2,1,0.0003,51234.6,0.25\n3,1,0.0003,51234.6,\n');
  const { rows, badLines } = readCsv(path, schema);
  expect(rows.map(({ share }) => share)).toEqual([undefined, 0.25, undefined]);
  expect(badLines).toBe(0);
  expect(readCsv(path, TRAINING_CSV).rows).toHaveLength(3); // an earlier version reads it
});

test('documents name the columns of the files', () => {
  const header = Object.keys(TRAINING_CSV).join();
  for (const page of ['reference/training.md', 'reference/cli.md', 'runbooks/promises.md'])
    expect(readFileSync(new URL(`../../../docs/${page}`, import.meta.url), 'utf8'), page).toContain(header);
});

test('columns are found by name', () => {
  writeFileSync(path, 'extra,loss,lr,toks_per_s,step\nx,1,2,3,4\n');
  expect(readCsv(path, TRAINING_CSV).rows).toEqual([{ step: 4, loss: 1, lr: 2, toks_per_s: 3 }]);
});

test('text cannot break out of its cell', () => {
  const counters = join(folder, 'fallback_counters.csv');
  const writer = openCsv(counters, FALLBACK_COUNTERS_CSV);
  writer.write({ step: 1, counter: 'a,b\n9,"c', count: 2 });
  writer.close();
  expect(readCsv(counters, FALLBACK_COUNTERS_CSV).rows).toEqual([{ step: 1, counter: 'a_b_9__c', count: 2 }]);
});

test('a reader during the writing never sees half a row', () => {
  const writer = openCsv(path, TRAINING_CSV, steady);
  for (let step = 1; step <= 200; step++) {
    writer.write(row(step));
    expect(text().endsWith('\n')).toBe(true);
    expect(readCsv(path, TRAINING_CSV).rows).toHaveLength(step);
  }
  writer.close();
});
