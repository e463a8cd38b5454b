import { describe, expect, it } from 'vitest';
import { compressedPairs, densePairs, pairsOfBlocks, scorePairs, selectedPairs, windowPairs } from '../model/pairs.js';
import { range } from '../ops/attention/branch-reference.js';
import { compressedCount } from '../ops/common/sequences.js';
import { cpu } from '../testing/devices.js';
import { exportedBy, RecordingCuda } from '../testing/recording-cuda.js';
import { type AttentionBench, type AttentionRow, benchAttention, benchLinear, localBlocks } from './attention.js';
import { countChoices } from './attention-fused.js';
import { measure, median } from './timing.js';

const SPARSE = { l: 8, d: 4, lSel: 16, nSel: 3, w: 24 };
const LENGTHS = [0, 1, 7, 8, 23, 24, 25, 64, 101];

describe('pairs', () => {
  const sum = (length: number, each: (t: number) => number) =>
    range(0, length).reduce((total, t) => total + each(t), 0);

  it.each(LENGTHS)('are counted exactly for %i tokens', (length) => {
    expect(densePairs(length)).toBe(sum(length, (t) => t + 1));
    expect(windowPairs(length, 24)).toBe(sum(length, (t) => Math.min(t + 1, 24)));
    expect(compressedPairs(length, SPARSE)).toBe(
      sum(length, (t) => range(0, length).filter((i) => i * 4 + 8 - 1 <= t).length),
    );
    expect(scorePairs(length, SPARSE)).toBe(
      sum(length, (t) => (Math.floor(t / 16) + 1 > 3 ? compressedCount(t + 1, 8, 4) : 0)),
    );
    expect(selectedPairs(length, SPARSE)).toBe(sum(length, (t) => Math.min(2, Math.floor(t / 16)) * 16 + (t % 16) + 1));
    expect(pairsOfBlocks(localBlocks(length, 1, SPARSE), 1, SPARSE)).toBe(selectedPairs(length, SPARSE));
  });

  it('of selected blocks stop at the token', () => {
    // Token 20 in block 1: all of block 0, five tokens of block 1; the second group has block 1 only.
    const selected = new Int32Array(21 * 2 * 3).fill(-1);
    selected.set([0, 1, -1, 1, -1, -1], 20 * 6);
    expect(pairsOfBlocks(selected, 2, SPARSE)).toBe((16 + 5 + 5) / 2);
  });

  it('of local blocks are those of dense attention while all blocks fit', () => {
    expect(pairsOfBlocks(localBlocks(48, 2, SPARSE), 2, SPARSE)).toBe(densePairs(48));
    expect([...localBlocks(101, 1, SPARSE).subarray(-3)]).toEqual([0, 5, 6]);
    expect([...localBlocks(20, 1, SPARSE).subarray(-3)]).toEqual([0, 1, -1]);
  });
});

describe('timing', () => {
  const work = (spin: () => void) => {
    const calls = { runs: 0, ends: 0 };
    const start = () => ({
      run: () => {
        calls.runs += 1;
        spin();
      },
      end: () => {
        calls.ends += 1;
      },
    });
    return { calls, start };
  };

  it('takes the median of the runs that fit the budget, after a warm-up run', () => {
    const { calls, start } = work(() => {});
    expect(measure(cpu(), start, { ms: 60_000, maxRuns: 5 }).ms).toBeGreaterThanOrEqual(0);
    expect(calls).toEqual({ runs: 6, ends: 6 });
  });

  it('runs work far beyond the budget once', () => {
    const { calls, start } = work(() => {
      const end = performance.now() + 12;
      while (performance.now() < end);
    });
    expect(measure(cpu(), start, { ms: 1, maxRuns: 5 }).ms).toBeGreaterThan(10);
    expect(calls).toEqual({ runs: 1, ends: 1 });
  });

  it('reports the peak memory of a run', () => {
    const { start } = work(() => {
      const block = cpu().pool.take(2 ** 20);
      cpu().pool.give(block);
    });
    expect(measure(cpu(), start, { ms: 1, maxRuns: 1 }).peakBytes).toBe(2 ** 20);
  });

  it('cleans up after a run that throws', () => {
    const { calls, start } = work(() => {
      throw new Error('no');
    });
    expect(() => measure(cpu(), start, { ms: 1, maxRuns: 1 })).toThrow('no');
    expect(calls.ends).toBe(1);
  });

  it('computes the median', () => {
    expect(median([3, 1, 2])).toBe(2);
    expect(median([4, 1, 2, 3])).toBe(2.5);
  });
});

describe('benchmarks of attention', () => {
  const bench: AttentionBench = {
    heads: { heads: 4, groups: 2, dk: 16, dv: 8 },
    sparse: SPARSE,
    selection: 'real',
    budget: { ms: 5, maxRuns: 2 },
  };

  it('give a row for every part and pass, and free all memory', () => {
    const before = cpu().pool.bytesInUse;
    const heard: AttentionRow[] = [];
    const rows = benchAttention(cpu(), 200, bench, (row) => heard.push(row));
    expect(heard).toEqual(rows);
    expect(rows.map(({ what, pass }) => `${what} ${pass}`)).toEqual([
      ...['cmp forward', 'cmp backward', 'score forward', 'sel forward', 'sel backward', 'win forward'],
      ...['win backward', 'nsa forward', 'nsa backward', 'dense forward', 'dense backward'],
    ]);
    expect(cpu().pool.bytesInUse).toBe(before);
  });

  it('count operations by visible pairs', () => {
    const rows = benchAttention(cpu(), 200, bench);
    const flops = (what: string, pass: string) => {
      const row = rows.find((one) => one.what === what && one.pass === pass)!;
      return row.gflops * row.ms * 1e6;
    };
    const close = (value: number, expected: number) => expect(Math.abs(value / expected - 1)).toBeLessThan(1e-9);
    const perPair = 2 * (16 + 8) * 4;
    close(flops('dense', 'forward'), perPair * densePairs(200));
    close(flops('dense', 'backward'), 2.5 * perPair * densePairs(200));
    close(flops('cmp', 'forward'), perPair * compressedPairs(200, SPARSE));
    close(flops('score', 'forward'), 2 * 16 * 4 * scorePairs(200, SPARSE));
    close(flops('win', 'backward'), 2.5 * perPair * windowPairs(200, 24));
    const parts = flops('cmp', 'forward') + flops('sel', 'forward') + flops('win', 'forward');
    close(flops('nsa', 'forward'), parts + flops('score', 'forward'));
    close(flops('nsa', 'backward'), 2.5 * parts);
  });

  it('have linear layers and local selections', () => {
    const rows = benchLinear(cpu(), { rows: 32, inputs: 16, outputs: 8 }, bench.budget);
    expect(rows.map(({ what, pass, kernel }) => [what, pass, kernel])).toEqual([
      ['linear', 'forward', '32x16x8'],
      ['linear', 'backward', '32x16x8'],
    ]);
    expect(rows[1].gflops * rows[1].ms * 1e6).toBeCloseTo(4 * 32 * 16 * 8, 3);
    expect(benchAttention(cpu(), 200, { ...bench, selection: 'local' })).toHaveLength(11);
  });
});

describe('choices counted for given selections', () => {
  it('are ranked within their list and stretch, forced blocks left out', () => {
    const sparse = { l: 8, d: 4, lSel: 4, nSel: 4, w: 8 };
    const heads = { heads: 2, groups: 1, dk: 16, dv: 16 };
    const lengths = [20, 16];
    const selected = Int32Array.from(lengths.flatMap((length) => [...localBlocks(length, 1, sparse)]));
    const plan = { blocks: 9, lists: 9, stretch: 18, stretches: 2 };
    const { counts, ranks } = countChoices(selected, { lengths }, { heads, sparse }, plan);
    // Tokens of block 3 choose block 1, those of block 4 block 2, the last two of them in the second stretch.
    expect([...counts]).toEqual([0, 0, 4, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0]);
    const slot = (token: number) => ranks[token * 4 + 1];
    expect([12, 13, 14, 15].map(slot)).toEqual([0, 1, 2, 3]);
    expect([16, 17, 18, 19].map(slot)).toEqual([0, 1, 0, 1]);
  });
});

describe('several sequences', () => {
  it('multiply the work', () => {
    const bench: AttentionBench = {
      heads: { heads: 4, groups: 2, dk: 16, dv: 8 },
      sparse: SPARSE,
      selection: 'local',
      budget: { ms: 1, maxRuns: 1 },
    };
    const flops = (sequences: number) =>
      benchAttention(cpu(), 100, { ...bench, sequences }).map((row) => row.gflops * row.ms);
    const [one, three] = [flops(1), flops(3)];
    for (const [i, value] of one.entries()) expect(three[i] / value).toBeCloseTo(3, 6);
  });
});

describe('the fused kernels', () => {
  const shape = {
    heads: { heads: 12, groups: 2, dk: 64, dv: 64 },
    sparse: { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 },
  };
  const bench = { ...shape, budget: { ms: 1, maxRuns: 2 }, sequences: 2 };

  it.each(['real', 'local'] as const)('have a row for every part and pass: %s selections', (selection) => {
    const device = new RecordingCuda(exportedBy(shape));
    const rows = benchAttention(device, 1500, { ...bench, selection, options: { deterministic: true } });
    expect(rows.map(({ what, pass, kernel }) => `${what} ${pass} ${kernel}`)).toEqual([
      ...['cmp forward fused', 'cmp backward fused', 'score forward fused', 'sel forward v2 union'],
      ...['sel backward v2 union', 'win forward fused', 'win backward fused', 'nsa forward v2 union'],
      ...['nsa backward v2 union', 'dense forward fused', 'dense backward fused'],
    ]);
    for (const row of rows) expect(row).toMatchObject({ S: 1500, sequences: 2 });
    expect(device.pool.bytesInUse).toBe(0);
  });
});
