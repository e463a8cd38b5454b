/**
 * A heartbeat file of gigabytes must not slow those who look at a run: they read its end and a few places. A tenth of that
 * here; TREFOIL_LONG=1 makes it 2 GB.
 */
import { closeSync, mkdirSync, openSync, statSync, writeFileSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { runPaths } from '../src/run/paths.js';
import { trefoil } from '../src/testing/cli.js';
import { countUsage, cpuMs } from '../src/testing/cpu-time.js';
import { temporaryFolder } from '../src/testing/run.js';
import { checkHealth } from '../src/watch/rules.js';
import { runStatus } from '../src/watch/status.js';
import { healthyStep } from '../src/watch/testing/recorded-run.js';
import { resolveThresholds } from '../src/watch/thresholds.js';
import { Watchdog } from '../src/watch/watchdog.js';

const BYTES = process.env['TREFOIL_LONG'] ? 2 * 2 ** 30 : 200 * 2 ** 20;
const LINES_PER_BLOCK = 1000;
const LIMIT_MS = 200;
const LIMIT_MIB = 100;

let folder: { path: string; remove: () => void };
beforeAll(() => {
  folder = temporaryFolder();
  writeHeartbeats(runPaths(folder.path).heartbeat(0));
});
afterAll(() => folder.remove());

/** Lines with steps and times that rise from the first to the last, a second apart, the last one now. */
function writeHeartbeats(path: string): void {
  const line = (step: number, ts: number) =>
    `${JSON.stringify({ ts, iso: new Date(ts * 1000).toISOString(), pid: 1, rank: 0, ...healthyStep(1), step })}\n`;
  const total = Math.ceil(BYTES / line(10_000_000, 1_700_000_000).length);
  const first = Math.floor(Date.now() / 1000) - total;
  const descriptor = openSync(path, 'w');
  // A block is made once and only the numbers in it replaced: three million calls of JSON.stringify would take a minute.
  const [stepMark, tsMark] = ['"step":10000000', `"ts":${first}`];
  const [before, middle, after] = line(10_000_000, first).split(new RegExp(`${tsMark}|${stepMark}`));
  for (let step = 0; step < total; step += LINES_PER_BLOCK) {
    let block = '';
    for (let i = step; i < step + LINES_PER_BLOCK; i++)
      block += `${before}"ts":${first + i}${middle}"step":${10_000_000 + i}${after}`;
    writeSync(descriptor, block);
  }
  closeSync(descriptor);
}

const middle = (values: number[]) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];

describe(`a heartbeat file of ${(BYTES / 2 ** 20).toFixed(0)} MiB`, () => {
  it('is as large as it should be, and sound', () => {
    expect(statSync(runPaths(folder.path).heartbeat(0)).size).toBeGreaterThan(BYTES * 0.99);
    const { rows } = checkHealth(folder.path, resolveThresholds({}));
    // The throughput rule found both the last ten minutes and what was before them.
    expect(rows.find(({ rule }) => rule === 'throughput')).toMatchObject({
      value: '100 % of the usual',
      level: 'green',
    });
    expect(rows.filter(({ level }) => level === 'red')).toEqual([]);
  });

  it.each([
    ['health', () => checkHealth(folder.path, resolveThresholds({}))],
    ['status', () => runStatus(folder.path)],
    ['watch', () => new Watchdog({ dir: folder.path, thresholds: resolveThresholds({}), halt: false }).tick()],
  ] as const)(`%s looks at it in less than ${LIMIT_MS} ms`, (name, look) => {
    const times = Array.from({ length: 5 }, () => cpuMs(look));
    console.log(`${name}: ${middle(times).toFixed(0)} ms`);
    expect(middle(times)).toBeLessThan(LIMIT_MS);
  });

  it.each([
    ['health', ['health', '--dir']],
    ['status', ['status', '--dir']],
    ['watch', ['watch', '--once', '--dir']],
  ])(`trefoil %s takes less than ${LIMIT_MIB} MB, and hardly more time than for a short file`, async (name, words) => {
    const short = join(folder.path, 'short');
    const paths = runPaths(short);
    const usage = async (dir: string) => {
      const counter = countUsage(folder.path);
      const result = await trefoil([...words, dir], { env: counter.env });
      expect(result.code, result.stdout + result.stderr).toBe(0);
      return counter.read();
    };
    mkdirSync(short, { recursive: true });
    writeFileSync(
      paths.heartbeat(0),
      `${JSON.stringify({ ts: Date.now() / 1000, pid: 1, rank: 0, ...healthyStep(1) })}\n`,
    );
    const [large, small] = [await usage(folder.path), await usage(short)];
    console.log(
      `${name}: ${large.mib.toFixed(0)} MiB, ${large.ms.toFixed(0)} ms of CPU (${small.ms.toFixed(0)} for one line)`,
    );
    expect(large.mib).toBeLessThan(LIMIT_MIB);
    expect(large.ms - small.ms).toBeLessThan(LIMIT_MS);
  });
});
