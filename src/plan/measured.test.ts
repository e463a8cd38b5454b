import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { temporaryFolder } from '../testing/run.js';
import { launchesOf, launchesOfPass } from './launches.js';
import { interpolate, type MeasuredFile, readMeasured, SHIPPED, speedOf } from './measured.js';

const row = {
  config: 'x',
  attention: 'nsa' as const,
  S: 2048,
  batch: 8,
  ms_step: 100,
  mfu: 0.5,
  params: 1000,
  layers: 12,
};
const file = (rows: MeasuredFile['rows'], device: 'cpu' | 'cuda' = 'cuda'): MeasuredFile => ({
  machine: 'one',
  device,
  peak_gflops: 1e6,
  rows,
});

/** A model as that of the row. */
const NSA = { attention: 'nsa', precision: 'bf16', params: 1000, layers: 12 } as const;

/** Share of the step of 0.1 s without its launches. */
const REST = 1 - (launchesOfPass('nsa', 12) * speedOf(file([row])).perLaunch) / 0.1;

describe('rates', () => {
  it('are the measured share of the peak, launches and update set aside', () => {
    const { rate } = speedOf(file([row]));
    expect(REST).toBeCloseTo(0.9565, 3);
    expect((rate(NSA, 2048, 8 * 2048) * REST) / 1e15).toBeCloseTo(0.5, 6);
    // Twice the layers, twice the launches, but for those of the ends.
    const deep = speedOf(file([{ ...row, layers: 24 }])).rate(NSA, 2048, 1);
    expect((deep * (1 - launchesOfPass('nsa', 24) * 63.9e-6)) / 1e15).toBeCloseTo(0.5, 6);
    // On a CPU a launch costs nothing.
    expect(speedOf(file([{ ...row, params: 1 }], 'cpu')).rate(NSA, 2048, 1) / 1e15).toBeCloseTo(0.5, 6);
    // A tenth of the step is the update of 1.2 billion parameters or so: the passes are that much faster.
    const params = 0.01 / speedOf(file([row])).updatePerParameter;
    expect(speedOf(file([{ ...row, params: Math.round(params) }])).rate(NSA, 2048, 1) / 1e15).toBeCloseTo(
      0.5 / (0.9 - (1 - REST)),
      6,
    );
  });

  it('are interpolated over lengths and over tokens, and end with the last point', () => {
    const { rate } = speedOf(
      file([
        { ...row, params: 1, mfu: 0.2, batch: 2 },
        { ...row, params: 1, mfu: 0.4, batch: 8 },
        { ...row, params: 1, mfu: 0.1, S: 8192, batch: 1 },
      ]),
    );
    const share = (length: number, tokens: number) => (rate(NSA, length, tokens) * REST) / 1e15;
    expect(share(2048, 4 * 2048)).toBeCloseTo(0.3, 6); // halfway between 2 and 8 sequences
    expect(share(2048, 2048)).toBeCloseTo(0.2, 6);
    expect(share(2048, 64 * 2048)).toBeCloseTo(0.4, 6);
    expect(share(4096, 8 * 2048)).toBeCloseTo(0.25, 6); // halfway between 2048 and 8192
    expect(share(65_536, 65_536)).toBeCloseTo(0.1, 6);
  });

  it('are those of the precision, else of the usual one', () => {
    const rows = [row, { ...row, precision: 'fp8' as const, mfu: 0.8 }];
    const share = (precision: 'fp32' | 'bf16' | 'fp8', of = rows) =>
      (speedOf(file(of)).rate({ ...NSA, precision }, 2048, 1) * REST) / 1e15;
    expect(share('bf16')).toBeCloseTo(0.5, 6);
    expect(share('fp8')).toBeCloseTo(0.8, 6);
    expect(share('fp32')).toBeCloseTo(0.5, 6);
    expect(share('bf16', rows.slice(1))).toBeCloseTo(0.8, 6);
  });

  it('of other models are factors on those of the most measured one, by parameters per layer', () => {
    const base = [row, { ...row, S: 8192, batch: 2, mfu: 0.4 }];
    const wide = { ...row, params: 16_000, mfu: 0.75 };
    const { rate } = speedOf(file([wide, ...base]));
    const share = (params: number, length: number) => (rate({ ...NSA, params }, length, 16_384) * REST) / 1e15;
    expect(share(1000, 2048)).toBeCloseTo(0.5, 5);
    expect(share(16_000, 2048)).toBeCloseTo(0.75, 5);
    expect(share(16_000, 8192)).toBeCloseTo(0.6, 5); // 1.5 times that of the base
    expect(share(4000, 2048)).toBeCloseTo(0.625, 5); // halfway
    expect(share(1e9, 2048)).toBeCloseTo(0.75, 5);
  });

  it('count what gradient checkpointing computes again, and its launches', () => {
    const { rate, perLaunch } = speedOf(file([{ ...row, params: 1, hfu: 0.6 }]));
    const launching = (launchesOfPass('nsa', 12) + 12 * launchesOf('nsa').blockAgain) * perLaunch;
    expect((rate(NSA, 2048, 1) * (1 - launching / 0.1)) / 1e15).toBeCloseTo(0.6, 6);
  });

  it('take the fastest of several kernels', () => {
    const { rate } = speedOf(file([row, { ...row, mfu: 0.6 }, { ...row, mfu: 0.3 }]));
    expect((rate(NSA, 2048, 1) * REST) / 1e15).toBeCloseTo(0.6, 6);
  });

  it('of a step shorter than its launches would be, a tenth is left for operations', () => {
    const { rate } = speedOf(file([{ ...row, ms_step: 2, params: 1 }]));
    expect(rate(NSA, 2048, 1) / 1e15).toBeCloseTo(5, 4);
  });

  it('are refused for what was not measured', () => {
    expect(() => speedOf(file([row])).rate({ ...NSA, attention: 'dense' }, 2048, 1)).toThrow(
      'no dense attention among the measured figures',
    );
    const short = file([{ ...row, params: 1e12 }]);
    expect(() => speedOf(short).rate(NSA, 2048, 1)).toThrow('shorter than its update');
  });
});

it('interpolate is exact at the points', () => {
  const points = [
    [8, 3],
    [2, 1],
    [32, 9],
  ] as const;
  for (const [x, y] of points) expect(interpolate(points, x)).toBe(y);
  expect(interpolate(points, 4)).toBeCloseTo(2, 12);
});

describe('files', () => {
  it('the shipped figures are those of bench/results, relative to one peak', () => {
    type Row = Pick<MeasuredFile['rows'][number], 'S' | 'batch' | 'ms_step' | 'params' | 'precision'>;
    const results = join(import.meta.dirname, '..', '..', 'bench', 'results', 'plan-h200.json');
    const { runs }: { runs: { build: string; rows: Row[] }[] } = JSON.parse(readFileSync(results, 'utf8'));
    const shipped: (Row & { build: string })[] = JSON.parse(readFileSync(SHIPPED, 'utf8')).rows;
    for (const { build, S, batch, ms_step, params, precision } of shipped) {
      const measured = runs.filter((run) => run.build === build).flatMap(({ rows }) => rows);
      expect(measured).toContainEqual(expect.objectContaining({ S, batch, ms_step, params, precision }));
    }
    expect(readMeasured()).toMatchObject({ device: 'cuda', peak_gflops: 800_000 });
  });

  it('are refused by name and key when they are something else', () => {
    const folder = temporaryFolder();
    try {
      const path = join(folder.path, 'measured.json');
      expect(() => readMeasured(path)).toThrow(`${path}: cannot be read (ENOENT)`);
      writeFileSync(path, 'step 3');
      expect(() => readMeasured(path)).toThrow('is not JSON; expected the output of trefoil bench train --json');
      writeFileSync(path, JSON.stringify({ ...file([row]), rows: [{ ...row, ms_step: 'fast' }] }));
      expect(() => readMeasured(path)).toThrow('rows.0.ms_step');
      writeFileSync(path, JSON.stringify(file([])));
      expect(() => readMeasured(path)).toThrow(/rows: .*bench train --json/);
    } finally {
      folder.remove();
    }
  });
});
