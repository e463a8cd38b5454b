import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import type { ConfigInput } from '../config/schema.js';
import { trainingFlops } from '../model/flops.js';
import { parameterCount } from '../model/memory.js';
import { modelShape } from '../model/shape.js';
import fc from '../testing/properties.js';
import { launchesOfPass } from './launches.js';
import { type MeasuredFile, readMeasured, type Speed, speedOf } from './measured.js';
import { allReduceSeconds, type Network, shardSeconds } from './network.js';
import { type Compute, computeOf, type Parallel, type PlanCase, stepOn } from './step.js';

const RESULTS = join(import.meta.dirname, '..', '..', 'bench', 'results');
const RANKS = JSON.parse(readFileSync(join(RESULTS, 'ranks-h200.json'), 'utf8'));
const NETWORK: Network = {
  perNode: 4,
  nodeBandwidth: 100e9,
  linkBandwidth: 10e9,
  nodeLatency: 1e-6,
  linkLatency: 5e-6,
  startLatency: 10e-6,
};
const PARALLEL: Parallel = { network: NETWORK, wire: 'f32', zero1: false, bucketBytes: 1e6, overlap: true };
const SPEED: Speed = { machine: 'paper', device: 'cuda', rate: () => 1e12, updatePerParameter: 1e-9, perLaunch: 0 };

function caseOf(input: ConfigInput, vocabulary = 1000): PlanCase {
  const config = parseConfig(input);
  return { shape: modelShape(config, vocabulary), config };
}

const TINY = { model: { dim: 64, n_layers: 3, n_heads: 4, n_kv_groups: 2, d_k: 16, d_v: 16 } };
const seconds = ({ forward, backward }: Compute) => forward + backward.reduce((sum, part) => sum + part.seconds, 0);

describe('what a rank computes', () => {
  const tiny = caseOf({ ...TINY, train: { seq_len: 256, batch_size: 2 } });

  it('is all operations at the measured rate, a third of them forward', () => {
    const compute = computeOf(tiny, SPEED);
    const { used } = trainingFlops(tiny.shape, [256, 256]);
    expect(seconds(compute)).toBeCloseTo(used / 1e12, 12);
    expect(compute.forward).toBeCloseTo(used / 3e12, 12);
    expect(compute.update).toBeCloseTo(parameterCount(tiny.shape) * 1e-9, 12);
  });

  it.each([false, true])('has all parameters once, the embedding last (tied: %s)', (tie_embeddings) => {
    const { shape, config } = caseOf({ model: { ...TINY.model, tie_embeddings } });
    const { backward } = computeOf({ shape, config }, SPEED);
    expect(backward.map(({ name }) => name)).toEqual(['head', 'block 2', 'block 1', 'block 0', 'embedding']);
    const all = backward.flatMap(({ tensors }) => tensors);
    expect(all.reduce((sum, size) => sum + size, 0)).toBe(parameterCount(shape));
    expect(backward[0].tensors).toEqual(tie_embeddings ? [64] : [64_000, 64]);
    expect(backward[4]).toMatchObject({ seconds: 0, tensors: [64_000] });
  });

  it('with checkpointing runs the forward of the blocks again, and of nothing else', () => {
    const again = caseOf({
      ...TINY,
      runtime: { gradient_checkpointing: true },
      train: { seq_len: 256, batch_size: 2 },
    });
    const [plain, checkpointed] = [computeOf(tiny, SPEED), computeOf(again, SPEED)];
    const head = (2 * 64_000 * 512) / 1e12; // two operations a multiplication
    expect(seconds(checkpointed) - seconds(plain)).toBeCloseTo(plain.forward - head, 12);
  });
});

/** The measured models by the names of the shipped rows. */
const MODELS: Readonly<Record<string, ConfigInput['model']>> = {
  '125m': {},
  '350m': { dim: 1024, n_layers: 24, n_heads: 16, n_kv_groups: 4 },
  '1.3b': { dim: 2048, n_layers: 24, n_heads: 16, n_kv_groups: 4, d_k: 128, d_v: 128 },
  '1.3b, 32 heads': { dim: 2048, n_layers: 24, n_heads: 32, n_kv_groups: 4 },
};
type Row = MeasuredFile['rows'][number];
const measured = readMeasured();
const inputOf = ({ config, precision, S, batch, mfu, hfu = mfu }: Row): ConfigInput => ({
  model: MODELS[config],
  runtime: { precision: 'bf16', fp8: precision === 'fp8', gradient_checkpointing: hfu > mfu },
  train: { seq_len: S, batch_size: batch },
});
const stepMs = (input: ConfigInput, rows: readonly Row[] = measured.rows) => {
  const gpu = caseOf({ ...input, runtime: { device: 'cuda', precision: 'bf16', ...input.runtime } }, 50_257);
  return 1e3 * stepOn(computeOf(gpu, speedOf({ ...measured, rows: [...rows] })), 1, PARALLEL).total;
};
/** The tolerance of docs/explain/scaling.md. */
const TOLERANCE = 0.1;
const nameOf = ({ config, precision, S, batch }: Row) => `${config} ${precision} ${S} x ${batch}`;

describe('the shipped figures', () => {
  it.each(measured.rows.map((row) => [nameOf(row), row] as const))('predict themselves: %s', (_, row) => {
    expect(parameterCount(caseOf(inputOf(row), 50_257).shape)).toBe(row.params);
    expect(row.ms_step / stepMs(inputOf(row))).toBeCloseTo(1, 3);
  });

  // A wide model is predicted by wide ones alone: the single one in FP8 has no other, and of 350m there are only two.
  const predictable = measured.rows.filter(
    ({ config, precision }) => config !== '350m' && (config === '125m' || precision === 'bf16'),
  );
  it.each(predictable.map((row) => [nameOf(row), row] as const))(
    'predict each row from the others within 10 %%: %s',
    (_, row) => {
      const others = measured.rows.filter((other) => other !== row);
      expect(Math.abs(row.ms_step / stepMs(inputOf(row), others) - 1)).toBeLessThan(TOLERANCE);
    },
  );
});

/** Steps of an H200 that were not handed to the equations, held to what docs/explain/scaling.md says of them. */
describe('what was measured on one GPU beside the shipped figures', () => {
  const { runs }: { runs: { name: string; rows: unknown[] }[] } = JSON.parse(
    readFileSync(join(RESULTS, 'plan-h200.json'), 'utf8'),
  );
  const rowsOf = <R>(name: string) => runs.find((run) => run.name === name)!.rows as R[];
  const small = measured.rows.filter(
    ({ config, precision, S }) => config === '125m' && precision === 'bf16' && S === 2048,
  );
  const ratios = (batches: readonly number[], given: readonly number[]) => {
    const few = small.filter(({ batch }) => given.includes(batch));
    return small.filter(({ batch }) => batches.includes(batch)).map((row) => row.ms_step / stepMs(inputOf(row), few));
  };

  it.each(['bf16', 'fp8'] as const)('another run of the build before in %s comes out within 10 %%', (precision) => {
    const rows = rowsOf<Row>('lengths, the build before').filter((row) => row.precision === precision);
    expect(rows).toHaveLength(4);
    for (const row of rows) {
      const predicted = stepMs(inputOf({ ...row, config: '125m', precision }));
      expect(Math.abs(row.ms_step / predicted - 1)).toBeLessThan(TOLERANCE);
    }
  });

  it('a million tokens in FP8 take 13.3 s, from the shorter sequences alone within 10 %', () => {
    const million = measured.rows.find(({ S }) => S === 2 ** 20)!;
    expect(stepMs(inputOf(million)) / 1e3).toBeCloseTo(13.3, 1);
    const shorter = measured.rows.filter(({ S }) => S < 2 ** 20);
    expect(Math.abs(million.ms_step / stepMs(inputOf(million), shorter) - 1)).toBeLessThan(TOLERANCE);
  });

  it('gradient checkpointing makes a step longer by what was measured, with a kept ranking and without', () => {
    const rows = rowsOf<{ S: number; ms_step: number; gradient_checkpointing: boolean }>('gradient checkpointing');
    const find = (S: number, isCheckpointed: boolean) =>
      rows.find((row) => row.S === S && row.gradient_checkpointing === isCheckpointed)!.ms_step;
    const cases = [
      { train: { seq_len: 8192, batch_size: 8 }, ratio: find(8192, true) / find(8192, false) },
      { train: { seq_len: 262_144, batch_size: 1 }, ratio: find(262_144, true) / find(262_144, false) },
    ];
    for (const { train, ratio } of cases) {
      const predicted = stepMs({ train, runtime: { gradient_checkpointing: true } }) / stepMs({ train });
      expect(Math.abs(predicted / ratio - 1)).toBeLessThan(0.03);
    }
  });

  it('micro-batches between two that are known come out within 5 %', () => {
    const found = ratios([2, 4, 8], [1, 32]);
    expect(found).toHaveLength(3);
    for (const ratio of found) expect(Math.abs(ratio - 1)).toBeLessThan(0.05);
  });

  it('from the largest alone, down to a thirty-second of it, within 10 %', () => {
    const found = ratios([1, 2, 4, 8], [32]);
    expect(found).toHaveLength(4);
    for (const ratio of found) expect(Math.abs(ratio - 1)).toBeLessThan(TOLERANCE);
  });

  it('four micro-batches of 1 x 2048 with checkpointing take less than predicted, by no more than 10 %', () => {
    const rows = rowsOf<{ tokens_per_s: number }>('four micro-batches').slice(1);
    const perSecond = rows.map((row) => row.tokens_per_s).sort((a, b) => a - b)[Math.floor(rows.length / 2)];
    const train = { seq_len: 2048, batch_size: 1, accumulate_grad_batches: 4 };
    const ratio = (1e3 * 4 * 2048) / perSecond / stepMs({ runtime: { gradient_checkpointing: true }, train });
    expect(ratio).toBeGreaterThan(0.9);
    expect(ratio).toBeLessThan(1);
  });

  it('wider shapes take less than the rate of the 125m shape says', () => {
    const base = measured.rows.filter(({ config }) => config === '125m');
    const wide = measured.rows.filter(({ config }) => config !== '125m');
    expect(wide).toHaveLength(6);
    for (const row of wide) {
      const ratio = row.ms_step / stepMs(inputOf(row), base);
      expect(ratio).toBeGreaterThan(row.precision === 'fp8' ? 0.7 : 0.78);
      expect(ratio).toBeLessThan(1);
    }
  });

  it('4 x 2048, computed by two ranks at once: half of the GPU each', () => {
    const [one] = RANKS.rows;
    expect(one.share).toBe(2);
    const alone = stepMs({ train: { seq_len: RANKS.seq_len, batch_size: RANKS.batch_size } });
    expect(Math.abs((alone * one.share) / one.ms_step - 1)).toBeLessThan(0.05);
  });

  it('no batch is faster than its launches', () => {
    const launching = launchesOfPass('nsa', 12) * speedOf(measured).perLaunch;
    expect(stepMs({ train: { seq_len: 64, batch_size: 1 } }) / 1e3).toBeGreaterThan(launching);
  });
});

describe('against two measured ranks', () => {
  const { updatePerParameter } = speedOf(measured);
  const [one, overlapped, after, safe] = RANKS.rows;
  const planCase = caseOf({ train: { seq_len: RANKS.seq_len, batch_size: RANKS.batch_size } }, 50_257);
  const { used } = trainingFlops(planCase.shape, new Array(RANKS.batch_size).fill(RANKS.seq_len));
  const passes = one.ms_step * 1e-3 - parameterCount(planCase.shape) * updatePerParameter;
  const compute = computeOf(planCase, { ...SPEED, rate: () => used / passes, updatePerParameter });
  const network: Network = {
    perNode: 1,
    nodeBandwidth: 1,
    linkBandwidth: RANKS.link_gbs * 1e9,
    nodeLatency: 0,
    linkLatency: 0,
    startLatency: RANKS.latency_us * 1e-6,
  };
  const stepOf = ({ bucket_mib, overlap }: { bucket_mib: number; overlap: boolean }) =>
    stepOn(compute, 2, { ...PARALLEL, network, overlap, bucketBytes: bucket_mib * 2 ** 20 });

  it('a step of two NCCL ranks on one GPU is predicted to within 5 %, and what it exposes, in as many buckets', () => {
    const step = stepOf(overlapped);
    expect(step.buckets).toBe(overlapped.buckets);
    expect(Math.abs((1e3 * step.total) / overlapped.ms_step - 1)).toBeLessThan(0.05);
    expect(Math.abs((1e3 * step.exposed) / overlapped.exposed_ms - 1)).toBeLessThan(0.05);
  });

  it.each([
    ['with the same buckets sent after the backward pass', after],
    ['in safe mode, which sends six times as many sums', safe],
  ])('%s as well', (_, row) => {
    const step = stepOf(row);
    expect(row.overlap).toBe(false);
    expect(step.buckets).toBe(row.buckets);
    expect(Math.abs((1e3 * step.total) / row.ms_step - 1)).toBeLessThan(0.05);
  });
});

/** Half a second forward, a second backward in two halves, 10 million parameters: 40 MB of gradients. */
const BY_HAND: Compute = {
  forward: 0.5,
  forwardLaunching: 0,
  backward: [
    { name: 'head', seconds: 0.5, launching: 0, tensors: [5e6] },
    { name: 'block 0', seconds: 0.5, launching: 0, tensors: [5e6] },
  ],
  microBatches: 1,
  update: 0.1,
  parameters: 10e6,
};
const CONTROL = 32;

describe('a step by hand', () => {
  const whole = { ...PARALLEL, bucketBytes: 20e6 };
  const control = allReduceSeconds(NETWORK, 4, CONTROL);

  it('four GPUs of a node: the second bucket is exposed', () => {
    const bucket = 10e-6 + 2 * (3e-6 + (0.75 * 20e6) / 100e9);
    const { total, exposed, communication, buckets } = stepOn(BY_HAND, 4, whole);
    expect(buckets).toBe(2);
    expect(exposed).toBeCloseTo(bucket + control, 12);
    expect(communication).toBeCloseTo(2 * bucket + control, 12);
    expect(total).toBeCloseTo(0.5 + 1 + 0.1 + bucket + control, 12);
  });

  it('without overlap both are', () => {
    const { exposed, communication } = stepOn(BY_HAND, 4, { ...whole, overlap: false });
    expect(exposed).toBeCloseTo(communication, 12);
  });

  it('in bf16 half as many bytes go', () => {
    const { communication } = stepOn(BY_HAND, 4, { ...whole, wire: 'bf16' });
    expect(communication).toBeCloseTo(10e-6 + 2 * (3e-6 + (0.75 * 20e6) / 100e9) + control, 12);
  });

  it('micro-batches but the last send nothing', () => {
    const [one, three] = [stepOn(BY_HAND, 4, whole), stepOn({ ...BY_HAND, microBatches: 3 }, 4, whole)];
    expect(three.exposed).toBeCloseTo(one.exposed, 12);
    expect(three.total - one.total).toBeCloseTo(3, 12);
  });

  it('ZeRO-1 scatters sums, updates a quarter, and gathers the weights in f32', () => {
    const { total, compute, exposed } = stepOn(BY_HAND, 4, { ...whole, zero1: true });
    expect(compute).toBeCloseTo(1.5 + 0.1 / 4, 12);
    expect(exposed).toBeCloseTo(shardSeconds(NETWORK, 4, 20e6) + shardSeconds(NETWORK, 4, 40e6) + control, 12);
    expect(total).toBeCloseTo(compute + exposed, 12);
  });
});

describe('always', () => {
  const parallel = fc.record({
    network: fc.constant(NETWORK),
    wire: fc.constantFrom('f32' as const, 'bf16' as const),
    zero1: fc.boolean(),
    bucketBytes: fc.integer({ min: 1e5, max: 1e8 }),
    overlap: fc.boolean(),
  });
  const compute = fc
    .record({
      forward: fc.double({ min: 1e-6, max: 1, noNaN: true }),
      forwardLaunching: fc.constant(0),
      backward: fc.array(
        fc.record({
          name: fc.constant('block'),
          seconds: fc.double({ min: 0, max: 0.2, noNaN: true }),
          launching: fc.constant(0),
          tensors: fc.array(fc.integer({ min: 1, max: 1e7 }), { minLength: 1, maxLength: 4 }),
        }),
        { minLength: 1, maxLength: 10 },
      ),
      microBatches: fc.integer({ min: 1, max: 8 }),
      update: fc.double({ min: 0, max: 0.1, noNaN: true }),
    })
    .map((one) => ({
      ...one,
      parameters: one.backward.flatMap(({ tensors }) => tensors).reduce((sum, size) => sum + size, 0),
    }));

  it('one rank has no communication, and its step is what it computes', () => {
    fc.assert(
      fc.property(compute, parallel, (work, how) => {
        const step = stepOn(work, 1, how);
        expect(step).toMatchObject({ communication: 0, exposed: 0 });
        expect(step.total).toBe(step.compute);
      }),
    );
  });

  it('more ranks never make a step of the plain kind shorter', () => {
    fc.assert(
      fc.property(compute, parallel, fc.integer({ min: 0, max: 11 }), (work, how, power) => {
        const plain = { ...how, zero1: false };
        const [few, many] = [stepOn(work, 2 ** power, plain), stepOn(work, 2 ** (power + 1), plain)];
        expect(many.total).toBeGreaterThanOrEqual(few.total - 1e-9);
      }),
    );
  });

  it('overlap and bf16 never make it longer', () => {
    fc.assert(
      fc.property(compute, parallel, fc.integer({ min: 1, max: 12 }), (work, how, power) => {
        const total = (changes: Partial<Parallel>) => stepOn(work, 2 ** power, { ...how, ...changes }).total;
        expect(total({ overlap: true })).toBeLessThanOrEqual(total({ overlap: false }) + 1e-9);
        const same = { bucketBytes: 1e12, overlap: false }; // one bucket, so that as many are sent
        expect(total({ ...same, wire: 'bf16' })).toBeLessThanOrEqual(total({ ...same, wire: 'f32' }) + 1e-9);
      }),
    );
  });
});
