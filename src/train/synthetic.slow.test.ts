/** --synthetic-on-fail: noise in place of a source that fails is seen by every reader, and never in place of a mistake. */
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, beforeEach, expect, it, vi } from 'vitest';
import { stringify } from 'yaml';
import { runCli } from '../cli/testing/run.js';
import { collectRun } from '../dashboard/report/collect.js';
import { Runs } from '../dashboard/runs.js';
import { DATASET, numberedDocuments } from '../data/testing/corpora.js';
import { parquetFile } from '../data/testing/parquet.js';
import { type HubServer, startHub } from '../hub/testing/hub-server.js';
import { tailHeartbeats } from '../run/logs/heartbeat.js';
import { runPaths } from '../run/paths.js';
import { trefoilMain } from '../testing/cli.js';
import { mpirunAbsence, startMpirun } from '../testing/ranks.js';
import { runTraining, temporaryFolder, tinyConfig } from '../testing/run.js';
import { resolveThresholds } from '../watch/thresholds.js';

const STEPS = 60;
let hub: HubServer;
let folder: ReturnType<typeof temporaryFolder>;
beforeAll(async () => {
  const files = [0, 1, 2].map(
    (file) => [`data/${file}.parquet`, parquetFile({ documents: numberedDocuments(120, `f${file}-`) })] as const,
  );
  hub = await startHub({ dataset: DATASET, files: new Map(files) });
});
afterAll(() => hub.close());
beforeEach(() => {
  folder = temporaryFolder();
  vi.stubEnv('HF_ENDPOINT', hub.endpoint);
});
afterEach(() => {
  hub.dead = false;
  vi.unstubAllEnvs();
  folder.remove();
});

const HUB = { source: 'hub', path: null, hub_dataset: DATASET, cache_gb: 0, workers: 1, prefetch: false };

function config(name: string, train: object = {}, loaderTimeout = 6) {
  return tinyConfig(folder.path, {
    data: { ...HUB, synthetic_on_fail: true, loader_timeout: loaderTimeout, val_fraction: 0 },
    train: { steps: STEPS, eval_every: 0, save_every: 0, out_dir: join(folder.path, name), ...train },
  });
}

const dieAt = (step: number) => ({
  onLine: (line: string) => {
    if (line.startsWith(`step ${String(step).padStart(4, '0')} `)) hub.dead = true;
  },
});

const sources = (outDir: string, rank = 0) =>
  tailHeartbeats(runPaths(outDir).heartbeat(rank), 1000)
    .filter(({ msg }) => msg === 'progress')
    .map(({ data }) => data);

it('status, health, watch, check, dashboard and report show it, and count its steps', async () => {
  const { result, warned, said } = await runTraining(config('run'), dieAt(2));
  const { outDir } = result;
  expect(result.status).toBe('done');
  expect(warned.filter((line) => line.includes('SYNTHETIC random tokens in place of hub'))).toHaveLength(1);
  const data = sources(outDir);
  const first = data.indexOf('synthetic') + 1;
  const count = STEPS - first + 1;
  expect(data).toEqual([...Array(first - 1).fill('hub'), ...Array(count).fill('synthetic')]);
  expect(said.filter((line) => line.startsWith('step ') && line.endsWith(' | SYNTHETIC data'))).toHaveLength(count);

  const text = 'SYNTHETIC data in place of hub';
  const look = async (...words: string[]) => await runCli(words);
  expect((await look('status', '--dir', outDir)).stdout).toMatch(
    new RegExp(`done, SYNTHETIC data [^]*\nrun done; ${text}`),
  );
  const health = await look('health', '--dir', outDir);
  expect([health.code, health.stdout.split('\n')[0]]).toEqual([1, `done; ${text}`]);
  expect(health.stdout).toMatch(/FAIL +data/);
  expect((await look('watch', '--dir', outDir, '--once')).stderr).toContain(
    `CRITICAL run: data: the run trains on ${text}. `,
  );
  const check = await look('check', '--dir', outDir, '--json');
  expect(check.code).toBe(1);
  expect(JSON.parse(check.stdout).rows).toContainEqual({
    ...{ rule: 'data', level: 'red', value: text, limit: 'the source of the config' },
  });
  const [row] = await new Runs(folder.path, resolveThresholds({})).rows();
  expect(row.synthetic).toBe(text);
  const report = collectRun(outDir);
  expect(report.state).toBe(`done; ${text}`);
  expect(report.deviations).toContain(`${count} steps on synthetic tokens in place of hub`);
});

it('a source that fails before its first batch begins at its start when it is back', async () => {
  hub.dead = true;
  const early = await runTraining(config('early', { steps: 4, save_every: 4 }));
  expect(sources(early.result.outDir)).toEqual(Array(4).fill('synthetic'));
  hub.dead = false;
  const resumed = await runTraining(config('early', { steps: 6, save_every: 4 }), { resume: 'auto' });
  expect(sources(resumed.result.outDir).slice(-2)).toEqual(['hub', 'hub']);
});

it('all ranks change over at the same step', async ({ skip }) => {
  const absence = mpirunAbsence();
  if (absence) skip(absence);
  // A hub that shares a busy machine with both ranks may need more than 6 s for the first batch.
  const settings = config('ranks', { batch_size: 1, steps: 300 }, 30);
  const file = join(folder.path, 'config.yaml');
  writeFileSync(file, stringify(settings));
  const run = startMpirun(2, [process.execPath, trefoilMain(), 'train', '--config', file]);
  await expect.poll(() => sources(settings.train.out_dir).length).toBeGreaterThan(2);
  hub.dead = true;
  const { code, stderr } = await run.ended;
  expect(code, stderr).toBe(0);
  const [first, second] = [0, 1].map((rank) => sources(settings.train.out_dir, rank));
  expect(first).toEqual(second);
  expect([first[0], first.at(-1)]).toEqual(['hub', 'synthetic']);
});

it.each([
  ['text', { path: 'nothing-here' }],
  ['jsonl', { path: 'nothing-here' }],
  ['files', { path: 'nothing-here' }],
  ['tokens', { path: 'nothing-here' }],
  ['hub', { path: null, hub_dataset: 'owner/nothing-here' }],
  ['hub', { path: null, hub_dataset: DATASET, hub_config: 'nothing-here' }],
])('%s: what does not exist is refused: %j', async (source, data) => {
  const given = tinyConfig(folder.path, {
    data: { source, ...data, ...(data.path && { path: join(folder.path, data.path) }), synthetic_on_fail: true },
  });
  await expect(runTraining(given)).rejects.toMatchObject({
    exitCode: 2,
    message: expect.stringContaining('nothing-here'),
  });
});
