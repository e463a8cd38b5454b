import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { runCli } from '../testing/run.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-bench-train-'));
const config = join(folder, 'tiny.yaml');
writeFileSync(
  config,
  `model: { dim: 32, n_layers: 1, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8 }
nsa: { l: 8, d: 4, l_sel: 16, n_sel: 3, w: 24 }
train: { seq_len: 64 }
`,
);
afterAll(() => rmSync(folder, { recursive: true }));

const TINY = ['bench', 'train', '--config', config, '--steps', '2', '--threads', '1'];
const COLUMNS = [
  ...['config', 'attention', 'kernel', 'S', 'batch', 'tokens_per_s', 'ms_step', 'mfu', 'mfu_palm'],
  ...['peak_mem_mib', 'params', 'layers', 'precision', 'hfu'],
];

describe('bench train', () => {
  it('prints the JSON of the contract and nothing else on stdout', async () => {
    const { code, stdout, stderr } = await runCli([...TINY, '--attention', 'both', '--seq-len', '64,128', '--json']);
    expect(code).toBe(0);
    const result = JSON.parse(stdout);
    expect(Object.keys(result)).toEqual(['machine', 'device', 'threads', 'peak_gflops', 'rows']);
    expect(result).toMatchObject({ device: 'cpu', threads: 1 });
    const seen = result.rows.map(({ attention, S }: { attention: string; S: number }) => `${attention} ${S}`);
    expect(seen).toEqual(['nsa 64', 'nsa 128', 'dense 64', 'dense 128']);
    for (const row of result.rows) {
      expect(Object.keys(row)).toEqual(COLUMNS);
      expect((row.tokens_per_s * row.ms_step) / (1000 * row.S)).toBeCloseTo(1, 2);
      expect(row.mfu).toBeGreaterThan(0);
      expect(row.mfu).toBeLessThan(1);
      expect(row.mfu_palm).toBeGreaterThanOrEqual(row.mfu);
    }
    expect(stderr).toBe(''); // progress is for terminals
  });

  it('prints CSV', async () => {
    const { code, stdout } = await runCli([...TINY, '--batch-size', '1,2', '--csv']);
    expect(code).toBe(0);
    const lines = stdout.trimEnd().split('\n');
    expect(lines[0]).toBe(COLUMNS.join(','));
    expect(lines).toHaveLength(3);
  });

  it('prints a table, and with --profile where the time goes', async () => {
    const { code, stdout } = await runCli([...TINY, '--profile']);
    expect(code).toBe(0);
    expect(stdout).toContain('1 thread, measured peak');
    expect(stdout).toMatch(/^config +attn +kernel +S +batch +tok\/s +ms\/step +MFU/m);
    expect(stdout).toMatch(/^One step of .*tiny\.yaml, nsa, S 64:$/m);
    expect(stdout).toMatch(/^linear_forward +6 +[\d.]+ +[\d.]+ % +\d+$/m);
    expect(stdout).toMatch(/^adamw_step +\d+ +[\d.]+ +[\d.]+ %$/m);
  });

  it('puts the profile into the JSON when asked', async () => {
    const { stdout } = await runCli([...TINY, '--profile', '--json']);
    const [row] = JSON.parse(stdout).rows;
    expect(Object.keys(row)).toEqual([...COLUMNS, 'profile']);
    expect(Object.keys(row.profile[0])).toEqual(['name', 'calls', 'ms', 'share', 'gflops']);
  });

  it('refuses a device that is not there and a config that does not exist', async () => {
    const cuda = await runCli([...TINY, '--device', 'cuda']);
    expect([cuda.code, cuda.stdout]).toEqual([2, '']);
    const unknown = await runCli(['bench', 'train', '--config', 'nothing']);
    expect(unknown.code).toBe(2);
    expect(unknown.stderr).toContain('nothing: no such file');
  });
});
