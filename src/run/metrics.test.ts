import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { expect, it } from 'vitest';
import { resolveThresholds } from '../watch/thresholds.js';
import { CHARTS, COUNTERS, METRIC_ENTRIES, SCALARS, scalarIn } from './metrics.js';

const root = join(import.meta.dirname, '../..');
const unique = (names: readonly string[]) => expect(names).toEqual([...new Set(names)]);

it('every metric and counter names a module that exists, and every metric names metrics and thresholds that exist', () => {
  const names = new Set<string>(METRIC_ENTRIES.map(([name]) => name));
  const thresholds = resolveThresholds({});
  for (const [name, { source }] of [...METRIC_ENTRIES, ...Object.entries(COUNTERS)])
    expect(existsSync(join(root, source)), `${name}: ${source}`).toBe(true);
  for (const [name, { pausedBy, limit }] of METRIC_ENTRIES) {
    if (pausedBy !== undefined) expect(names, name).toContain(pausedBy);
    if (typeof limit?.atLeast === 'string') expect(Object.keys(thresholds), name).toContain(limit.atLeast);
  }
});

it('names, tags and rules are used once; every chart has a curve; what is in no heartbeat is in a CSV file', () => {
  unique(SCALARS.map(({ name }) => name));
  unique(SCALARS.flatMap(({ tag }) => tag ?? []));
  unique(METRIC_ENTRIES.flatMap(([, { rules = [], limit }]) => [...rules, ...(limit ? [limit.rule] : [])]));
  for (const chart of Object.keys(CHARTS))
    expect(
      SCALARS.some(({ chart: labels }) => labels && chart in labels) ||
        METRIC_ENTRIES.some(([, { named }]) => named?.chart === chart),
      chart,
    ).toBe(true);
  for (const { name, log } of SCALARS) expect(log, name).toBeDefined();
});

it('a part of a list is a number of its own, where there is a list', () => {
  const share = SCALARS.find(({ name }) => name === 'share_sel')!;
  expect(scalarIn({ gate_branch_shares: [0.1, 0.2, 0.7] }, share)).toBe(0.2);
  expect(scalarIn({ gate_branch_shares: 7, share_sel: 1 }, share)).toBeUndefined();
});

it('the charts of the dashboard are there with their curves', () => {
  const curvesOf = (name: string) =>
    SCALARS.flatMap(({ name: column, chart = {} }) => (name in chart ? column : [])).join(' ');
  const shown = Object.entries(CHARTS).map(([name, { page, title }]) => `${page} ${title}: ${curvesOf(name)}`);
  for (const chart of [
    'run Loss: loss val_loss',
    'run Gradient norm: grad_norm',
    'run Learning rate: lr',
    'run Throughput: toks_per_s',
    'run MFU: mfu',
    'run Memory: gpu_mem_alloc gpu_mem_peak gpu_mem_reserved',
    'run Fetch time: fetch_p50_ms fetch_p95_ms',
    'run Gates: share_cmp share_sel share_win',
    'attention Gate entropy: gate_entropy_mean gate_entropy_min',
    'attention Branch shares: share_cmp share_sel share_win',
    'attention Collapsed gates: gate_collapse_frac',
    'attention Selected blocks: sel_k_mean',
  ])
    expect(shown).toContain(chart);
});
