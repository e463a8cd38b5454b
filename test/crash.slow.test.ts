/**
 * SIGKILL at random moments, some inside a checkpoint write; after each the run is resumed. At the end its losses,
 * evaluations, position in the data and weights are those of a run that nothing disturbed, bit for bit. For data by
 * position, and for data that is streamed: from a hub, and from a folder of Parquet files.
 *
 * Two kills of each here, always with the same choices; TREFOIL_LONG=1 makes it thirty, with new choices. A failure prints
 * its seed; TREFOIL_SEED=<seed> makes the same choices again.
 */
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { DATASET, numberedDocuments } from '../src/data/testing/corpora.js';
import { parquetFile } from '../src/data/testing/parquet.js';
import { type HubServer, startHub } from '../src/hub/testing/hub-server.js';
import { findCheckpoint } from '../src/run/checkpoint/read.js';
import { readCsv, TRAINING_CSV } from '../src/run/logs/csv.js';
import { runPaths } from '../src/run/paths.js';
import { randomNumbers } from '../src/testing/random.js';
import { temporaryFolder, tinyConfig } from '../src/testing/run.js';
import { Life, pause } from './chaos/supervisor.js';

const LONG = process.env['TREFOIL_LONG'] === '1';
const KILLS = LONG ? 30 : 2;
const SEED = Number(process.env['TREFOIL_SEED'] ?? (LONG ? Math.floor(Math.random() * 1e9) : 1));
/** Enough that the run is not over before the last kill: a life does three quarters of its share at most. */
const STEPS = 20 * KILLS;

let folder: { path: string; remove: () => void };
let hub: HubServer;
beforeAll(async () => {
  folder = temporaryFolder();
  const files = new Map(
    ['a', 'b', 'c', 'd'].map((tag, i) => {
      const documents = numberedDocuments(50, tag);
      return [`data/${i}.parquet`, parquetFile({ documents, rowsPerGroup: 3 })] as const;
    }),
  );
  hub = await startHub({ dataset: DATASET, files });
  mkdirSync(join(folder.path, 'parquet', 'data'), { recursive: true });
  for (const [name, bytes] of files) writeFileSync(join(folder.path, 'parquet', name), bytes);
});
afterAll(async () => {
  await hub.close();
  folder.remove();
});

/** On a busy machine the threads of a source may wait a minute for their turn. */
const PATIENT = { loader_timeout: 600 };

const SOURCES = [
  { from: 'shards', data: () => ({}) },
  {
    from: 'a hub',
    data: () => ({ source: 'hub', path: null, hub_dataset: DATASET, cache_gb: 0, workers: 2, queue: 9, ...PATIENT }),
  },
  {
    from: 'a folder of Parquet',
    data: () => ({ source: 'files', path: join(folder.path, 'parquet'), workers: 1, document_mask: true, ...PATIENT }),
  },
];

const life = (args: readonly string[]) => new Life(args, { HF_ENDPOINT: hub.endpoint });

async function completes(args: readonly string[]): Promise<void> {
  const whole = life(args);
  expect(await whole.ending, whole.stderr).toEqual({ code: 0, signal: null });
}

describe.each(SOURCES)(`${KILLS} times kill -9 and resume, from $from (seed ${SEED})`, ({ from, data }) => {
  it('ends with the files of an undisturbed run', async () => {
    // Large enough that a checkpoint takes a while to write, so that kills fall into writes too.
    const run = (name: string) => {
      const config = tinyConfig(folder.path, {
        model: { dim: 96, n_layers: 3 },
        data: data(),
        train: { steps: STEPS, eval_every: 10, save_every: 5, out_dir: join(folder.path, `${name} of ${from}`) },
      });
      const file = join(folder.path, `${name}.yaml`);
      writeFileSync(file, stringify(config));
      return { outDir: config.train.out_dir, args: ['train', '--config', file, '--resume', 'auto'] };
    };
    const calm = run('calm');
    const isCalm = completes(calm.args); // meanwhile
    isCalm.catch(() => {}); // awaited below

    const stormy = run('stormy');
    const random = randomNumbers(SEED);
    const moments: string[] = [];
    for (let kill = 0; kill < KILLS; kill++) {
      const victim = life(stormy.args);
      // Some die while they start, the others at any moment of some step.
      if (random() < 0.2) await victim.starting(random() * 1500);
      else await victim.progress(1 + Math.floor((random() * 0.75 * STEPS) / KILLS)).then(() => pause(random() * 40));
      victim.send('SIGKILL');
      expect(await victim.ending, victim.stderr).toEqual({ code: null, signal: 'SIGKILL' });
      moments.push(`${victim.steps} (${findCheckpoint(stormy.outDir, 'auto')?.step ?? 'none'})`);
    }
    await completes(stormy.args);
    await isCalm;
    console.log(`${from}: steps of each life (checkpoint it left): ${moments.join(', ')}`);

    const [a, b] = [runPaths(calm.outDir), runPaths(stormy.outDir)];
    const losses = (path: string) => readCsv(path, TRAINING_CSV).rows.map(({ step, loss, lr }) => ({ step, loss, lr }));
    expect(losses(b.training)).toEqual(losses(a.training));
    expect(losses(b.training)).toHaveLength(STEPS);
    expect(readFileSync(b.val, 'utf8')).toBe(readFileSync(a.val, 'utf8'));
    expect(readFileSync(b.model).equals(readFileSync(a.model))).toBe(true);
    // The cursor of every lane, the tokens seen, Adam's steps: a token lost or repeated would have moved them.
    const state = (outDir: string) => {
      const { config: _config, ...rest } = findCheckpoint(outDir, 'auto')!.state;
      return rest;
    };
    expect(state(stormy.outDir)).toEqual(state(calm.outDir));
  }, 3_600_000);
});
