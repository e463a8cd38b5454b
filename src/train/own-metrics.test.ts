/** Metrics of a program's own, and models of its own, in the files of a run. */
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { namedMetrics } from '../dashboard/named-metrics.js';
import { ParameterStore } from '../model/parameters.js';
import { linearCrossEntropy } from '../ops/crossentropy/op.js';
import { embedding } from '../ops/embedding/op.js';
import { OWN_METRICS_CSV, readCsv, TRAINING_CSV } from '../run/logs/csv.js';
import { readHeartbeats } from '../run/logs/heartbeat.js';
import { runPaths } from '../run/paths.js';
import { readRun } from '../run/reader.js';
import { cpu } from '../testing/devices.js';
import { runTraining, temporaryFolder, tinyConfig } from '../testing/run.js';
import { wallAges } from '../watch/ages.js';
import { runState } from '../watch/state.js';
import type { TokenBatch } from './iterable-loader.js';
import type { TrainableModel } from './step.js';
import { Trainer } from './trainer.js';

const folder = temporaryFolder();
afterAll(() => folder.remove());

/** The smallest model that trains: an embedding and a head, without shape and without losses per target. */
function bigrams(seed = 1): TrainableModel & { free(): void } {
  const store = new ParameterStore(cpu(), seed, 1);
  const [table, head] = [store.matrix('table', [16, 8]), store.matrix('head', [16, 8])];
  return {
    device: cpu(),
    parameters: store.parameters,
    loss: (tape, ids, targets) => linearCrossEntropy(tape, embedding(tape, table.value, ids), head.value, targets),
    free: () => store.free(),
  };
}

const LENGTH = 32;
function* batches(count: number): Generator<TokenBatch> {
  for (let k = 0; k < count; k++) {
    const tokens = Int32Array.from({ length: LENGTH + 1 }, (_, i) => (k + i) % 16);
    yield { inputs: tokens.slice(0, LENGTH), targets: tokens.slice(1), cuSeqlens: Int32Array.of(0, LENGTH) };
  }
}

function filesOf(outDir: string) {
  const paths = runPaths(outDir);
  const progress = [...readHeartbeats(paths.heartbeat(0))].filter(({ msg }) => msg === 'progress');
  const events = readdirSync(paths.tensorboard).map((name) => readFileSync(join(paths.tensorboard, name), 'latin1'));
  return { paths, progress, events: events.join(''), rows: readCsv(paths.ownMetrics, OWN_METRICS_CSV).rows };
}

describe('numbers that onStep returns', () => {
  const config = tinyConfig(join(folder.path, 'a'), {
    train: { steps: 6, save_every: 3, eval_every: 0, log_every: 10 },
  });
  const { out_dir: outDir } = config.train;

  it('are in the heartbeat, own_metrics.csv, TensorBoard and the charts, and resume with the run', async () => {
    const first = { ...config, train: { ...config.train, steps: 6 } };
    const abort = new AbortController();
    const onStep = ({ step, loss }: { step: number; loss: number }) => {
      if (step === 4) abort.abort();
      return step % 2 === 0 ? { bits: loss / Math.LN2, even: step } : undefined;
    };
    await runTraining(first, { onStep, signal: abort.signal });
    await runTraining(first, { onStep: ({ step }) => ({ even: step }), resume: 'auto' });
    const { paths, progress, events, rows } = filesOf(outDir);
    expect(progress.map((beat) => beat.own_even)).toEqual([undefined, 2, undefined, 4, 5, 6]);
    expect(progress[1].own_bits! * Math.LN2).toBeCloseTo(progress[1].loss!, 5);
    expect(rows.map(({ step, metric }) => `${step} ${metric}`)).toEqual([
      ...['2 bits', '2 even', '4 bits', '4 even', '5 even', '6 even'],
    ]);
    expect(events).toContain('own/bits');
    const chart = namedMetrics(paths.ownMetrics);
    expect(chart.columns).toEqual(['bits', 'even']);
    expect([...chart.values.get('even')!.last]).toEqual([2, 4, 5, 6]);
  });

  it('are ignored if they are no record, and refused under a name that no file can hold', async () => {
    const other = tinyConfig(join(folder.path, 'b'), { train: { steps: 2, save_every: 0, eval_every: 0 } });
    await expect(runTraining(other, { onStep: () => ({ 'a,b': 1 }) })).rejects.toThrow(
      'Trainer.log: "a,b" is not the name of a metric',
    );
    const third = tinyConfig(join(folder.path, 'c'), { train: { steps: 2, save_every: 0, eval_every: 0 } });
    const losses: number[] = [];
    const { result } = await runTraining(third, { onStep: ({ loss }) => losses.push(loss) });
    expect(result.status).toBe('done');
    const text = { accuracy: 'high' } as unknown as Record<string, number>;
    const model = bigrams();
    const trainer = new Trainer({ model, data: batches(1) });
    expect(() => trainer.log(text)).toThrow('Trainer.log: accuracy must be a number, not string');
    trainer.free();
    model.free();
  });
});

describe('a Trainer with recordTo', () => {
  const config = parseConfig({ train: { lr: 1e-2, warmup_steps: 0, log_every: 2 } });

  it('trains a model that has only a loss, and records it with its own metrics', async () => {
    const outDir = join(folder.path, 'own', 'run');
    const model = bigrams();
    const trainer = new Trainer({ model, data: batches(100), config, steps: 6, recordTo: outDir });
    trainer.log({ before: 1 });
    for await (const { step } of trainer) {
      if (step === 3) trainer.log({ accuracy: (await trainer.evaluate(batches(2))).loss });
      trainer.log({ twice: 2 * step });
    }
    const { paths, progress, rows, events } = filesOf(outDir);
    expect(progress.map((beat) => [beat.own_before, beat.own_twice])).toEqual([
      [1, 2],
      ...[4, 6, 8, 10, 12].map((twice) => [undefined, twice]),
    ]);
    expect(progress[2].own_accuracy).toBeGreaterThan(0);
    expect(progress.at(-1)!.loss!).toBeLessThan(progress[0].loss!);
    expect(rows).toHaveLength(8);
    expect(events).toContain('own/accuracy');
    expect(readCsv(paths.training, TRAINING_CSV).rows.map(({ step }) => step)).toEqual([1, 2, 4, 6]);
    trainer.free();
    expect(runState(readRun(outDir), wallAges())).toMatchObject({ kind: 'ended', name: 'done' });
    // The folder holds a run now: another one is refused, and nothing of it is lost.
    const second = new Trainer({ model, data: batches(9), config, steps: 6, recordTo: outDir });
    await expect(second.step()).rejects.toThrow('holds a run already');
    second.free();
    model.free();
  });

  it('says how the run ended if it was left early, or by an error', async () => {
    const model = bigrams();
    const leave = async (name: string, data: Iterable<TokenBatch>) => {
      const outDir = join(folder.path, 'own', name);
      const trainer = new Trainer({ model, data, config, steps: 6, recordTo: outDir });
      const outcome = await trainer.step().then(
        () => 'a step',
        (error: Error) => error.message,
      );
      trainer.free();
      return { outcome, state: runState(readRun(outDir), wallAges()) };
    };
    expect(await leave('early', batches(9))).toMatchObject({ outcome: 'a step', state: { name: 'stopped' } });
    const [broken] = batches(1);
    const bad = { ...broken, inputs: broken.inputs.map(() => 99) };
    expect((await leave('error', [bad])).state).toMatchObject({ name: 'failed' });
    model.free();
  });
});
