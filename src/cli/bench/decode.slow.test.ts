import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { runCli } from '../testing/run.js';

let root: string;
let config: string;
beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), 'trefoil-bench-decode-'));
  config = join(root, 'small.yaml');
  writeFileSync(
    config,
    'model: {dim: 32, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8}\nnsa: {l: 8, d: 4, l_sel: 16, n_sel: 4, w: 32}\n',
  );
});
afterAll(() => rmSync(root, { recursive: true, force: true }));

const TIMES = ['ms_total', 'ms_cmp', 'ms_sel', 'ms_win', 'ms_dense'];

async function rowsOf(words: readonly string[], env: Record<string, string> = {}) {
  const given = ['bench', ...words, '--config', config, '--quick', '--json'];
  const { code, stdout, stderr } = await runCli(given, { env: { ...process.env, ...env } as Record<string, string> });
  expect(code, stderr).toBe(0);
  return JSON.parse(stdout).rows as Record<string, number>[];
}

describe('bench decode', () => {
  it('prints the rows of the contract, with reads as predicted where every block is full', async () => {
    const rows = await rowsOf(['decode', '--lengths', '160,64', '--batch-size', '2']);
    expect(rows.map(({ S }) => S)).toEqual([64, 160]);
    for (const row of rows) {
      expect(Object.keys(row)).toEqual(['S', 'batch', ...TIMES, 'reads_measured', 'reads_predicted', 'tokens_per_s']);
      for (const name of TIMES) expect(row[name], name).toBeGreaterThan(0);
      expect((row.tokens_per_s * row.ms_total) / (1000 * 2)).toBeCloseTo(1, 2);
      // floor((S - 8) / 4) + 1 compressed, 4 blocks of 16, a window of 32
      expect(row.reads_predicted).toBe(Math.floor((row.S - 8) / 4) + 1 + 64 + 32);
      expect(row.reads_measured).toBe(row.reads_predicted);
    }
  });

  it('measures the branches as parts of the whole', async () => {
    // Times of a busy machine: one quiet measurement of several is enough.
    const isPart = async () => {
      const [row] = await rowsOf(['decode', '--lengths', '160']);
      return ['ms_cmp', 'ms_sel', 'ms_win'].every((name) => row[name] < row.ms_total);
    };
    await expect.poll(isPart).toBe(true);
  });

  it('can do without dense, as CSV and as a table', async () => {
    const words = ['bench', 'decode', '--config', config, '--quick', '--lengths', '40', '--no-dense'];
    const csv = await runCli([...words, '--csv']);
    expect(csv.stdout).toMatch(
      /^S,batch,ms_total,ms_cmp,ms_sel,ms_win,ms_dense,reads_measured,reads_predicted,tokens_per_s\n40,1,[\d.]+,[\d.]+,[\d.]+,[\d.]+,,\d+,105,[\d.]+\n$/,
    );
    const { stdout } = await runCli(words);
    expect(stdout).toMatch(/S +batch +total ms/);
    expect(stdout).toMatch(/\nweights: [\d.e-]+ GB, [\d.]+ GB\/s in the first row; memory: [\d.]+ GB\/s\n$/);
  });
});

describe('bench prefill', () => {
  it('prints a row for each length', async () => {
    const rows = await rowsOf(['prefill', '--lengths', '40,100', '--batch-size', '3']);
    expect(rows.map(({ S, batch }) => [S, batch])).toEqual([
      [40, 3],
      [100, 3],
    ]);
    for (const row of rows) {
      expect(Object.keys(row)).toEqual(['S', 'batch', 'kernel', 'ran', ...TIMES, 'tokens_per_s']);
      for (const name of TIMES) expect(row[name], name).toBeGreaterThan(0);
    }
  });

  it('compares kernels, by what was asked and what ran', async () => {
    const labels = async (words: readonly string[], env: Record<string, string> = {}) =>
      (await rowsOf(['prefill', '--no-dense', ...words], env)).map(({ S, kernel, ran }) => `${S} ${kernel}: ${ran}`);
    const all = ['--kernel', 'reference,v1,v2,adaptive', '--seq-len', '32,64'];
    expect(await labels(all, { NSA_SEL_RANGES_V2_MIN_S: '64' })).toEqual([
      ...['32 reference: reference', '64 reference: reference', '32 v1: v1', '64 v1: v1', '32 v2: v2', '64 v2: v2'],
      ...['32 adaptive: v1', '64 adaptive: v2'],
    ]);
    const one = ['--seq-len', '32'];
    expect(await labels(one)).toEqual(['32 adaptive: v1']);
    expect(await labels(one, { NSA_SEL_RANGES_V2: '1' })).toEqual(['32 v2: v2']);
    expect(await labels(one, { NSA_PREFILL_TILE: '16' })).toEqual(['32 adaptive: v1, then pages']);
    expect(await labels(one, { NSA_FORCE_PARITY: '1' })).toEqual(['32 adaptive: reference (all branches)']);
  });

  it('really runs another kernel, and names variables without effect', async () => {
    const rows = await rowsOf(['prefill', '--no-dense', '--kernel', 'reference,v1', '--seq-len', '64']);
    expect(rows.map(({ ms_sel }) => ms_sel === null)).toEqual([true, false]); // the float64 loop is no kernel
    const words = ['bench', 'prefill', '--config', config, '--quick', '--seq-len', '32', '--no-dense'];
    const { stderr } = await runCli(words, { env: { ...process.env, NSA_LR: '1', NSA_PREFILL_BATCHED: '1' } as never });
    expect(stderr).toContain('no effect on this bench: NSA_LR');
  });
});
