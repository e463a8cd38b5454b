/** A run on several sources: its log files, the losses by source, its end with a source, and a resume with other weights. */
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { MixedSourceInput } from '../config/mixture.js';
import { namedMetrics } from '../dashboard/named-metrics.js';
import { readCsv, SOURCE_METRICS_CSV, VAL_CSV } from '../run/logs/csv.js';
import { readHeartbeats } from '../run/logs/heartbeat.js';
import { runPaths } from '../run/paths.js';
import { runTraining, temporaryFolder, tinyConfig } from '../testing/run.js';

let folder: { path: string; remove: () => void };
let sources: (weights: readonly number[], epochs?: number) => MixedSourceInput[];
beforeAll(() => {
  folder = temporaryFolder();
  const write = (name: string, line: (i: number) => string) => {
    const path = join(folder.path, name);
    writeFileSync(path, Array.from({ length: 400 }, (_, i) => line(i)).join('\n'));
    return path;
  };
  const paths = [
    write('words.txt', (i) => `the ${i % 7} lazy dogs sleep ${i % 3} times a day`),
    write('code.txt', (i) => `const x${i % 10} = [${i}, ${(i * i) % 97}];`),
  ];
  sources = (weights, epochs = 50) =>
    weights.map((weight, i) => ({ name: ['words', 'code'][i], source: 'text', path: paths[i], weight, epochs }));
});
afterAll(() => folder.remove());

const config = (name: string, weights: readonly number[], train: object = {}, epochs?: number) =>
  tinyConfig(join(folder.path, name), {
    data: { source: 'mixture', path: null, sources: sources(weights, epochs), val_fraction: 0.1 },
    train: { steps: 12, eval_every: 6, save_every: 6, eval_batches: 2, ...train },
  });

describe('a run on a mixture', () => {
  it('reports tokens, epochs and validation losses by source', async () => {
    const given = config('reports', [0.75, 0.25]);
    const { said, result } = await runTraining(given);
    expect(result.status).toBe('done');
    const paths = runPaths(given.train.out_dir);
    const beats = [...readHeartbeats(paths.heartbeat(0))];
    const steps = beats.filter(({ msg }) => msg === 'progress');
    const taken = steps.map((beat) => [beat.source_tokens_words!, beat.source_tokens_code!]);
    expect(taken.map(([words, code]) => words + code)).toEqual(steps.map((_, i) => (i + 1) * 2 * 64));
    expect(taken.at(-1)![0] / (12 * 2 * 64)).toBeCloseTo(0.75, 1);
    const evals = beats.filter(({ msg }) => msg === 'eval');
    const { rows } = readCsv(paths.val, VAL_CSV);
    expect(evals.length).toBe(2);
    for (const [i, beat] of evals.entries()) {
      const mean = 0.75 * beat.source_val_loss_words! + 0.25 * beat.source_val_loss_code!;
      expect(beat.val_loss!).toBeCloseTo(mean, 10);
      expect(rows[i].val_loss).toBeCloseTo(mean, 5);
    }
    const logged = readCsv(paths.sourceMetrics, SOURCE_METRICS_CSV).rows;
    expect(new Set(logged.map(({ metric }) => metric))).toEqual(
      new Set(
        ['source_tokens', 'source_epoch', 'source_val_loss'].flatMap((name) => [`${name}/code`, `${name}/words`]),
      ),
    );
    const chart = namedMetrics(paths.sourceMetrics);
    expect(chart.values.get('source_tokens/words')!.last.at(-1)).toBe(taken.at(-1)![0]);
    expect(said.find((line) => line.startsWith('eval 12'))).toMatch(/ \| code \d\.\d{4} \| words \d\.\d{4}$/);
  });

  it('ends with a source, by its name, after a checkpoint, and says so at the start', async () => {
    const given = config('ends', [0.5, 0.5], { steps: 4000, eval_every: 0, save_every: 0 }, 1);
    const { said, warned, result } = await runTraining(given);
    expect(result.status).toBe('no-data');
    const foretold = /data.sources: (\w+) ends after step (\d+) of 4000, and the run with it/.exec(warned.join('\n'))!;
    expect(foretold[1]).toBe('code');
    expect(warned.at(-1)).toMatch(/^data.sources: code has ended after 1 epoch; add data to it, raise its epochs/);
    const metrics = JSON.parse(readFileSync(runPaths(given.train.out_dir).metrics, 'utf8'));
    expect(metrics.step).toBe(Number(foretold[2]));
    expect(said.join('\n')).toContain('data: code 50 % of the tokens: text');
    // With more epochs the same run goes on.
    const more = config('ends', [0.5, 0.5], { steps: metrics.step + 3, eval_every: 0, save_every: 0 }, 9);
    const resumed = await runTraining(more, { resume: 'auto' });
    expect(resumed.result.status).toBe('done');
    expect(resumed.said).toContain('changed since: data.sources.code.epochs: 1 -> 9');
  });

  it('resumes bit for bit, and with changed weights prints them and goes on', async () => {
    const whole = config('whole', [0.6, 0.4]);
    await runTraining(whole);
    const half = config('half', [0.6, 0.4]);
    const abort = new AbortController();
    await runTraining(half, { signal: abort.signal, onStep: ({ step }) => void (step === 6 && abort.abort()) });
    await runTraining(half, { resume: 'auto' });
    const losses = (given: typeof whole) =>
      readFileSync(runPaths(given.train.out_dir).training, 'utf8').replace(/,[^,]*$/gm, '');
    expect(losses(half)).toBe(losses(whole));
    const changed = config('half', [0.2, 0.8], { steps: 40 });
    const { said, result } = await runTraining(changed, { resume: 'auto' });
    expect(result.status).toBe('done');
    expect(said).toContain('changed since: data.sources.words.weight: 0.6 -> 0.2');
    const one = config('half', [1], { steps: 50 });
    await expect(runTraining(one, { resume: 'auto' })).rejects.toThrow(
      /^data.sources.code: .* is not allowed on resume/,
    );
  });
});
