import { appendFileSync, mkdtempSync, readFileSync, renameSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { UsageError } from '../../errors.js';
import { cpuMs } from '../../testing/cpu-time.js';
import fc from '../../testing/properties.js';
import { parseHeartbeat, readHeartbeats, tailHeartbeats } from './heartbeat.js';
import { openHeartbeats } from './log.js';

let folder: string;
let path: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-heartbeat-'));
  path = join(folder, 'heartbeat_rank0.jsonl');
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

function line(step: number): string {
  return `{"ts":${1000 + step},"iso":"x","pid":1,"rank":0,"step":${step},"msg":"progress","loss":${1 / step}}\n`;
}

function steps(count: number): number[] {
  return tailHeartbeats(path, count).map(({ step }) => step);
}

test('a line has the identity of the writer and the fields of the step', () => {
  const writer = openHeartbeats(path, 3, { clock: () => 1_700_000_000_500, now: () => 0 });
  writer.write({ step: 1, msg: 'boot', data: 'jsonl' });
  writer.write({
    step: 2,
    msg: 'progress',
    loss: Number.NaN,
    grad_norm: Infinity,
    fb_dense: 4,
    gate_branch_shares: [0.5, 0.25, 0.25],
  });
  expect(JSON.parse(readFileSync(path, 'utf8').split('\n')[0])).toEqual({
    ts: 1_700_000_000.5,
    iso: '2023-11-14T22:13:20.500Z',
    pid: process.pid,
    rank: 3,
    step: 1,
    msg: 'boot',
    data: 'jsonl',
  });
  const [, second] = tailHeartbeats(path, 2);
  expect(second.loss).toBeNaN();
  expect(second).toMatchObject({ step: 2, grad_norm: Infinity, fb_dense: 4, gate_branch_shares: [0.5, 0.25, 0.25] });
  expect(writer.flush()).toBe(true);
  writer.close();
  expect(writer.drops).toBe(0);
});

test('the tail gives the last ones in order, fewer when there are fewer', () => {
  writeFileSync(path, Array.from({ length: 5000 }, (_, i) => line(i + 1)).join(''));
  expect(steps(3)).toEqual([4998, 4999, 5000]);
  expect(steps(1)).toEqual([5000]);
  expect(steps(0)).toEqual([]);
  expect(steps(4999)).toHaveLength(4999);
  expect(steps(9999)).toHaveLength(5000);
  expect([...readHeartbeats(path)].map(({ step }) => step)).toEqual(steps(5000));
});

test('a file that is missing, empty, truncated or replaced', () => {
  expect(steps(5)).toEqual([]);
  expect([...readHeartbeats(path)]).toEqual([]);
  writeFileSync(path, '');
  expect(steps(5)).toEqual([]);
  writeFileSync(path, line(1) + line(2));
  truncateSync(path, line(1).length + 10);
  expect(steps(5)).toEqual([1]);
  renameSync(path, `${path}.1`);
  writeFileSync(path, line(9));
  expect(steps(5)).toEqual([9]);
  expect(() => tailHeartbeats(folder, 1)).toThrow(UsageError);
});

test('a line that is being written is not there yet', () => {
  writeFileSync(path, line(1) + line(2).slice(0, -1));
  expect(steps(5)).toEqual([1]);
  appendFileSync(path, '\n');
  expect(steps(5)).toEqual([1, 2]);
});

test('garbage between lines is passed over, also more of it than a window', () => {
  const garbage = `\0\xff{"step":\n[]\nnull\n{"step":"x"}\n${'y'.repeat(200_000)}\n`;
  writeFileSync(path, line(1) + garbage + line(2) + garbage);
  expect(steps(2)).toEqual([1, 2]);
  expect([...readHeartbeats(path)].map(({ step }) => step)).toEqual([1, 2]);
});

test('a line longer than any buffer does not fill the memory', () => {
  writeFileSync(path, `${line(1)}${'z'.repeat(5_000_000)}\n${line(2)}`);
  expect([...readHeartbeats(path)].map(({ step }) => step)).toEqual([1, 2]);
});

test('the tail of a file of 2 GB is read at once and in little memory', () => {
  // A sparse file: the hole in front reads as zeros, one garbage line of 2 GB.
  writeFileSync(path, line(1));
  truncateSync(path, 2 * 2 ** 30);
  appendFileSync(path, `\n${Array.from({ length: 100 }, (_, i) => line(i + 1)).join('')}`);
  const memory = process.memoryUsage().rss;
  const ms = cpuMs(() => expect(steps(10)).toEqual([91, 92, 93, 94, 95, 96, 97, 98, 99, 100]));
  expect(ms).toBeLessThan(200);
  expect(steps(200)).toHaveLength(100);
  expect(process.memoryUsage().rss - memory).toBeLessThan(100e6);
});

test('fields of a wrong kind are left out; without identity it is no heartbeat', () => {
  const good = { ts: 1, pid: 2, rank: 0, step: 3, msg: 'progress' };
  expect(
    parseHeartbeat(JSON.stringify({ ...good, loss: 'x', data: 7, mfu: 0.4, gate_branch_shares: [1, 'a'] })),
  ).toEqual({
    ...good,
    mfu: 0.4,
  });
  for (const name of Object.keys(good)) {
    expect(parseHeartbeat(JSON.stringify({ ...good, [name]: undefined })), name).toBeUndefined();
    expect(parseHeartbeat(JSON.stringify({ ...good, [name]: [] })), name).toBeUndefined();
  }
});

test('no bytes make the readers fail', () => {
  fc.assert(
    fc.property(
      fc.array(fc.oneof(fc.uint8Array(), fc.json().map(Buffer.from), fc.constant(Buffer.from(line(1))))),
      (parts) => {
        writeFileSync(path, Buffer.concat(parts.flatMap((part) => [Buffer.from(part), Buffer.from('\n')])));
        expect(tailHeartbeats(path, 1000)).toEqual([...readHeartbeats(path)]);
      },
    ),
  );
});
