import { describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import type { ConfigInput } from '../config/schema.js';
import { estimateMemory, parameterCount } from '../model/memory.js';
import { modelShape } from '../model/shape.js';
import { adviceFor, count, stopsOf } from './advice.js';
import { readMeasured, speedOf } from './measured.js';
import { LINK_LATENCY, NODE_LATENCY, START_LATENCY } from './network.js';
import { gpuCounts, memoryOn, type PlanLimits, planRows } from './plan.js';
import type { Parallel, PlanCase } from './step.js';

const speed = speedOf(readMeasured());
const PARALLEL: Parallel = {
  network: {
    perNode: 8,
    nodeBandwidth: 450e9,
    linkBandwidth: 50e9,
    nodeLatency: NODE_LATENCY,
    linkLatency: LINK_LATENCY,
    startLatency: START_LATENCY,
  },
  wire: 'f32',
  zero1: false,
  bucketBytes: 25 * 2 ** 20,
  overlap: true,
};
const LIMITS: PlanLimits = { minEfficiency: 0.85, criticalBatch: 2 ** 20, gpuBytes: 139 * 2 ** 30 };
const SLOW = { ...PARALLEL, network: { ...PARALLEL.network, linkBandwidth: 1e9 } };

function caseOf(input: ConfigInput = {}): PlanCase {
  const config = parseConfig({
    ...input,
    runtime: { device: 'cuda', precision: 'bf16', ...input.runtime },
    train: { seq_len: 2048, batch_size: 32, ...input.train },
  });
  return { shape: modelShape(config, 50_257), config };
}

const rowsOf = (planCase: PlanCase, parallel = PARALLEL, limits = LIMITS, most = 4096) =>
  planRows(planCase, speed, parallel, limits, gpuCounts(most));
const nextOf = (planCase: PlanCase, parallel = PARALLEL, limits = LIMITS, most = 4096) =>
  adviceFor({ planCase, speed, parallel, limits }, rowsOf(planCase, parallel, limits, most));

describe('rows', () => {
  it('are powers of two and the number itself', () => {
    expect(gpuCounts(1)).toEqual([1]);
    expect(gpuCounts(8)).toEqual([1, 2, 4, 8]);
    expect(gpuCounts(24)).toEqual([1, 2, 4, 8, 16, 24]);
    expect(gpuCounts(4096)).toHaveLength(13);
  });

  it('begin with the measured GPU alone', () => {
    const [alone] = rowsOf(caseOf());
    const measured = readMeasured().rows.find(({ S, batch }) => S === 2048 && batch === 32)!;
    expect(alone).toMatchObject({ gpus: 1, nodes: 1, efficiency: 1, communication_ms: 0, global_batch: 65_536 });
    expect(alone.step_ms / measured.ms_step).toBeCloseTo(1, 3);
    expect(alone.tokens_per_day).toBeCloseTo(86_400 * alone.tokens_per_s, 0);
  });

  it('agree with themselves: throughput, efficiency and batch on any number of GPUs', () => {
    const rows = rowsOf(caseOf(), SLOW);
    for (const row of rows) {
      expect(row.tokens_per_s * row.step_ms * 1e-3).toBeCloseTo(row.global_batch, 3);
      expect(row.efficiency * row.gpus * rows[0].tokens_per_s).toBeCloseTo(row.tokens_per_s, 3);
      expect(row.step_ms).toBeCloseTo(row.compute_ms + row.exposed_ms, 6);
      expect(row.exposed_ms).toBeLessThanOrEqual(row.communication_ms + 1e-9);
    }
    const pairs = rows.slice(1).map((row, i) => [rows[i], row] as const);
    for (const [fewer, more] of pairs) {
      expect(more.efficiency).toBeLessThanOrEqual(fewer.efficiency + 1e-12);
      expect(more.tokens_per_s).toBeGreaterThan(fewer.tokens_per_s);
    }
  });

  it('half of the tokens are useful at the critical batch', () => {
    const row = rowsOf(caseOf()).find(({ global_batch }) => global_batch === LIMITS.criticalBatch)!;
    expect(row.useful_tokens_per_day).toBeCloseTo(row.tokens_per_day / 2, 0);
  });

  it('the embedding, whose gradient comes last, is what stays exposed on fast links', () => {
    const still = { nodeLatency: 0, linkLatency: 0, startLatency: 0 };
    const row = rowsOf(caseOf(), { ...PARALLEL, network: { ...PARALLEL.network, ...still } })[4];
    const seconds = (bytes: number) => (2 * (15 / 16) * bytes) / 400e9;
    const embedding = 4 * 50_304 * 768;
    expect(row.gpus).toBe(16);
    expect(row.exposed_ms * 1e-3).toBeGreaterThanOrEqual(seconds(embedding));
    // and what of the last block was in the same bucket
    expect(row.exposed_ms * 1e-3).toBeLessThan(seconds(embedding + PARALLEL.bucketBytes));
  });
});

describe('memory', () => {
  it('is the estimate of one GPU, and ZeRO-1 shards the moments: 8 bytes a parameter', () => {
    const planCase = caseOf();
    const { total } = estimateMemory(planCase.shape, planCase.config, 'cuda');
    const moments = 8 * parameterCount(planCase.shape);
    for (const ranks of [1, 2, 64]) {
      expect(memoryOn(planCase, speed, ranks, { zero1: false })).toBe(total);
      expect(memoryOn(planCase, speed, ranks, { zero1: true })).toBeCloseTo(total - moments * (1 - 1 / ranks), 3);
    }
  });
});

describe('where it stops paying', () => {
  it('names the first number of GPUs for each reason', () => {
    expect(stopsOf(rowsOf(caseOf()))).toEqual({ efficiency: null, batch: 32, memory: null });
    expect(stopsOf(rowsOf(caseOf(), SLOW))).toEqual({ efficiency: 16, batch: 32, memory: null });
    const small = { ...LIMITS, gpuBytes: 16 * 2 ** 30, criticalBatch: 1e12 };
    expect(stopsOf(rowsOf(caseOf(), PARALLEL, small))).toEqual({ efficiency: null, batch: null, memory: 1 });
  });

  it('nothing comes next while it pays', () => {
    expect(nextOf(caseOf(), PARALLEL, LIMITS, 16)).toEqual([]);
  });

  it('slow links: bf16 on the wire is better by what it saves', () => {
    const rows = rowsOf(caseOf(), SLOW);
    const [wire] = nextOf(caseOf(), SLOW).filter(({ what }) => what === 'bf16 wire');
    const row = rowsOf(caseOf(), { ...SLOW, wire: 'bf16' }).at(-1)!;
    expect(wire.tokens_per_s).toBeCloseTo(row.tokens_per_s, 3);
    expect(wire.tokens_per_s).toBeGreaterThan(rows.at(-1)!.tokens_per_s);
    expect(nextOf(caseOf(), { ...SLOW, wire: 'bf16' }).map(({ what }) => what)).not.toContain('bf16 wire');
  });

  it('many hops: fewer, larger buckets', () => {
    const sharded = { ...PARALLEL, zero1: true, bucketBytes: 2 ** 20 };
    const [row, next] = [rowsOf(caseOf(), sharded).at(-1)!, nextOf(caseOf(), sharded)];
    const larger = next.find(({ what }) => what === 'larger buckets')!;
    expect(larger.tokens_per_s).toBeGreaterThan(1.5 * row.tokens_per_s);
    expect(larger.text).toMatch(/^buckets of 64 MiB: efficiency /);
  });

  it('a batch too large: one sequence a GPU, or several GPUs a rank', () => {
    const next = nextOf(caseOf());
    expect(next.map(({ what }) => what)).toEqual(['smaller batch', 'sequence', 'tensor', 'pipeline']);
    const [smaller, sequence, tensor, pipeline] = next;
    expect(smaller).toMatchObject({ built: true, gpus: 512, global_batch: 2 ** 20 });
    expect(sequence).toMatchObject({ built: false, degree: 8, gpus: 4096, global_batch: 512 * 65_536 });
    expect(tensor).toMatchObject({ built: false, degree: 2 }); // as many as there are groups of heads
    expect(pipeline.text).toContain('idle 18 %'); // 7 of 32 + 7
  });

  it('splitting never beats the GPUs alone, and costs what is moved', () => {
    const last = rowsOf(caseOf()).at(-1)!;
    for (const { what, tokens_per_s } of nextOf(caseOf()).slice(1))
      expect(tokens_per_s, what).toBeLessThan(last.tokens_per_s);
  });

  it('memory too small: checkpointing, then ZeRO-1, and whether they fit', () => {
    const limits = { ...LIMITS, gpuBytes: 10 * 2 ** 30 };
    const next = nextOf(caseOf(), PARALLEL, limits, 8);
    expect(next[0]).toMatchObject({ what: 'checkpointing', text: expect.stringMatching(/GiB per GPU, fits$/) });
    expect(next[1].what).toBe('zero1');
    expect(next[1].memory_mib).toBeLessThan(next[0].memory_mib);
    const none = nextOf(caseOf(), PARALLEL, { ...LIMITS, gpuBytes: 2 ** 30 }, 8);
    expect(none[0].text).toContain('still does not fit');
  });
});

it('numbers are written for people', () => {
  expect([999, 65_536, 2 ** 20, 40.2e9, 1.62e14].map(count)).toEqual(['999', '65.5k', '1.05M', '40.2G', '162T']);
});
