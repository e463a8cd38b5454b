import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it, vi } from 'vitest';
import { DATASET, numberedDocuments } from '../data/testing/corpora.js';
import { parquetFile } from '../data/testing/parquet.js';
import { type HubServer, startHub } from '../hub/testing/hub-server.js';
import { listCheckpoints } from '../run/checkpoint/read.js';
import { readCsv, TRAINING_CSV } from '../run/logs/csv.js';
import { tailHeartbeats } from '../run/logs/heartbeat.js';
import { readAnomaly, runPaths, writeHalt } from '../run/paths.js';
import { readJsonFile } from '../run/reader.js';
import { runTraining, temporaryFolder, tinyConfig } from '../testing/run.js';
import { EXIT_CODES } from './options.js';

const TOKEN = 'hf_verysecrettoken';
const SHORT = { steps: 8, eval_every: 0, save_every: 4, keep_last: 5, accumulate_grad_batches: 2 };

let hub: HubServer;
let folder: { path: string; remove: () => void };
beforeAll(async () => {
  const files = [0, 1, 2].map(
    (file) => [`data/${file}.parquet`, parquetFile({ documents: numberedDocuments(120, `f${file}-`) })] as const,
  );
  hub = await startHub({ dataset: DATASET, files: new Map(files), token: TOKEN });
});
afterAll(() => hub.close());
beforeEach(() => {
  folder = temporaryFolder();
  vi.stubEnv('HF_ENDPOINT', hub.endpoint);
  vi.stubEnv('HF_TOKEN', TOKEN);
});
afterEach(() => {
  hub.dead = false;
  vi.unstubAllEnvs();
  folder.remove();
});

function config(name: string, data: object = {}, train: object = {}) {
  return tinyConfig(folder.path, {
    data: {
      source: 'hub',
      path: null,
      hub_dataset: DATASET,
      cache_gb: 0,
      loader_timeout: 60,
      workers: 1,
      report_docs: 10,
      ...data,
    },
    train: { ...SHORT, out_dir: join(folder.path, name), ...train },
  });
}

const losses = (outDir: string) =>
  readCsv(runPaths(outDir).training, TRAINING_CSV).rows.map(({ step, loss }) => [step, loss]);

/** Kills the source when this step has been said. */
const dieAt = (step: number) => ({
  onLine: (line: string) => {
    if (line.startsWith(`step ${String(step).padStart(4, '0')} `)) hub.dead = true;
  },
});

describe('training from a hub', () => {
  it('goes to the end, evaluates, and reports documents and queue', async () => {
    const { result, said } = await runTraining(
      config('whole', { warmup_batches: 3, val_fraction: 0.2 }, { eval_every: 4 }),
    );
    expect(result.status).toBe('done');
    expect(result.valLoss).toBeGreaterThan(0);
    expect(said.some((line) => /^data: \d+ docs processed, [\d.]+ MB of text$/.test(line))).toBe(true);
    const beat = tailHeartbeats(runPaths(result.outDir).heartbeat(0), 50).findLast(({ msg }) => msg === 'progress')!;
    expect(beat).toMatchObject({ data: 'hub', docs_seen: expect.any(Number), queue_fill: expect.any(Number) });
    expect(beat['docs_seen' as 'step']).toBeGreaterThan(5);
  });

  it('ends with code 6 and a checkpoint when the source stays dead, and goes on as if nothing had been', async () => {
    // One lane's batches at a time, no reading ahead: the source is needed at every step.
    const long = { save_every: 100, steps: 400 };
    const slow = { prefetch: false, val_fraction: 0, loader_timeout: 6 };
    const { result, warned } = await runTraining(config('dies', slow, long), dieAt(3));
    expect(result.status).toBe('no-data');
    expect(EXIT_CODES[result.status]).toBe(6);
    expect(warned.at(-1)).toMatch(/gave nothing for 6 s.*--loader-timeout/);
    const paths = runPaths(result.outDir);
    expect(listCheckpoints(paths.checkpoints).map(({ step }) => step)).toContain(result.step);
    const end = { step: result.step, detail: warned.at(-1) };
    expect(tailHeartbeats(paths.heartbeat(0), 2)).toMatchObject([
      { msg: 'loader_error', ...end },
      { msg: 'halt', status: 'no-data', exit_code: 6, ...end },
    ]);
    expect(readJsonFile(paths.metrics)).toMatchObject({ status: 'no-data', exit_code: 6, error: warned.at(-1) });
    expect(readAnomaly(result.outDir)).toBe('no_data');

    hub.dead = false;
    const goal = { ...long, steps: result.step + 3, lr_schedule: 'constant', warmup_steps: 0 };
    const resumed = await runTraining(config('dies', slow, goal), { resume: 'auto' });
    expect(resumed.result).toMatchObject({ status: 'done', step: result.step + 3 });
  });

  it.each(['.HALT', 'SIGTERM'])('%s stops it at once while it waits for a source that hangs', async (how) => {
    const hanging = { prefetch: false, val_fraction: 0, loader_timeout: 600 };
    let askedAt = 0;
    const { result, said } = await runTraining(config(`hangs${how}`, hanging, { save_every: 100, steps: 400 }), {
      onLine: (line, signals) => {
        if (askedAt > 0 || !line.startsWith('step 0003 ')) return;
        hub.dead = true;
        askedAt = performance.now() + 3000; // by then it hangs
        setTimeout(() => {
          if (how === 'SIGTERM') signals.emit('SIGTERM', 'SIGTERM');
          else writeHalt(join(folder.path, `hangs${how}`), 'manual_stop');
        }, 3000);
      },
    });
    expect(performance.now() - askedAt).toBeLessThan(120_000); // not the 600 s of the loader
    expect(result.status).toBe(how === 'SIGTERM' ? 'signalled' : 'halted');
    expect(said.at(-1)).toBe(`stopped after step ${result.step} by ${how === 'SIGTERM' ? how : '.HALT: manual_stop'}`);
    expect(listCheckpoints(runPaths(result.outDir).checkpoints)[0].step).toBe(result.step);
  });

  it('is bitwise the same with an interruption, whatever had been read ahead', async () => {
    const whole = await runTraining(config('a'));
    let stopped = false;
    const first = await runTraining(config('b'), {
      onLine: (line, signals) => {
        if (stopped || !line.startsWith('step 0005 ')) return;
        stopped = true;
        signals.emit('SIGTERM', 'SIGTERM');
      },
    });
    expect(first.result).toMatchObject({ status: 'signalled', step: 5 });
    const second = await runTraining(config('b', { queue: 9, workers: 2, doc_batch: 3 }), { resume: 'auto' });
    expect(losses(second.result.outDir)).toEqual(losses(whole.result.outDir));
  });

  it('keeps the token out of everything it prints and writes', async () => {
    const { result, said, warned } = await runTraining(
      config('secret', { prefetch: false, loader_timeout: 6 }, { steps: 400 }),
      dieAt(2),
    );
    expect(result.status).toBe('no-data');
    expect(hub.authorizations.at(-1)).toBe(`Bearer ${TOKEN}`);
    expect([...said, ...warned].join('\n')).not.toContain(TOKEN);
    const files = readdirSync(result.outDir, { recursive: true, withFileTypes: true }).filter((entry) =>
      entry.isFile(),
    );
    expect(files.map(({ name }) => name)).toEqual(
      expect.arrayContaining(['env.json', 'heartbeat_rank0.jsonl', 'config.yaml']),
    );
    for (const entry of files)
      expect(readFileSync(join(entry.parentPath ?? entry.path, entry.name)).includes(TOKEN), entry.name).toBe(false);
  });

  it('refuses a wrong token before anything is created', async () => {
    vi.stubEnv('HF_TOKEN', 'hf_wrong');
    const refused = config('refused');
    await expect(runTraining(refused)).rejects.toMatchObject({
      exitCode: 2,
      message: expect.stringMatching(/access refused.*HF_TOKEN/),
    });
    await expect(runTraining(refused)).rejects.not.toThrow(/hf_wrong/);
    expect(existsSync(refused.train.out_dir)).toBe(false);
  });
});
